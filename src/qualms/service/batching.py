"""Batches across requests, by LitServe: the web side asks, one process with the model answers."""

import asyncio
import math
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from multiprocessing.resource_tracker import ensure_running
from queue import Empty
from socket import socket
from typing import Any
from uuid import uuid4

from fastapi import HTTPException
from litserve import LitAPI, LitServer
from litserve.loops.base import collate_requests
from litserve.loops.simple_loops import BatchedLoop
from litserve.specs.base import LitSpec
from litserve.utils import LitAPIStatus, ResponseBufferItem

from qualms.errors import QualmsError
from qualms.service.lifecycle import end_with_parent
from qualms.service.scoring import Question, Reply, Served, replies
from qualms.service.settings import Settings
from qualms.service.startup import Startup, StepFn
from qualms.service.watchdog import ended_if_hung

Make = Callable[[StepFn], Served]  # builds what is served, and tells each step as it begins
PATH = "/v1/score"  # by which LitServe calls its queue
HANDS = 4
STOPS = (signal.SIGINT, signal.SIGTERM)
POLL = 0.05  # seconds between two looks at how far the start is
BACKLOG = 2048  # connections that wait to be taken, as uvicorn has it
WAIT = 1.0  # seconds that the process with the model waits for work before it looks whether to stop


class BatchClient(LitSpec):
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
    def executor(self) -> ThreadPoolExecutor:
        """Threads that hand in: the pixels go to another process, which may take a second."""
        return ThreadPoolExecutor(HANDS, "hand-in")

    async def ask(self, question: Question) -> Reply:
        """Put a question into LitServe's queue, and wait for its reply, which always comes."""
        item, name = ResponseBufferItem(asyncio.Event()), uuid4().hex
        self.response_buffer[name], self.asked[name] = item, question.came
        try:
            # LitServe drops what has waited for the deadline since then: the door has answered it.
            asked = (self.response_queue_id, name, question.came, question)
            await asyncio.get_running_loop().run_in_executor(
                self.executor, self.request_queue.put, asked
            )
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
    """The process with the model. `make` builds what it serves there: not every model can be sent
    to a process.
    """

    def __init__(self, make: Make, settings: Settings, startup: Startup) -> None:
        # As many images as a request may have, but one for each of its requests at least. Where
        # --max-pixels is low, the network's own images may be larger: the usual limit on pixels
        # holds.
        loop = WaitingLoop(
            max(settings.images, settings.batch), max(settings.pixels, Settings.pixels)
        )
        super().__init__(
            max_batch_size=settings.batch, loop=loop, spec=BatchClient(settings.deadline)
        )
        self.make, self.deadline, self.startup = make, settings.deadline, startup

    def setup(self, device: str) -> None:
        """Load the model, once; the process that started this one says what goes wrong."""
        # Ctrl-C reaches every process; this one goes on until the web side has its replies, and is
        # then stopped.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
        end_with_parent()
        try:
            self.served = self.make(self.startup.begin)
            self.startup.finish(self.served.about, self.served.network.transform)
        except Exception as error:  # whatever a network raises
            self.startup.fail(error)
            raise SystemExit(1) from None

    def predict(self, x: Sequence[Question], **more: Any) -> list[Reply]:
        """The replies to a batch of questions; LitServe hands in a single one as it does several."""
        return replies(self.served, x, self.deadline, partial(ended_if_hung, self.deadline))


class WaitingLoop(BatchedLoop):
    """LitServe's batches, from a queue that is waited for, with no more images and pixels than
    said.

    LitServe asks its queue a thousand times a second or more, which keeps a core busy while nothing
    is to be done. And it counts requests alone: many large ones would be scored together until the
    deadline of all of them is over.
    """

    def __init__(self, images: int, pixels: int) -> None:
        super().__init__()
        self.images, self.pixels = images, pixels
        self.next: list[Any] = []  # the request that the last batch had no room for, if any

    def get_batch_requests(
        self, lit_api: LitAPI, request_queue: Any, transport: Any
    ) -> tuple[list[Any], list[Any]]:
        """What has come in, as soon as something has: no more requests than a batch takes."""
        try:
            first = self.next.pop() if self.next else request_queue.get(timeout=WAIT)
        except Empty:
            return [], []
        return collate_requests(self, lit_api, _Rest(first, request_queue, self), transport)


