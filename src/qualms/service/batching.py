"""Batches across requests, by LitServe: one process answers HTTP, another one holds the model.

LitServe's queue, its processes and its timeout in the queue are used as they are. Three things are
added: the queue is waited for instead of polled a thousand times a second, a batch has a limit on
images and pixels and not only on requests, and a model that cannot be loaded reports why.
"""

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
from litserve import LitAPI
from litserve.loops.base import collate_requests
from litserve.loops.simple_loops import BatchedLoop
from litserve.specs.base import LitSpec
from litserve.utils import LitAPIStatus, ResponseBufferItem

from qualms.errors import QualmsError, explain_failure
from qualms.service.config import ServiceConfig
from qualms.service.lifecycle import Startup, StepFn, die_with_parent, exit_if_hung
from qualms.service.scoring import (
    ModelError,
    ScoreRequest,
    ScoreResponse,
    ScoringService,
    score_requests,
)

# Called in the process with the model, with a function to report each step as it begins.
LoadFn = Callable[[StepFn], ScoringService]
QUEUE_PATH = "/v1/score"  # LitServe names its queues by paths
ENQUEUE_THREADS = 4  # threads that put requests into the queue
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# How long the process with the model waits for a request before it checks whether to stop.
QUEUE_WAIT_SECONDS = 1.0


class BatchClient(LitSpec):
    """Sends requests to the process with the model, and waits for the responses.

    To LitServe it is a "spec": LitServe sets the queues and the buffer of responses on it.

    Args:
        deadline: Seconds from the arrival of a request's headers to its deadline.
    """

    def __init__(self, deadline: float = math.inf) -> None:
        """Begin without requests; LitServe adds its queues later."""
        super().__init__()
        self.api_path = QUEUE_PATH
        self.deadline = deadline
        # When each request without a response was received, by `time.monotonic`, by its key.
        self.pending: dict[str, float] = {}

    @property
    def is_hung(self) -> bool:
        """Whether the process with the model seems to hang: a request has waited two deadlines."""
        first_received_at = min(self.pending.values(), default=math.inf)
        return time.monotonic() > first_received_at + 2 * self.deadline

    @cached_property
    def executor(self) -> ThreadPoolExecutor:
        """Threads that put requests into the queue, which can take a second for many pixels."""
        return ThreadPoolExecutor(ENQUEUE_THREADS, "enqueue")

    async def score(self, request: ScoreRequest) -> ScoreResponse:
        """Send a request to the process with the model by LitServe's queue; wait for its response.

        Every request gets one: if the deadline passes in the queue, LitServe drops the request and
        responds with an `HTTPException`.

        Returns:
            The results; or a response without results that says whether the deadline passed
            (`timed_out`) or something unexpected happened in the other process (`failed`).
        """
        key = uuid4().hex
        # LitServe stores the response in this item, and then sets its event.
        item = ResponseBufferItem(asyncio.Event())
        self.response_buffer[key] = item
        self.pending[key] = request.received_at
        queue_entry = (self.response_queue_id, key, request.received_at, request)
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self.executor, self.request_queue.put, queue_entry)
            await item.event.wait()
        finally:
            del self.response_buffer[key]
            del self.pending[key]
        response, status = item.response
        if status == LitAPIStatus.OK:
            return response
        if isinstance(response, HTTPException):
            return ScoreResponse(None, timed_out=True)
        return ScoreResponse(None, failed=True)

    def decode_request(self, request: ScoreRequest, context_kwargs: Any = None) -> ScoreRequest:
        """Return the request unchanged: the routes have decoded it before it was queued."""
        return request

    def encode_response(self, output: ScoreResponse, context_kwargs: Any = None) -> ScoreResponse:
        """Return the response unchanged: the routes encode it."""
        return output


