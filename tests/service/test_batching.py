"""Between the process that answers HTTP and the one with the model: responses reach their requests,
and batches stay within their limits.
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
REQUEST = ScoreRequest([digits().pixels[0].numpy()])


def make(_: object) -> ScoringService:
    return served()


def side_of(settings: ServiceConfig) -> ScoringWorker:
    return ScoringWorker(make, settings, starting())


def batch_client() -> BatchClient:
    client = BatchClient()
    client.response_buffer, client.request_queue, client.response_queue_id = {}, queue.Queue(), 0
    return client


async def respond(client: BatchClient, response: Any, status: Any) -> ScoreResponse:
    """Send a request, and let this come back."""
    waiting = asyncio.create_task(client.score(REQUEST))
    _, name, received_at, request = await asyncio.to_thread(client.request_queue.get)
    assert request is REQUEST
    assert received_at == REQUEST.received_at
    client.response_buffer[name].response = (response, status)
    client.response_buffer[name].event.set()
    return await waiting


def test_a_response_reaches_its_request() -> None:
    client, response = batch_client(), ScoreResponse([], 3)
    assert run_async(respond(client, response, LitAPIStatus.OK)) is response
    assert client.response_buffer == {}


@pytest.mark.parametrize(
    ("raw", "response"),
    [
        (HTTPException(504, "Request timed out"), ScoreResponse(None, timed_out=True)),
        (b"a pickled error", ScoreResponse(None, failed=True)),
        (None, ScoreResponse(None, failed=True)),
    ],
)
def test_an_error_of_litserve_is_a_response_too(raw: Any, response: ScoreResponse) -> None:
    client = batch_client()
    assert run_async(respond(client, raw, LitAPIStatus.ERROR)) == response
    assert client.response_buffer == {}


def test_other_requests_are_answered_while_one_is_queued() -> None:
    client, go, put = batch_client(), threading.Event(), threading.Event()
    client.request_queue = SimpleNamespace(put=lambda _: put.set() or go.wait(30))

    async def meanwhile() -> None:
        asking = asyncio.create_task(client.score(REQUEST))
        while not put.is_set():
            await asyncio.sleep(0.01)
        go.set()  # which only a loop that is free comes to
        (item,) = client.response_buffer.values()
        item.response = (ScoreResponse([], 1), LitAPIStatus.OK)
        item.event.set()
        assert await asking == ScoreResponse([], 1)

    began = time.monotonic()
    run_async(meanwhile())
    assert time.monotonic() - began < 20


def test_once_the_network_is_ready_the_board_is_not_read() -> None:
    there = starting()
    here = copy(there)
    assert here.progress().status == "warming up"
    there.finish(usual().model_info, usual().network.transform)
    assert here.progress().status == "ready"
    here.board.clear()
    assert here.progress().status == "ready"
    assert here.model_info == usual().model_info


def batches(side: ScoringWorker, *requests: ScoreRequest) -> list[list[ScoreRequest]]:
    """Return the batches in which waiting requests are scored."""
    waiting = queue.Queue[Any]()
    side.request_timeout = 30.0
    for number, one in enumerate(requests):
        waiting.put((0, str(number), one.received_at, one))
    found: list[list[ScoreRequest]] = []
    while sum(map(len, found)) < len(requests):
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
    requests = [of(32), of(20), of(12), of(1), of(32), of(1)]
    found = batches(side_of(ServiceConfig(batch=16, max_images=32)), *requests)
    assert [[len(one.images) for one in batch] for batch in found] == [
        [32],
        [20, 12],
        [1],
        [32],
        [1],
    ]
    assert [
        one for batch in found for one in batch
    ] == requests  # none is lost, and the first to come is the first
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


def test_a_request_that_was_answered_504_is_not_scored() -> None:
    side, waiting, now = side_of(ServiceConfig(deadline=5.0)), queue.Queue[Any](), time.monotonic()
    side.request_timeout = 5.0
    for age in (6.0, 1.0):  # the first one took its time to arrive
        waiting.put((0, str(age), now - age, ScoreRequest([], received_at=now - age)))
    batch, dropped = side.loop.get_batch_requests(
        side, waiting, SimpleNamespace(send=lambda *_: None)
    )
    assert [request.received_at for *_, request in batch] == [now - 1.0]
    assert dropped == [(0, "6.0")]


def test_the_process_with_the_model_knows_the_deadline() -> None:
    side = side_of(ServiceConfig(deadline=5.0))
    side.service = usual()
    late, good = side.predict(
        [replace(REQUEST, received_at=time.monotonic() - age) for age in (6.0, 1.0)]
    )
    assert late == ScoreResponse(None, timed_out=True)
    assert good.results is not None


def test_one_request_is_a_batch_too() -> None:
    side = side_of(ServiceConfig(batch=1))
    side.service = usual()
    (response,) = side.predict(
        [replace(REQUEST, received_at=time.monotonic())]
    )  # not when this file was read
    assert response.batch_images == 1


def test_none_of_litserves_own_pages_are_there() -> None:
    server, client = build_server(make, ServiceConfig(deadline=7.0), starting())
    assert server.app.routes == []
    assert isinstance(client, BatchClient)
    assert server.timeout == 7
