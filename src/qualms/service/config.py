"""Where the service listens, who may send requests, and how much it accepts.

Needs none of the extra's packages: `qualms serve --help` reads its defaults from here.
"""

import math
from dataclasses import dataclass, field

from qualms.errors import QualmsError

LOOPBACK = "127.0.0.1"
# The addresses that LitServe can bind to.
HOSTS = (LOOPBACK, "0.0.0.0", "::")
MIN_PORT, MAX_PORT = 1024, 65535  # the ports that LitServe accepts
MIN_TOKEN_CHARS = 16
# The fields of `ServiceConfig` that must be above 0.
LIMIT_NAMES = ("batch", "waiting", "deadline", "max_body", "max_images", "max_pixels")


@dataclass(frozen=True)
class ServiceConfig:
    """The address, the token and the limits of one service.

    Args:
        host: The address to listen on. Any other than the loopback address needs a token.
        port: The port, from 1024 to 65535.
        token: The secret that requests must send, as `Authorization: Bearer TOKEN`. None if they
            need no token.
        batch: The most requests that are scored together.
        waiting: The most requests that are being received, queued or scored. Further requests
            get 429.
        deadline: Seconds from a request's headers to its answer.
        max_body: The most bytes in the body of a request.
        max_images: The most images in a request.
        max_pixels: The most pixels in a request, summed over its images.

    Raises:
        QualmsError: If a value is invalid, or if the service would be open to a network without
            a token.
    """

    host: str = LOOPBACK
    port: int = 8000
    token: str | None = field(default=None, repr=False)
    batch: int = 16
    waiting: int = 64
    deadline: float = 30.0
    max_body: int = 16 * 2**20
    max_images: int = 32
    max_pixels: int = 25_000_000

    def __post_init__(self) -> None:
        """Check all values; raise a QualmsError for the first that is invalid."""
        self._check_address()
        self._check_token()
        for name in LIMIT_NAMES:
            self._check_limit(name)

    def _check_address(self) -> None:
        """Raise an error unless LitServe can listen on the host and the port."""
        if self.host not in HOSTS:
            raise QualmsError(
                f"the service cannot listen on {self.host!r}; use one of {', '.join(HOSTS)}."
            )
        if not MIN_PORT <= self.port <= MAX_PORT:
            raise QualmsError(
                f"port {self.port} cannot be used; choose one from {MIN_PORT} to {MAX_PORT}."
            )

    def _check_token(self) -> None:
        """Raise an error if the token is easy to guess, or missing on a host that others reach."""
        if self.token is None:
            if self.host != LOOPBACK:
                raise QualmsError(
                    f"anyone who can reach {self.host} could use the service; set a token in "
                    f"QUALMS_TOKEN, or listen on {LOOPBACK}."
                )
            return
        if len(self.token) < MIN_TOKEN_CHARS or not _is_visible_ascii(self.token):
            raise QualmsError(
                f"the token in QUALMS_TOKEN is invalid; use at least {MIN_TOKEN_CHARS} visible "
                "ASCII characters without spaces, such as the output of `openssl rand -hex 32`."
            )

    def _check_limit(self, name: str) -> None:
        """Raise an error unless the limit with this name is a finite number above 0."""
        limit = getattr(self, name)
        is_positive = 0 < limit < math.inf  # false for NaN
        if not is_positive:
            raise QualmsError(f"the service's limit {name!r} is {limit}; pass a number above 0.")


def _is_visible_ascii(text: str) -> bool:
    """Whether a text consists of visible ASCII characters, without spaces and control codes."""
    return all("!" <= character <= "~" for character in text)