class ScoringWorker(LitAPI):
    """LitServe's API for the process with the model: loads the network there, and scores batches.

    Args:
        load: Loads the network. It is called in that process, since not every loaded model can be
            sent to another process.
        config: The limits of a batch.
        startup: Reports the progress to the other processes.
    """

    def __init__(
        self,
        load: LoadFn,
        config: ServiceConfig,
        startup: Startup,
    ) -> None:
        """Set the limits of a batch; `setup` loads the network later, in the process with it."""
        # A batch has room for the largest request, and for one image of each of its requests. The
        # network's own images may be larger than a low limit on uploads.
        max_images = max(config.max_images, config.batch)
        max_pixels = max(config.max_pixels, ServiceConfig.max_pixels)
        super().__init__(
            max_batch_size=config.batch,
            loop=BoundedBatchLoop(max_images, max_pixels),
            spec=BatchClient(config.deadline),
        )
        self.load = load
        self.deadline = config.deadline
        self.startup = startup

    def setup(self, device: str) -> None:
        """Load the network, once, in the process that scores; LitServe calls this.

        A failure is passed on to the process that started this one, which reports it.

        Args:
            device: LitServe's device, which is not used: `load` chooses the device.
        """
        # Ctrl-C reaches every process. This one ignores it until all requests are answered; then
        # SIGTERM stops it.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # They were blocked while this process started (see `launch_inference_worker`).
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        die_with_parent()
        try:
            with explain_failure(ModelError):
                self.service = self.load(self.startup.begin)
                self.startup.finish(self.service.model_info, self.service.network.transform)
        except QualmsError as error:
            self.startup.fail(error.original if isinstance(error, ModelError) else error)
            # The error is on the board, so LitServe need not print it.
            raise SystemExit(1) from None

    def predict(self, x: Sequence[ScoreRequest], **kwargs: Any) -> list[ScoreResponse]:
        """Score a batch of requests; LitServe calls this, with a single request as a batch too.

        If the model hangs, the process ends (see `exit_if_hung`).

        Args:
            x: The requests of the batch. LitServe decides the argument's name.
            kwargs: Further arguments of LitServe, which are not used.
        """
        watch = partial(exit_if_hung, self.deadline)
        return score_requests(self.service, x, self.deadline, watch)


class BoundedBatchLoop(BatchedLoop):
    """LitServe's loop over batches, with limits on the images and pixels of a batch.

    LitServe limits only the number of requests. Many large requests would then be scored together,
    and all of their deadlines would pass.

    Args:
        max_images: The most images in a batch.
        max_pixels: The most pixels in a batch.
    """

    def __init__(self, max_images: int, max_pixels: int) -> None:
        """Store the limits."""
        super().__init__()
        self.max_images = max_images
        self.max_pixels = max_pixels
        # A request that was taken from the queue, but for which the last batch had no room; it
        # begins the next batch. None if there is none.
        self.left_over: Any = None

    def get_batch_requests(
        self,
        lit_api: LitAPI,
        request_queue: Any,
        transport: Any,
    ) -> tuple[list[Any], list[Any]]:
        """Wait for a request, and return it with those that wait behind it, as far as they fit.

        Args:
            lit_api: The worker, whose `max_batch_size` limits the number of requests.
            request_queue: LitServe's queue of requests.
            transport: LitServe's channel for responses.

        Returns:
            LitServe's entries of the requests to score, and those whose deadline has passed.
        """
        if self.left_over is not None:
            first = self.left_over
            self.left_over = None
        else:
            try:
                first = request_queue.get(timeout=QUEUE_WAIT_SECONDS)
            except Empty:
                return [], []
        batch_queue = _BatchQueue(first, request_queue, self)
        return collate_requests(self, lit_api, batch_queue, transport)


class _BatchQueue:
    """The queue from which LitServe fills one batch; it seems to be empty once the batch is full.

    Args:
        first: The entry that was already taken from the queue.
        queue: The queue with the other entries.
        loop: Has the limits, and keeps the entry for which the batch has no room in `left_over`.
    """

    def __init__(self, first: Any, queue: Any, loop: BoundedBatchLoop) -> None:
        """Store the arguments; the batch has no images yet."""
        # The request that begins the batch; None once `get_nowait` has returned it.
        self.first: Any = first
        self.queue = queue
        self.loop = loop
        # The images and pixels of the entries that `get_nowait` has returned.
        self.num_images = 0
        self.num_pixels = 0

    def get_nowait(self) -> Any:
        """Return the next request of the batch, as LitServe's entry in the queue.

        The first one is always returned, since even a request above the limits must be scored.

        Raises:
            Empty: If none is waiting, or if the batch has no room for the next one, which then is
                the first of the next batch.
        """
        if self.first is not None:
            entry = self.first
            self.first = None
            self._count(entry)
            return entry
        entry = self.queue.get_nowait()
        self._count(entry)
        if self.num_images > self.loop.max_images or self.num_pixels > self.loop.max_pixels:
            self.loop.left_over = entry
            raise Empty
        return entry

    def _count(self, entry: Any) -> None:
        """Add the images and pixels of an entry to those of the batch.

        Args:
            entry: A tuple of LitServe's, whose last item is the request.
        """
        request: ScoreRequest | None = entry[-1]
        if request is None:  # the tuple of Nones by which LitServe ends the loop
            return
        self.num_images += len(request.images)
        # Images are [c, h, w], so `image[0].size` is h · w.
        self.num_pixels += sum(image[0].size for image in request.images)
