"""One connection: how large a request's head may be, and how long a client may take to send a
request.
"""

import asyncio
import json
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD = (
    2**16
)  # bytes of a request's first line and headers, and of the trailers after a body in chunks
TOO_LARGE = f"the request's headers have more than {HEAD:,} bytes; send fewer or shorter ones."


class Connection(HttpToolsProtocol):
    """uvicorn's, which would wait for ever for the rest of a request, and hold whatever headers
    come meanwhile.

    A client has the deadline for a request's head. It has as long again for a body: the door
    answers at the deadline, and a body that was refused is read on, so that the client comes to
    read why.
    """

    def __init__(self, *given: Any, deadline: float, **more: Any) -> None:
        super().__init__(*given, **more)
        self.deadline = deadline
        self.in_head = False  # a request has begun, and its headers have not ended
        self.fields = 0  # bytes of what has been read whole of its head
        self.unread = (
            0  # bytes that came since a part of a request ended: a line without end is in no field
        )
        self.ended = 0  # such parts so far
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
        ended = self.ended
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self.ended == ended:  # or some of them are of another part
            self.unread += len(data)
        if self.unread > HEAD:
            self._refuse(431, TOO_LARGE)
        elif self.patience is None and self.cycle is not None and self.cycle.response_complete:
            # uvicorn waits no longer for the next request once anything came, be it an empty line.
            self._wait(self.timeout_keep_alive)

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self.in_head, self.fields, self.unread = True, 0, 0
        self._wait(self.deadline)

    def on_url(self, url: bytes) -> None:
        """Some of its address is read."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """One of its headers is read, or one of the trailers."""
        self._count(len(name) + len(value) + len(": \r\n"))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Its head is read."""
        self._count(len(self.parser.get_method()) + len("  HTTP/1.1\r\n\r\n"))
        self.in_head = False
        self._end_part()
        self._wait(2 * self.deadline)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Some of its body is read, which the door counts."""
        self._end_part()
        super().on_body(body)

    def on_message_complete(self) -> None:
        """All of it is read."""
        self._end_part()
        self._wait(None)
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Something came that is no request, or too large a one; uvicorn has logged it."""
        if self.fields > HEAD:
            self._refuse(431, TOO_LARGE)
        else:
            self._refuse(
                400,
                "this is not a request of HTTP/1.1; check its first line, its headers and its length.",
            )

    def _count(self, size: int) -> None:
        self.fields += size
        if self.fields > HEAD:
            raise ValueError(TOO_LARGE)  # stops the parser, and uvicorn calls `send_400_response`

    def _end_part(self) -> None:
        self.ended += 1
        self.unread = 0

    def _wait(self, seconds: float | None) -> None:
        if self.patience is not None:
            self.patience.cancel()
        self.patience = None if seconds is None else self.loop.call_later(seconds, self._give_up)

    def _give_up(self) -> None:
        if self.in_head:
            self._refuse(
                408, f"the headers did not arrive within {self.deadline:g} s; send less, or faster."
            )
        else:
            self.transport.close()

    def _refuse(self, status: int, words: str) -> None:
        if self._is_next():
            body = json.dumps({"error": words}).encode()
            line = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}"
            fields = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close"
            self.transport.write(f"{line}\r\n{fields}\r\n\r\n".encode() + body)
        self.transport.close()

    def _is_next(self) -> bool:
        """Whether what is written now answers the request that is being read, and no earlier one."""
        if self.cycle is None:
            return True
        if self.cycle.scope is self.scope and self.cycle.more_body:  # it is in its body
            return not self.cycle.response_started and not self.pipeline
        return self.cycle.response_complete


def connections(deadline: float) -> Callable[..., Connection]:
    """What uvicorn makes of each connection."""
    return partial(Connection, deadline=deadline)
