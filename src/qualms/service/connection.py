"""One connection: how large a request's head may be, and how long a client may take to send a request."""

import asyncio
import json
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD = 2**16  # bytes of a request's first line and headers; a read beyond them may hold a few more


class Connection(HttpToolsProtocol):
    """uvicorn's, which would wait for ever for the rest of a request, and hold whatever headers come meanwhile.

    A client has the deadline for a request's head. It has as long again for a body: the door answers at the deadline,
    and a body that was refused is read on, so that the client comes to read why.
    """

    def __init__(self, *given: Any, deadline: float, **more: Any) -> None:
        super().__init__(*given, **more)
        self.deadline = deadline
        self.head: int | None = 0  # bytes of it, while it is read
        self.patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """A client is there, and may begin."""
        super().connection_made(transport)
        self._wait(self.deadline)

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone."""
        self._wait(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Some bytes came."""
        super().data_received(data)
        if self.head is None or self.transport.is_closing():
            return
        self.head += len(data)
        if self.head > HEAD:
            self._refuse(431, f"the request's headers have more than {HEAD:,} bytes; send fewer or shorter ones.")

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self.head = 0
        self._wait(self.deadline)

    def on_headers_complete(self) -> None:
        """Its head is read."""
        self.head = None
        self._wait(2 * self.deadline)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """All of it is read."""
        self._wait(None)
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Something came that is no request; uvicorn has logged it."""
        self._refuse(400, "this is not a request of HTTP/1.1; check its first line, its headers and its length.")

    def _wait(self, seconds: float | None) -> None:
        if self.patience is not None:
            self.patience.cancel()
        self.patience = None if seconds is None else self.loop.call_later(seconds, self._give_up)

    def _give_up(self) -> None:
        if self.head:
            self._refuse(408, f"the headers did not arrive within {self.deadline:g} s; send less, or faster.")
        else:
            self.transport.close()

    def _refuse(self, status: int, words: str) -> None:
        body = json.dumps({"error": words}).encode()
        line = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}"
        fields = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close"
        self.transport.write(f"{line}\r\n{fields}\r\n\r\n".encode() + body)
        self.transport.close()


def connections(deadline: float) -> Callable[..., Connection]:
    """What uvicorn makes of each connection."""
    return partial(Connection, deadline=deadline)
