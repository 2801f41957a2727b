"""Batches across requests, by LitServe: the web side asks, one process with the model answers."""

import asyncio
import math
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
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
from qualms.service.hang import ended_if_hung
from qualms.service.orphans import end_with_parent
from qualms.service.scoring import Question, Reply, Served, replies
from qualms.service.settings import Settings

PATH = "/v1/score"  # by which LitServe calls its queue
HANDS = 4
WAIT = 1.0  # seconds that the process with the model waits for work before it looks whether to stop


class Desk(LitSpec):
    """Where the web side hands in questions and waits for the replies."""

    def __init__(self, deadline: float = math.inf) -> None:
        super().__init__()
        self.api_path, self.deadline = PATH, deadline
        self.asked: dict[str, float] = {}  # when each question came that has no reply yet

    @property
    def hangs(self) -> bool:
        """Whether a question that nobody waits for any more has no reply for as long again."""
        return time.monotonic() > min(self.asked.values(), default=math.inf) + 2 * self.deadline

    @cached_property
    def hands(self) -> ThreadPoolExecutor:
        """Threads that hand in: the pixels go to another process, which may take a second."""
        return ThreadPoolExecutor(HANDS, "hand-in")

    async def ask(self, question: Question) -> Reply:
        """Put a question into LitServe's queue, and wait for its reply, which always comes."""
        item, name = ResponseBufferItem(asyncio.Event()), uuid4().hex
        self.response_buffer[name], self.asked[name] = item, question.came
        try:
            # LitServe drops what has waited for the deadline since then: the door has answered it.
            asked = (self.response_queue_id, name, question.came, question)
            await asyncio.get_running_loop().run_in_executor(self.hands, self.request_queue.put, asked)
            await item.event.wait()
        finally:
            del self.response_buffer[name], self.asked[name]
        reply, status = item.response
        if status == LitAPIStatus.OK:
            return reply
        late = isinstance(reply, HTTPException)  # LitServe's own, for what has waited too long
        return Reply(None, late=late, broken=not late)

    def decode_request(self, request: Question, context_kwargs: Any = None) -> Question:
        """Questions come decoded: what is wrong with one was told before it was handed in."""
        return request

    def encode_response(self, output: Reply, context_kwargs: Any = None) -> Reply:
        """Replies go out as they are."""
        return output


class ModelSide(LitAPI):
    """The process with the model. `make` builds what it serves there: not every model can be sent to a process."""

    def __init__(self, make: Callable[[], Served], settings: Settings) -> None:
        # As many images as a request may have, but one for each of its requests at least. Where --max-pixels is low,
        # the network's own images may be larger: the usual limit on pixels holds.
        loop = WaitingLoop(max(settings.images, settings.batch), max(settings.pixels, Settings.pixels))
        super().__init__(max_batch_size=settings.batch, loop=loop, spec=Desk(settings.deadline))
        self.make, self.deadline = make, settings.deadline

    def setup(self, device: str) -> None:
        """Load the model, once."""
        # Ctrl-C reaches every process; this one goes on until the web side has its replies, and is then stopped.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        end_with_parent()
        self.served = self.make()
        self.served.warm_up()

    def predict(self, x: Sequence[Question], **more: Any) -> list[Reply]:
        """The replies to a batch of questions; LitServe hands in a single one as it does several."""
        return replies(self.served, x, self.deadline, partial(ended_if_hung, self.deadline))


class WaitingLoop(BatchedLoop):
    """LitServe's batches, from a queue that is waited for, with no more images and pixels than said.

    LitServe asks its queue a thousand times a second or more, which keeps a core busy while nothing is to be done. And
    it counts requests alone: many large ones would be scored together until the deadline of all of them is over.
    """

    def __init__(self, images: int, pixels: int) -> None:
        super().__init__()
        self.images, self.pixels = images, pixels
        self.next: list[Any] = []  # the request that the last batch had no room for, if any

    def get_batch_requests(self, lit_api: LitAPI, request_queue: Any, transport: Any) -> tuple[list[Any], list[Any]]:
        """What has come in, as soon as something has: no more requests than a batch takes."""
        try:
            first = self.next.pop() if self.next else request_queue.get(timeout=WAIT)
        except Empty:
            return [], []
        return collate_requests(self, lit_api, _Rest(first, request_queue, self), transport)


class _Rest:
    """A queue from which the first item has been taken already, and which is empty once a batch is full."""

    def __init__(self, first: Any, queue: Any, loop: WaitingLoop) -> None:
        self.first, self.queue, self.loop = [first], queue, loop
        self.images = self.pixels = 0

    def get_nowait(self) -> Any:
        if self.first:
            return self._counted(self.first.pop())
        item = self._counted(self.queue.get_nowait())
        if self.images > self.loop.images or self.pixels > self.loop.pixels:
            self.loop.next.append(item)
            raise Empty
        return item

    def _counted(self, item: Any) -> Any:
        images = [] if item[-1] is None else item[-1].images  # LitServe's word for the end has no question
        self.images += len(images)
        self.pixels += sum(image[0].size for image in images)
        return item


class Server(LitServer):
    """LitServe's server, which would wait for ever for a process that was killed as it loaded the network."""

    loaded = False  # whether the network is; once it is, the service ends with the process that has it

    def verify_worker_status(self) -> None:
        """Wait until the network is loaded."""
        try:
            while not self.loaded:
                found = list(self.workers_setup_status.values())
                self.loaded = bool(found) and all(status == WorkerSetupStatus.READY for status in found)
                if not all(process.is_alive() for process in self.inference_workers):
                    raise QualmsError("the process with the network ended as it loaded it; memory may have run out.")
                time.sleep(0.05)
        except KeyboardInterrupt:  # else Python would wait until it is
            for process in self.inference_workers:
                process.terminate()
            raise


def server_of(make: Callable[[], Served], settings: Settings) -> tuple[Server, Desk]:
    """LitServe's server, with none of its own pages, and the desk to ask at."""
    api = ModelSide(make, settings)
    server = Server(api, accelerator="cpu", devices=1, timeout=settings.deadline)  # `make` knows the device
    server.app.router.routes.clear()
    server.uvicorn_graceful_timeout = settings.deadline + 5
    return server, api.spec
