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

# The most bytes of a request line and headers together, or of the trailers of a chunked body.
MAX_HEAD_BYTES = 2**16
TOO_LARGE = (
    f"the request's headers have more than {MAX_HEAD_BYTES:,} bytes; send fewer or shorter ones."
)
INVALID = "this is not a valid HTTP/1.1 request; check its first line, headers and length."
# The bytes of a header besides its name and value.
SEPARATOR = b": \r\n"
# The bytes of a request line and of the end of a head, besides method and address.
REQUEST_LINE = b"  HTTP/1.1\r\n\r\n"


class LimitedConnection(HttpToolsProtocol):
    """uvicorn's connection, with limits on the head of a request and on the time to send it.

    A client has `deadline` seconds to send the head of a request. The middleware answers `deadline`
    seconds after the head; the connection stays open for as long again, since many clients read an
    answer only after they have sent the whole body.

    A request consists of parts: its head, the pieces of its body, and its end. The parser reports a
    part only once it has ended. The bytes received since then are counted separately, because the
    parser would never report a line without an end.

    Args:
        args: Positional arguments of uvicorn's class.
        deadline: Seconds for the head of a request.
        kwargs: Keyword arguments of uvicorn's class.

    Attributes:
        is_in_head: Whether a request has begun, and its headers have not ended.
        head_bytes: The number of bytes of the head that the parser has reported, or of the
            trailers.
        unparsed_bytes: The number of bytes received since the last part ended.
        num_ended_parts: The number of parts that have ended.
        timer: Calls `_time_out` when the time for the current part of a request is over; None if
            no timeout is set.
    """

    def __init__(self, *args: Any, deadline: float, **kwargs: Any) -> None:
        """Begin without a request; asyncio calls `connection_made` once a client has connected."""
        super().__init__(*args, **kwargs)
        self.deadline = deadline
        self.is_in_head = False
        self.head_bytes = 0
        self.unparsed_bytes = 0
        self.num_ended_parts = 0
        self.timer: asyncio.TimerHandle | None = None

    # Called by asyncio.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timeout for the head of the first request."""
        super().connection_made(transport)
        self._set_timeout(self.deadline)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timeout."""
        self._set_timeout(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse received bytes; refuse the request if too many have arrived without ending a part.

        If the connection is idle, because an answer has been sent, start the timeout for the next
        request.
        """
        ended_parts_before = self.num_ended_parts
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self.num_ended_parts == ended_parts_before:
            self.unparsed_bytes += len(data)
        if self.unparsed_bytes > MAX_HEAD_BYTES:
            self._refuse(431, TOO_LARGE)
        elif self.timer is None and self._is_idle():
            # uvicorn cancels its own keep-alive timeout as soon as it receives any bytes.
            self._set_timeout(self.timeout_keep_alive)

    # Called by the parser.

    def on_message_begin(self) -> None:
        """Begin the head of a request: reset the counts, and start the timeout for the head."""
        super().on_message_begin()
        self.is_in_head = True
        self.head_bytes = 0
        self.unparsed_bytes = 0
        self._set_timeout(self.deadline)

    def on_url(self, url: bytes) -> None:
        """Count the bytes of a piece of the address, and call uvicorn's method."""
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count the bytes of a header, or of a trailer, and call uvicorn's method."""
        self._count_head(len(name) + len(value) + len(SEPARATOR))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """End the head, and start the timeout of the connection: twice the deadline.

        The middleware answers at the deadline at the latest; as long again is left for a client
        that reads the answer only after it has sent the whole body.
        """
        # The method and the fixed bytes of the head; `on_url` and `on_header` have counted the rest.
        self._count_head(len(self.parser.get_method()) + len(REQUEST_LINE))
        self.is_in_head = False
        self._end_part()
        self._set_timeout(2 * self.deadline)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Note that a piece of the body was parsed, and call uvicorn's method."""
        # The middleware limits the size of the body, so its bytes are not counted here.
        self._end_part()
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Cancel the timeout, since all of the request has arrived, and call uvicorn's method."""
        self._end_part()
        self._set_timeout(None)
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer a request that the parser rejects; uvicorn calls this, and logs its own message.

        Args:
            msg: uvicorn's message, which is not sent: the answer is a sentence of JSON instead.
        """
        if self.head_bytes > MAX_HEAD_BYTES:
            self._refuse(431, TOO_LARGE)
        else:
            self._refuse(400, INVALID)

    def _count_head(self, num_bytes: int) -> None:
        """Add to the bytes of the head, and stop the parser if there are too many.

        Raises:
            ValueError: If there are more than `MAX_HEAD_BYTES`. The parser turns it into an error
                of its own, and uvicorn then calls `send_400_response`.
        """
        self.head_bytes += num_bytes
        if self.head_bytes > MAX_HEAD_BYTES:
            raise ValueError(TOO_LARGE)

    def _end_part(self) -> None:
        """Note that a part of a request was parsed whole: its head, a piece of body, or its end.

        `data_received` refuses a request of which too much arrives without that.
        """
        self.num_ended_parts += 1
        self.unparsed_bytes = 0

    def _is_idle(self) -> bool:
        """Whether no request is being handled: the last one whose head was complete is answered."""
        return self.cycle is not None and self.cycle.response_complete

    def _set_timeout(self, seconds: float | None) -> None:
        """Replace the timeout, if one is set, by another one.

        Args:
            seconds: The time from now until `_time_out` is called. None for no timeout.
        """
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        if seconds is not None:
            self.timer = self.loop.call_later(seconds, self._time_out)

    def _time_out(self) -> None:
        """Close the connection; a client that has sent a part of a head gets 408 before that."""
        if self.is_in_head:
            limit = f"{self.deadline:g} s"
            self._refuse(
                408, f"the headers did not arrive within {limit}; send them faster, or fewer."
            )
        else:
            self.transport.close()

    def _refuse(self, status: int, message: str) -> None:
        """Answer with an error, if the client expects an answer now, and close the connection.

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
        """Whether the client would take an answer for the answer to its current request.

        If an earlier request has no answer yet, the client would take it for the answer to that
        one; if the current request already has an answer, the client does not expect another.
        """
        # uvicorn's state of the last request whose head is complete; None if there is none yet.
        if self.cycle is None:
            return True
        is_in_body = self.cycle.scope is self.scope and self.cycle.more_body
        if is_in_body:
            # `pipeline` holds requests that were received before earlier ones were answered.
            return not self.cycle.response_started and not self.pipeline
        # In a head, or in an invalid request: is the request before it answered?
        return self.cycle.response_complete


def connection_factory(deadline: float) -> Callable[..., LimitedConnection]:
    """Return the function that uvicorn calls to build the protocol object of each connection.

    Args:
        deadline: Seconds for the head of a request.
    """
    return partial(LimitedConnection, deadline=deadline)
