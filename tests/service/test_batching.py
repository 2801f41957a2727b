"""Between the web side and the process with the model: no trace of who went away, and batches as large as said."""

import asyncio
import contextlib
import queue
import time
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import HTTPException
from litserve.utils import LitAPIStatus

from qualms.service.batching import Desk, ModelSide, WaitingLoop, server_of
from qualms.service.scoring import Question, Reply
from qualms.service.settings import Settings
from tests.service.services import digits, run_async, served, usual

pytestmark = pytest.mark.serve
QUESTION = Question([digits().pixels[0].numpy()])


def desk() -> Desk:
    made = Desk()
    made.response_buffer, made.request_queue, made.response_queue_id = {}, queue.Queue(), 0
    return made


async def asked(at: Desk, response: Any, status: Any) -> Reply:
    """Ask, and have that come back."""
    waiting = asyncio.create_task(at.ask(QUESTION))
    await asyncio.sleep(0)
    _, name, came, question = at.request_queue.get_nowait()
    assert question is QUESTION
    assert came == QUESTION.came
    at.response_buffer[name].response = (response, status)
    at.response_buffer[name].event.set()
    return await waiting


def test_a_reply_reaches_whoever_asked() -> None:
    at, reply = desk(), Reply([], 3)
    assert run_async(asked(at, reply, LitAPIStatus.OK)) is reply
    assert at.response_buffer == {}


@pytest.mark.parametrize(
    ("response", "status"), [(HTTPException(504, "Request timed out"), 504), (b"a pickled error", 500), (None, 500)]
)
def test_an_error_of_litserve_becomes_a_sentence(response: Any, status: int) -> None:
    at = desk()
    with pytest.raises(HTTPException) as caught:
        run_async(asked(at, response, LitAPIStatus.ERROR))
    assert caught.value.status_code == status
    assert caught.value.detail.endswith(".")
    assert at.response_buffer == {}


def test_nothing_is_kept_of_who_does_not_wait() -> None:
    at = desk()

    async def impatient() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await at.ask(QUESTION)

    run_async(impatient())
    assert at.response_buffer == {}


def test_a_batch_is_what_has_come_in_and_no_more_than_it_may_hold() -> None:
    side, waiting = ModelSide(served, Settings(batch=3)), queue.Queue[Any]()
    side.request_timeout = False
    for number in range(5):
        waiting.put((0, str(number), 0.0, number))
    loop = WaitingLoop()
    sizes = [[one[2] for one in loop.get_batch_requests(side, waiting, SimpleNamespace())[0]] for _ in range(2)]
    assert sizes == [[0, 1, 2], [3, 4]]


def test_what_the_door_has_answered_already_is_not_scored() -> None:
    side, waiting, now = ModelSide(served, Settings(deadline=5.0)), queue.Queue[Any](), time.monotonic()
    side.request_timeout = 5.0
    at = desk()
    at.request_queue = waiting

    async def ask() -> None:
        for age in (6.0, 1.0):  # the first one took its time to arrive
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.01):
                    await at.ask(Question([], came=now - age))

    run_async(ask())
    batch, dropped = WaitingLoop().get_batch_requests(side, waiting, SimpleNamespace(send=lambda *_: None))
    assert [question.came for *_, question in batch] == [now - 1.0]
    assert len(dropped) == 1


def test_one_question_is_a_batch_too() -> None:
    side = ModelSide(served, Settings(batch=1))
    side.served = usual()
    (reply,) = side.predict([QUESTION])
    assert reply.together == 1


def test_none_of_litserves_own_pages_are_there() -> None:
    server, at = server_of(served, Settings(deadline=7.0))
    assert server.app.routes == []
    assert isinstance(at, Desk)
    assert server.timeout == 7
