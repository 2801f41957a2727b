"""One connection, byte by byte: what is counted, what is answered, and when it ends."""

import asyncio
import re
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from qualms.service.connection import MAX_HEAD_BYTES, connection_factory
from qualms.service.lifecycle import exit_if_hung
from tests.helpers.services import run_async

pytestmark = pytest.mark.serve
GET = b"GET /healthz HTTP/1.1\r\nHost: a\r\n"
POST = b"POST / HTTP/1.1\r\nHost: a\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
FULL = len(GET + b"X: \r\n\r\n")
ANSWER = b"answered"


class Wire(asyncio.Transport):
    """A transport that stores what is written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.written, self.closed = b"", False

    def write(self, data: Any) -> None:
        self.written += data

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    @property
    def statuses(self) -> list[int]:
        return [int(each) for each in re.findall(rb"HTTP/1\.1 (\d+) ", self.written)]


def after(
    *reads: bytes | float,
    answers: Callable[[], Awaitable[Any]] | None = None,
    deadline: float = 60.0,
) -> Wire:
    """Feed a connection bytes, and seconds of waiting; return the wire with what it wrote.

    The app behind it waits for `answers`, reads no body, and answers.
    """

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await (answers or (lambda: asyncio.sleep(0)))()
        await send(
            {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"8")]}
        )
        await send({"type": "http.response.body", "body": ANSWER})

    async def all_of_it() -> Wire:
        config = uvicorn.Config(app, log_config=None, lifespan="off", timeout_keep_alive=0.2)
        state = ServerState()
        wire, one = (
            Wire(),
            connection_factory(deadline)(config=config, server_state=state, app_state={}),
        )
        one.connection_made(wire)
        for read in reads:
            if isinstance(read, float):
                await asyncio.sleep(read)
            elif not wire.closed:
                one.data_received(read)
                await asyncio.sleep(0)
        await asyncio.sleep(0.02)
        found = Wire()
        found.written, found.closed = wire.written, wire.closed
        one.connection_lost(None)
        for task in list(state.tasks):
            task.cancel()
        return found

    return run_async(all_of_it())


def never() -> Awaitable[Any]:
    return asyncio.sleep(3600)


def cut(data: bytes, size: int) -> list[bytes]:
    return [data[i : i + size] for i in range(0, len(data), size)]


@pytest.mark.parametrize(
    "size", [1000, MAX_HEAD_BYTES, 2**18], ids=["small reads", "middling reads", "one read"]
)
@pytest.mark.parametrize(("beyond", "status"), [(0, 200), (1, 431), (2**17, 431)])
def test_how_large_a_head_may_be_does_not_depend_on_how_it_arrives(
    size: int, beyond: int, status: int
) -> None:
    one = GET + b"X: " + b"y" * (MAX_HEAD_BYTES - FULL + beyond) + b"\r\n\r\n"
    long = (
        b"GET /"
        + b"y" * (MAX_HEAD_BYTES - len(b"GET / HTTP/1.1\r\nA: b\r\n\r\n") + beyond)
        + b" HTTP/1.1\r\nA: b\r\n\r\n"
    )
    for head in (one, long):
        assert len(head) == MAX_HEAD_BYTES + beyond
        assert after(*cut(head, size)).statuses == [status]


@pytest.mark.parametrize(
    "trailers",
    [b"X: y\r\n" * MAX_HEAD_BYTES, b"X: " + b"y" * 4 * MAX_HEAD_BYTES],
    ids=["many", "one long"],
)
def test_what_follows_a_body_in_chunks_is_counted_too(trailers: bytes) -> None:
    wire = after(CHUNKED, *cut(b"1\r\na\r\n0\r\n" + trailers, 5000), answers=never)
    assert (wire.statuses, wire.closed) == ([431], True)


def test_a_large_body_and_the_next_head_in_one_read_are_no_large_head() -> None:
    body = b"z" * 100_000
    first = POST + b"Content-Length: %d\r\n\r\n" % len(body)
    wire = after(first, body + GET, 0.05, b"\r\n")
    assert (wire.statuses, wire.closed) == ([200, 200], False)
    wire = after(first + body + GET, 0.05, b"\r\n")
    assert (wire.statuses, wire.closed) == ([200, 200], False)


@pytest.mark.parametrize(
    "second",
    [
        GET + b"X: " + b"y" * 2 * MAX_HEAD_BYTES,
        GET + b"X: " + b"y" * 2 * MAX_HEAD_BYTES + b"\r\n\r\n",
        b"\x00\r\n",
        GET + b"\x00",
    ],
)
def test_a_refusal_is_never_read_as_the_answer_to_an_earlier_request(second: bytes) -> None:
    for reads in (
        [GET + b"\r\n" + second, *[b"y" * MAX_HEAD_BYTES] * 2],
        [GET + b"\r\n", *cut(second, 5000)],
    ):
        wire = after(*reads, answers=never)
        assert (wire.written, wire.closed) == (b"", True)
    wire = after(GET + b"\r\n", 0.05, *cut(second, 5000))  # which was answered
    assert wire.statuses in ([200, 400], [200, 431])


def test_a_late_head_is_not_told_so_in_front_of_an_earlier_answer() -> None:
    wire = after(GET + b"\r\n" + GET, 0.2, answers=never, deadline=0.1)
    assert (wire.written, wire.closed) == (b"", True)
    assert after(GET + b"\r\n", 0.05, GET, 0.2, deadline=0.1).statuses == [200, 408]


def test_a_body_that_breaks_off_its_rules_after_the_answer_is_not_answered_again() -> None:
    assert after(CHUNKED, b"zz\r\n", answers=never).statuses == [400]
    wire = after(CHUNKED, 0.05, b"zz\r\n")
    assert (wire.statuses, wire.closed) == ([200], True)


def test_a_connection_serves_one_request_after_the_other_and_ends_when_idle() -> None:
    wire = after(GET + b"\r\n", 0.05, GET + b"\r\n", 0.05)
    assert (wire.statuses, wire.closed) == ([200, 200], False)
    wire = after(GET + b"\r\n", 0.05, GET + b"\r\n", 0.4)
    assert (wire.statuses, wire.closed) == ([200, 200], True)


def test_neither_empty_lines_nor_a_body_that_nobody_reads_keep_an_idle_connection() -> None:
    wire = after(GET + b"\r\n", 0.05, *[b"\r\n", 0.1] * 4)
    assert (wire.statuses, wire.closed) == ([200], True)
    wire = after(POST + b"Content-Length: 2\r\n\r\n", 0.05, b"ab", 0.4)
    assert (wire.statuses, wire.closed) == ([200], True)
    wire = after(GET + b"\r\n", 0.05, b"\r\n", 0.05, GET + b"\r\n", 0.05)
    assert (wire.statuses, wire.closed) == ([200, 200], False)


@pytest.mark.parametrize("deadline", [1e9, 1e300])
def test_a_deadline_of_any_length_can_be_waited_for(deadline: float) -> None:
    before = threading.active_count()
    with exit_if_hung(deadline, 16):
        assert threading.active_count() == before + 1
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join(5)
    assert threading.active_count() == before
