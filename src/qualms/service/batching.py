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

# Loads the network in the process that serves it, and reports each step as it begins.
LoadFn = Callable[[StepFn], ScoringService]
QUEUE_PATH = "/v1/score"  # LitServe names its queues by paths
ENQUEUE_THREADS = 4
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# After which the process with the model checks whether to stop.
QUEUE_WAIT_SECONDS = 1.0


class BatchClient(LitSpec):
    """Sends requests to the process with the model, and waits for the responses.

    To LitServe it is a "spec": LitServe sets the queues and the buffer of responses on it.

    Args:
        deadline: The deadline of a request, in seconds from its headers.
    """

    def __init__(self, deadline: float = math.inf) -> None:
        """Begin without requests; LitServe adds its queues later."""
        super().__init__()
        self.api_path = QUEUE_PATH
        self.deadline = deadline
        # When each request without a response was received.
        self.pending: dict[str, float] = {}

    @property
    def is_hung(self) -> bool:
        """Whether a request has no response two deadlines after it was received."""
        oldest = min(self.pending.values(), default=math.inf)
        return time.monotonic() > oldest + 2 * self.deadline

    @cached_property
    def executor(self) -> ThreadPoolExecutor:
        """Threads that put requests into the queue, which can take a second for many pixels."""
        return ThreadPoolExecutor(ENQUEUE_THREADS, "enqueue")

    async def score(self, request: ScoreRequest) -> ScoreResponse:
        """Put a request into LitServe's queue, and wait for the response.

        There always is one: LitServe drops a request whose deadline has passed in the queue, with
        an `HTTPException` as its response.

        Returns:
            The results; or a response without results that says whether the deadline passed
            (`timed_out`) or something unexpected happened in the other process (`failed`).
        """
        key = uuid4().hex
        item = ResponseBufferItem(asyncio.Event())
        self.response_buffer[key] = item
        self.pending[key] = request.received_at
        entry = (self.response_queue_id, key, request.received_at, request)
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self.executor, self.request_queue.put, entry)
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
        load: Loads the network in that process, since not every model can be sent to a process.
        config: The limits of a batch.
        startup: Reports the progress to the other processes.
    """

    def __init__(
        self,
        load: LoadFn,
        config: ServiceConfig,
        startup: Startup,
    ) -> None:
        """Set the limits of a batch; the network is loaded by `setup`, in the other process."""
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
        # Ctrl-C reaches every process. This one goes on until all requests are answered, and is
        # stopped by SIGTERM then.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        die_with_parent()
        try:
            with explain_failure(ModelError):
                self.service = self.load(self.startup.begin)
                self.startup.finish(self.service.model_info, self.service.network.transform)
        except QualmsError as error:
            self.startup.fail(error.original if isinstance(error, ModelError) else error)
            raise SystemExit(1) from None

    def predict(self, x: Sequence[ScoreRequest], **kwargs: Any) -> list[ScoreResponse]:
        """Score a batch of requests; LitServe calls this, with a single request as a batch too.

        If the model hangs, the process ends (see `exit_if_hung`).

        Args:
            x: The requests of the batch.
            kwargs: Further arguments of LitServe, which are not used.
        """
        watch = partial(exit_if_hung, self.deadline)
        return score_requests(self.service, x, self.deadline, watch)


class BoundedBatchLoop(BatchedLoop):
    """LitServe's loop over batches, with limits on the images and pixels of a batch.

    LitServe counts requests alone, so many large ones would be scored together until all of their
    deadlines have passed.

    Args:
        max_images: The most images in a batch.
        max_pixels: The most pixels in a batch.
    """

    def __init__(self, max_images: int, max_pixels: int) -> None:
        """Begin without a left-over entry."""
        super().__init__()
        self.max_images = max_images
        self.max_pixels = max_pixels
        # The entry that the last batch had no room for, if any.
        self.left_over: list[Any] = []

    def get_batch_requests(
        self,
        lit_api: LitAPI,
        request_queue: Any,
        transport: Any,
    ) -> tuple[list[Any], list[Any]]:
        """Wait for a request, and return it with those that have arrived by then.

        Args:
            lit_api: The worker; its `max_batch_size` counts requests.
            request_queue: LitServe's queue.
            transport: LitServe's channel for responses.

        Returns:
            LitServe's entries of the requests, and of those whose deadline has passed.
        """
        if self.left_over:
            first = self.left_over.pop()
        else:
            try:
                first = request_queue.get(timeout=QUEUE_WAIT_SECONDS)
            except Empty:
                return [], []
        return collate_requests(self, lit_api, _BatchQueue(first, request_queue, self), transport)


class _BatchQueue:
    """What LitServe fills one batch from: a queue that claims to be empty once the batch is full.

    Args:
        first: The entry that was already taken from the queue.
        queue: The queue with the other entries.
        loop: Holds the limits, and keeps the entry that does not fit.
    """

    def __init__(self, first: Any, queue: Any, loop: BoundedBatchLoop) -> None:
        """Begin a batch, without images so far."""
        self.first = [first]
        self.queue = queue
        self.loop = loop
        self.images = 0
        self.pixels = 0

    def get_nowait(self) -> Any:
        """Return the next entry of the batch.

        The first entry is always returned, since even a request above the limits must be scored.

        Raises:
            Empty: If no entry is waiting, or if the next one does not fit; it begins the next
                batch.
        """
        if self.first:
            entry = self.first.pop()
            self._count(entry)
            return entry
        entry = self.queue.get_nowait()
        self._count(entry)
        if self.images > self.loop.max_images or self.pixels > self.loop.max_pixels:
            self.loop.left_over.append(entry)
            raise Empty
        return entry

    def _count(self, entry: Any) -> None:
        """Add the images and pixels of an entry to those of the batch.

        Args:
            entry: A tuple of LitServe's, whose last item is the request.
        """
        request: ScoreRequest | None = entry[-1]
        if request is None:  # LitServe's entry that ends the loop
            return
        self.images += len(request.images)
        self.pixels += sum(image[0].size for image in request.images)
