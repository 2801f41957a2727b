"""Where the service listens, who may ask, and how much it takes on."""

import math
from dataclasses import dataclass, field

from qualms.errors import QualmsError

LOOPBACK = "127.0.0.1"
HOSTS = (LOOPBACK, "0.0.0.0", "::")  # what LitServe binds to
LEAST_TOKEN = 16  # characters


@dataclass(frozen=True)
class Settings:
    """How one service runs.

    Args:
        host: the address to listen on. Any but the loopback address needs a token.
        port: from 1024 on.
        token: what requests must carry as `Authorization: Bearer …`; None asks for nothing.
        batch: the most requests that are scored together.
        waiting: the most requests that are read, waiting or being scored; a further one is answered
            429.
        deadline: seconds from a request's headers to its answer.
        body: bytes of a request.
        images: in one request.
        pixels: in all images of one request together.
    """

    host: str = LOOPBACK
    port: int = 8000
    token: str | None = field(default=None, repr=False)
    batch: int = 16
    waiting: int = 64
    deadline: float = 30.0
    body: int = 16 * 2**20
    images: int = 32
    pixels: int = 25_000_000

    def __post_init__(self) -> None:
        if self.host not in HOSTS:
            raise QualmsError(
                f"the service cannot listen on {self.host!r}; use one of {', '.join(HOSTS)}."
            )
        if not 1024 <= self.port <= 65535:
            raise QualmsError(f"the port is {self.port}; use one from 1024 to 65535.")
        if self.token is not None and (len(self.token) < LEAST_TOKEN or not _visible(self.token)):
            raise QualmsError(
                f"the token in QUALMS_TOKEN is no good; use {LEAST_TOKEN} or more visible ASCII characters without "
                "spaces, such as those of `openssl rand -hex 32`."
            )
        if self.host != LOOPBACK and self.token is None:
            raise QualmsError(
                f"the service would be open to everybody who reaches {self.host}; set a token in QUALMS_TOKEN, or "
                f"listen on {LOOPBACK}."
            )
        for name in ("batch", "waiting", "deadline", "body", "images", "pixels"):
            limit = getattr(self, name)
            if not 0 < limit < math.inf:  # not a number is neither
                raise QualmsError(
                    f"the limit {name!r} of the service is {limit}; it must be a number above 0."
                )


def _visible(text: str) -> bool:
    return all("!" <= character <= "~" for character in text)