class _Rest:
    """A queue from which the first item has been taken already, and which is empty once a batch is
    full.
    """

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
        images = (
            [] if item[-1] is None else item[-1].images
        )  # LitServe's word for the end has no question
        self.images += len(images)
        self.pixels += sum(image[0].size for image in images)
        return item


class Server(LitServer):
    """LitServe's server, which would load the network before it listens, and wait for ever for one
    that is killed.

    This one listens at once. The network is loaded in its own process meanwhile, so that this
    process, which is told to stop, is never in the middle of torch.
    """

    def __init__(self, api: ModelSide, **more: Any) -> None:
        super().__init__(api, **more)
        self.startup = api.startup
        self.sockets: list[socket] = []
        self.where = ""  # the address, for the log
        self.on_ready: Callable[[], None] = lambda: None  # called once the network is

    def _init_manager(self, num_api_servers: int) -> Any:
        manager = super()._init_manager(num_api_servers)
        self.startup.share(manager)
        return manager

    def launch_inference_worker(self, lit_api: LitAPI) -> Any:
        """Start the process with the model. There, a signal waits until it is heeded: Ctrl-C would
        leave a trace.
        """
        ensure_running()  # multiprocessing's other process, whose start would let signals in
        self.startup.log(f"{self.startup.last.step} …")
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
        try:
            return super().launch_inference_worker(lit_api)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def verify_worker_status(self) -> None:
        """LitServe would wait for the network here."""

    def _start_server(
        self, port: int, servers: int, log_level: str, sockets: list[socket], *more: Any, **kw: Any
    ) -> Any:
        self.sockets = sockets
        for one in sockets:
            one.listen(BACKLOG)  # who connects before the web side is there waits for it
        self.startup.log(f"listening on {self.where}")
        return super()._start_server(port, servers, log_level, sockets, *more, **kw)

    def _start_worker_monitoring(self, manager: Any, uvicorn_workers: dict[Any, Any]) -> None:
        self.wait_until_ready([*self.inference_workers, *uvicorn_workers.values()])
        self.on_ready()
        super()._start_worker_monitoring(manager, uvicorn_workers)

    def wait_until_ready(self, processes: Sequence[Any]) -> None:
        """Wait until the network has scored a first image; an error if it cannot, or one of the
        processes ends.
        """
        while True:
            if self.startup.stopped:
                raise KeyboardInterrupt
            alive = all(process.is_alive() for process in processes)
            progress = self.startup.progress()
            if progress.failure is not None:
                progress.failure.throw()
            if progress.status == "ready":
                return
            if not alive:
                raise QualmsError(
                    "the process with the network ended as it loaded it; memory may have run out."
                )
            time.sleep(POLL)

    def _perform_graceful_shutdown(
        self, manager: Any, uvicorn_workers: dict[Any, Any], reason: str = "normal"
    ) -> None:
        if self.startup.is_ready:
            super()._perform_graceful_shutdown(manager, uvicorn_workers, reason)
            return
        # Nothing was taken, so nothing is waited for. What runs in torch heeds no other signal.
        processes = [*uvicorn_workers.values(), *self.inference_workers]
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
        for one in self.sockets:
            one.close()
        manager.shutdown()


def server_of(make: Make, settings: Settings, startup: Startup) -> tuple[Server, BatchClient]:
    """LitServe's server, with none of its own pages, and the desk to ask at."""
    api = ModelSide(make, settings, startup)
    server = Server(
        api, accelerator="cpu", devices=1, timeout=settings.deadline
    )  # `make` knows the device
    server.app.router.routes.clear()
    server.uvicorn_graceful_timeout = settings.deadline + 5
    return server, api.spec
