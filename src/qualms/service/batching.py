"""Batches across requests, by LitServe: the web side asks, one process with the model answers."""

import asyncio
import signal
import time
from collections.abc import Callable, Sequence
from queue import Empty
from typing import Any
from uuid import uuid4

from fastapi import HTTPException
from litserve import LitAPI, LitServer
from litserve.loops.base import collate_requests
from litserve.loops.simple_loops import BatchedLoop
from litserve.specs.base import LitSpec
from litserve.utils import LitAPIStatus, ResponseBufferItem, WorkerSetupStatus

from qualms.errors import QualmsError
from qualms.service.scoring import Question, Reply, Served, replies
from qualms.service.settings import Settings

PATH = "/v1/score"  # by which LitServe calls its queue
WAIT = 1.0  # seconds that the process with the model waits for work before it looks whether to stop


class Desk(LitSpec):
    """Where the web side hands in questions and waits for the replies."""

    def __init__(self) -> None:
        super().__init__()
        self.api_path = PATH

    async def ask(self, question: Question) -> Reply:
        """Put a question into LitServe's queue, and wait for its reply."""
        item, name = ResponseBufferItem(asyncio.Event()), uuid4().hex
        self.response_buffer[name] = item
        try:
            # LitServe drops what has waited for the deadline since then: the door has answered it.
            self.request_queue.put((self.response_queue_id, name, question.came, question))
            await item.event.wait()
        finally:  # also if nobody waits any more: a reply that comes later is dropped
            del self.response_buffer[name]
        reply, status = item.response
        if status == LitAPIStatus.OK:
            return reply
        if isinstance(reply, HTTPException):  # LitServe's own, for what has waited too long
            raise HTTPException(504, "the request waited too long to be scored; try again later.")
        raise HTTPException(500, "the images could not be scored; the service's log has the details.")

    def decode_request(self, request: Question, context_kwargs: Any = None) -> Question:
        """Questions come decoded: what is wrong with one was told before it was handed in."""
        return request

    def encode_response(self, output: Reply, context_kwargs: Any = None) -> Reply:
        """Replies go out as they are."""
        return output


class ModelSide(LitAPI):
    """The process with the model. `make` builds what it serves there: not every model can be sent to a process."""

    def __init__(self, make: Callable[[], Served], settings: Settings) -> None:
        super().__init__(max_batch_size=settings.batch, loop=WaitingLoop(), spec=Desk())
        self.make = make

    def setup(self, device: str) -> None:
        """Load the model, once."""
        # Ctrl-C reaches every process; this one goes on until the web side has its replies, and is then stopped.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self.served = self.make()
        self.served.warm_up()

    def predict(self, x: Sequence[Question], **more: Any) -> list[Reply]:
        """The replies to a batch of questions; LitServe hands in a single one as it does several."""
        return replies(self.served, x)


class WaitingLoop(BatchedLoop):
    """LitServe's batches, from a queue that is waited for.

    LitServe asks its queue a thousand times a second or more, which keeps a core busy while nothing is to be done.
    """

    def get_batch_requests(self, lit_api: LitAPI, request_queue: Any, transport: Any) -> tuple[list[Any], list[Any]]:
        """What has come in, as soon as something has: no more requests than a batch takes."""
        try:
            first = request_queue.get(timeout=WAIT)
        except Empty:
            return [], []
        return collate_requests(self, lit_api, _Rest(first, request_queue), transport)


class _Rest:
    """A queue from which the first item has been taken already."""

    def __init__(self, first: Any, queue: Any) -> None:
        self.first, self.queue = [first], queue

    def get_nowait(self) -> Any:
        return self.first.pop() if self.first else self.queue.get_nowait()


class Server(LitServer):
    """LitServe's server, which would wait for ever for a process that was killed as it loaded the network."""

    def verify_worker_status(self) -> None:
        """Wait until the network is loaded."""
        while not ready(self):
            if not all(process.is_alive() for process in self.inference_workers):
                raise QualmsError("the process with the network ended as it loaded it; memory may have run out.")
            time.sleep(0.05)


def server_of(make: Callable[[], Served], settings: Settings) -> tuple[LitServer, Desk]:
    """LitServe's server, with none of its own pages, and the desk to ask at."""
    api = ModelSide(make, settings)
    server = Server(api, accelerator="cpu", devices=1, timeout=settings.deadline)  # `make` knows the device
    server.app.router.routes.clear()
    server.uvicorn_graceful_timeout = settings.deadline + 5
    return server, api.spec


def ready(server: LitServer) -> bool:
    """Whether the process with the model is there and has loaded it."""
    found = list(server.workers_setup_status.values())
    return bool(found) and all(status == WorkerSetupStatus.READY for status in found)
