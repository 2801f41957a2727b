"""Between the web side and the process with the model: no trace of who went away, and batches as
large as said.
"""

import asyncio
import queue
import threading
import time
from copy import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fastapi import HTTPException
from litserve.utils import LitAPIStatus

from qualms.service.batching import BatchClient, ScoringWorker
from qualms.service.config import ServiceConfig
from qualms.service.scoring import ScoreRequest, ScoreResponse, ScoringService
from qualms.service.server import build_server
from tests.helpers.services import digits, run_async, served, starting, usual

pytestmark = pytest.mark.serve
QUESTION = ScoreRequest([digits().pixels[0].numpy()])


def make(_: object) -> ScoringService:
    return served()


def side_of(settings: ServiceConfig) -> ScoringWorker:
    return ScoringWorker(make, settings, starting())


def desk() -> BatchClient:
    made = BatchClient()
    made.response_buffer, made.request_queue, made.response_queue_id = {}, queue.Queue(), 0
    return made


async def asked(at: BatchClient, response: Any, status: Any) -> ScoreResponse:
    """Ask, and have that come back."""
    waiting = asyncio.create_task(at.score(QUESTION))
    _, name, came, question = await asyncio.to_thread(at.request_queue.get)
    assert question is QUESTION
    assert came == QUESTION.received_at
    at.response_buffer[name].response = (response, status)
    at.response_buffer[name].event.set()
    return await waiting


def test_a_reply_reaches_whoever_asked() -> None:
    at, reply = desk(), ScoreResponse([], 3)
    assert run_async(asked(at, reply, LitAPIStatus.OK)) is reply
    assert at.response_buffer == {}


@pytest.mark.parametrize(
    ("response", "reply"),
    [
        (HTTPException(504, "Request timed out"), ScoreResponse(None, timed_out=True)),
        (b"a pickled error", ScoreResponse(None, failed=True)),
        (None, ScoreResponse(None, failed=True)),
    ],
)
def test_an_error_of_litserve_is_a_reply_too(response: Any, reply: ScoreResponse) -> None:
    at = desk()
    assert run_async(asked(at, response, LitAPIStatus.ERROR)) == reply
    assert at.response_buffer == {}


def test_others_are_answered_while_a_question_is_handed_in() -> None:
    at, go, put = desk(), threading.Event(), threading.Event()
    at.request_queue = SimpleNamespace(put=lambda _: put.set() or go.wait(30))

    async def meanwhile() -> None:
        asking = asyncio.create_task(at.score(QUESTION))
        while not put.is_set():
            await asyncio.sleep(0.01)
        go.set()  # which only a loop that is free comes to
        (item,) = at.response_buffer.values()
        item.response = (ScoreResponse([], 1), LitAPIStatus.OK)
        item.event.set()
        assert await asking == ScoreResponse([], 1)

    began = time.monotonic()
    run_async(meanwhile())
    assert time.monotonic() - began < 20


def test_once_the_network_is_ready_nobody_is_asked_whether_it_is() -> None:
    there = starting()
    here = copy(there)
    assert here.progress().status == "warming up"
    there.finish(usual().model_info, usual().network.transform)
    assert here.progress().status == "ready"
    here.board.clear()
    assert here.progress().status == "ready"
    assert here.model_info == usual().model_info


def batches(side: ScoringWorker, *questions: ScoreRequest) -> list[list[ScoreRequest]]:
    """What is scored together, if these have come in."""
    waiting = queue.Queue[Any]()
    side.request_timeout = 30.0
    for number, one in enumerate(questions):
        waiting.put((0, str(number), one.received_at, one))
    found: list[list[ScoreRequest]] = []
    while sum(map(len, found)) < len(questions):
        found.append(
            [one[2] for one in side.loop.get_batch_requests(side, waiting, SimpleNamespace())[0]]
        )
    return found


def of(images: int, side: int = 8) -> ScoreRequest:
    return ScoreRequest([np.zeros((1, side, side), np.uint8)] * images)


def test_a_batch_is_what_has_come_in_and_no_more_than_it_may_hold() -> None:
    found = batches(side_of(ServiceConfig(batch=3)), *(of(1) for _ in range(5)))
    assert [len(batch) for batch in found] == [3, 2]


def test_a_batch_has_no_more_images_than_a_request_may_have() -> None:
    questions = [of(32), of(20), of(12), of(1), of(32), of(1)]
    found = batches(side_of(ServiceConfig(batch=16, max_images=32)), *questions)
    assert [[len(one.images) for one in batch] for batch in found] == [
        [32],
        [20, 12],
        [1],
        [32],
        [1],
    ]
    assert [
        one for batch in found for one in batch
    ] == questions  # none is lost, and the first to come is the first
    singles = batches(side_of(ServiceConfig(batch=4, max_images=1)), *(of(1) for _ in range(5)))
    assert [len(batch) for batch in singles] == [4, 1]


def test_a_batch_has_no_more_pixels_than_a_request_may_have() -> None:
    found = batches(
        side_of(ServiceConfig()), *(of(1, 3_000) for _ in range(5))
    )  # 9 of 25 million each
    assert [len(batch) for batch in found] == [2, 2, 1]
    low = batches(
        side_of(ServiceConfig(max_pixels=64)), *(of(1, 224) for _ in range(5))
    )  # made large by the fit
    assert [len(batch) for batch in low] == [5]


def test_what_the_door_has_answered_already_is_not_scored() -> None:
    side, waiting, now = side_of(ServiceConfig(deadline=5.0)), queue.Queue[Any](), time.monotonic()
    side.request_timeout = 5.0
    for age in (6.0, 1.0):  # the first one took its time to arrive
        waiting.put((0, str(age), now - age, ScoreRequest([], received_at=now - age)))
    batch, dropped = side.loop.get_batch_requests(
        side, waiting, SimpleNamespace(send=lambda *_: None)
    )
    assert [question.received_at for *_, question in batch] == [now - 1.0]
    assert dropped == [(0, "6.0")]


def test_the_process_with_the_model_knows_the_deadline() -> None:
    side = side_of(ServiceConfig(deadline=5.0))
    side.service = usual()
    late, good = side.predict(
        [replace(QUESTION, received_at=time.monotonic() - age) for age in (6.0, 1.0)]
    )
    assert late == ScoreResponse(None, timed_out=True)
    assert good.results is not None


def test_one_question_is_a_batch_too() -> None:
    side = side_of(ServiceConfig(batch=1))
    side.service = usual()
    (reply,) = side.predict(
        [replace(QUESTION, received_at=time.monotonic())]
    )  # not when this file was read
    assert reply.batch_images == 1


def test_none_of_litserves_own_pages_are_there() -> None:
    server, at = build_server(make, ServiceConfig(deadline=7.0), starting())
    assert server.app.routes == []
    assert isinstance(at, BatchClient)
    assert server.timeout == 7
