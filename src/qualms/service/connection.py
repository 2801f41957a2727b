"""One HTTP connection: limits on the head of a request, and on the time to send a request.

Written by hand, because uvicorn has no limits on what has not fully arrived. Its
`timeout_keep_alive` ends at the first byte of the next request, an empty line included. Its
`h11_max_incomplete_event_size` exists for the slower h11 parser only, misses a large head that
arrives in one read, and answers 400 in plain text.
"""

import asyncio
import json
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

# Of the request line and the headers, or of a chunked body's trailers.
MAX_HEAD_BYTES = 2**16
TOO_LARGE = (
    f"the request's headers have more than {MAX_HEAD_BYTES:,} bytes; send fewer or shorter ones."
)
INVALID = "this is not a valid HTTP/1.1 request; check its first line, headers and length."
# The bytes of a header besides its name and value.
SEPARATOR = b": \r\n"
# The bytes of a head besides method, address and headers.
REQUEST_LINE = b"  HTTP/1.1\r\n\r\n"


class LimitedConnection(HttpToolsProtocol):
    """uvicorn's connection, with limits on the head of a request and on the time to send it.

    A client has the deadline to send a request's head, and as long again for its body. The
    middleware answers at the deadline, and a refused body is read on, so that the client comes to
    read the answer.

    A request consists of parts: its head, the pieces of its body, and its end. The parser reports
    each part that has ended. What arrives in between is counted apart, because a line that never
    ends is in no header yet.

    Args:
        args: Positional arguments of uvicorn's class.
        deadline: Seconds for the head of a request.
        kwargs: Keyword arguments of uvicorn's class.

    Attributes:
        is_in_head: Whether a request has begun, and its headers have not ended.
        head_bytes: The length of the parsed lines of the head, or of the trailers.
        unparsed_bytes: The number of bytes received since the last part ended.
        parts_ended: The number of parts that have ended.
        timeout: When the client loses the connection, or gets 408 in the middle of a head.
    """

    def __init__(self, *args: Any, deadline: float, **kwargs: Any) -> None:
        """Begin without a request; the time runs from `connection_made`."""
        super().__init__(*args, **kwargs)
        self.deadline = deadline
        self.is_in_head = False
        self.head_bytes = 0
        self.unparsed_bytes = 0
        self.parts_ended = 0
        self.timeout: asyncio.TimerHandle | None = None

    # Called by asyncio.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the time in which the head of the first request must arrive."""
        super().connection_made(transport)
        self._set_timeout(self.deadline)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timeout."""
        self._set_timeout(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse received bytes, and close the connection if too many end no part of a request.

        Once an answer has been sent and the connection is idle, start the time that it may stay
        open.
        """
        parts_before = self.parts_ended
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self.parts_ended == parts_before:
            self.unparsed_bytes += len(data)
        if self.unparsed_bytes > MAX_HEAD_BYTES:
            self._refuse(431, TOO_LARGE)
        elif self.timeout is None and self._is_idle():
            # uvicorn has just ended its own timeout.
            self._set_timeout(self.timeout_keep_alive)

    # Called by the parser.

    def on_message_begin(self) -> None:
        """Begin the head of a request: reset the counts, and start the time for it."""
        super().on_message_begin()
        self.is_in_head = True
        self.head_bytes = 0
        self.unparsed_bytes = 0
        self._set_timeout(self.deadline)

    def on_url(self, url: bytes) -> None:
        """Count the bytes of a piece of the address, and pass it on."""
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count the bytes of a header, or of a trailer, and pass it on."""
        self._count_head(len(name) + len(value) + len(SEPARATOR))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """End the head, and start the time for the body: twice the deadline, from now.

        The middleware answers at the deadline; the rest is for the client to read the answer.
        """
        self._count_head(len(self.parser.get_method()) + len(REQUEST_LINE))
        self.is_in_head = False
        self._end_part()
        self._set_timeout(2 * self.deadline)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Pass on a piece of the body, whose bytes the middleware counts."""
        self._end_part()
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Cancel the timeout, now that all of the request has arrived."""
        self._end_part()
        self._set_timeout(None)
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse what the parser rejects, as one sentence of JSON; called by uvicorn, which logs.

        Args:
            msg: uvicorn's message, which is not sent.
        """
        if self.head_bytes > MAX_HEAD_BYTES:
            self._refuse(431, TOO_LARGE)
        else:
            self._refuse(400, INVALID)

    def _count_head(self, size: int) -> None:
        """Count `size` bytes of the head, and stop the parser if there are too many.

        Raises:
            ValueError: If there are more than `MAX_HEAD_BYTES`. The parser turns it into an error
                of its own, and uvicorn then calls `send_400_response`.
        """
        self.head_bytes += size
        if self.head_bytes > MAX_HEAD_BYTES:
            raise ValueError(TOO_LARGE)

    def _end_part(self) -> None:
        """Count a part of a request that has ended: its head, a piece of its body, or its end."""
        self.parts_ended += 1
        self.unparsed_bytes = 0

    def _is_idle(self) -> bool:
        """Whether the last request was answered, and no other has begun."""
        return self.cycle is not None and self.cycle.response_complete

    def _set_timeout(self, seconds: float | None) -> None:
        """Cancel the timeout, and set another one, after which `_time_out` is called.

        Args:
            seconds: The time from now. None for no timeout.
        """
        if self.timeout is not None:
            self.timeout.cancel()
            self.timeout = None
        if seconds is not None:
            self.timeout = self.loop.call_later(seconds, self._time_out)

    def _time_out(self) -> None:
        """Close the connection; a client in the middle of a head gets 408."""
        if self.is_in_head:
            limit = f"{self.deadline:g} s"
            self._refuse(
                408, f"the headers did not arrive within {limit}; send them faster, or fewer."
            )
        else:
            self.transport.close()

    def _refuse(self, status: int, message: str) -> None:
        """Answer with one sentence, if the client can read it, and close the connection.

        Args:
            status: The HTTP status.
            message: One sentence: what is wrong, and what to do.
        """
        if self._can_answer():
            body = json.dumps({"error": message}).encode()
            lines = [
                f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
                "content-type: application/json",
                f"content-length: {len(body)}",
                "connection: close",
            ]
            head = "\r\n".join(lines).encode()
            self.transport.write(head + b"\r\n\r\n" + body)
        self.transport.close()

    def _can_answer(self) -> bool:
        """Whether an answer now would reach the client as the answer to its current request.

        Otherwise the client would take it for the answer to an earlier request, or has already
        received an answer.
        """
        if self.cycle is None:
            return True
        is_in_body = self.cycle.scope is self.scope and self.cycle.more_body
        if is_in_body:
            return not self.cycle.response_started and not self.pipeline
        return self.cycle.response_complete


def connection_factory(deadline: float) -> Callable[..., LimitedConnection]:
    """Return the function that uvicorn calls to build the protocol object of each connection.

    Args:
        deadline: Seconds for the head of a request.
    """
    return partial(LimitedConnection, deadline=deadline)
