"""Shared by all scoring routes: check that the network is ready, decode a request, score it."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fastapi import HTTPException, Request
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException as StarletteHTTPException

from qualms.service.config import ServiceConfig
from qualms.service.lifecycle import Startup
from qualms.service.limits import request_state
from qualms.service.metrics import Metrics
from qualms.service.schemas import ImageArrays
from qualms.service.scoring import ScoreRequest, ScoreResponse
from qualms.service.uploads import ImageReader, Pixels

T = TypeVar("T")
ScoreFn = Callable[[ScoreRequest], Awaitable[ScoreResponse]]
# For each image the fields of a `Result`, without its id.
Results = list[dict[str, Any]]
DECODE_THREADS = 4
MAX_FORM_FIELDS = 8  # the most parts of a form besides its files
# In seconds: a start takes seconds to minutes.
RETRY_AFTER = {"Retry-After": "5"}


def _make_decode_executor() -> ThreadPoolExecutor:
    """Create the executor whose threads decode images; threads are started when first used."""
    return ThreadPoolExecutor(DECODE_THREADS, "decode")


@dataclass(frozen=True)
class RequestHandler:
    """Handles requests for scores, for all routes.

    Images are decoded in the threads of `executor`. LitServe waits for responses in asyncio's
    threads, so images that are slow to decode must not block these.

    Args:
        startup: The model's description, and the progress of the start.
        config: The limits.
        metrics: Counts the images.
        send: Sends a request to the process with the model, and waits for the response.
        is_hung: Whether that process does not respond any more.
    """

    startup: Startup
    config: ServiceConfig
    metrics: Metrics
    send: ScoreFn
    is_hung: Callable[[], bool]
    executor: ThreadPoolExecutor = field(default_factory=_make_decode_executor, init=False)

    def is_ready(self) -> bool:
        """Whether the network is loaded and responds."""
        return self.startup.progress().status == "ready" and not self.is_hung()

    def require_ready(self) -> None:
        """Raise an error unless the network is loaded and responds.

        Raises:
            HTTPException: 503, with how far the start is.
        """
        progress = self.startup.progress()
        if progress.status != "ready":
            raise HTTPException(503, progress.message, RETRY_AFTER)
        if self.is_hung():
            message = "the network is not responding; retry in a few seconds."
            raise HTTPException(503, message, RETRY_AFTER)

    def make_image_reader(self) -> ImageReader:
        """Return an object that reads images, and resizes them to the network's input size.

        Raises:
            HTTPException: 503 if the network is not ready.
        """
        # Until the network is ready, its input size is unknown.
        self.require_ready()
        return ImageReader(self.startup.transform, self.config)

    async def run_in_thread(self, request: Request, function: Callable[..., T], *args: Any) -> T:
        """Decode a body in another thread, so that other requests are answered meanwhile.

        Args:
            request: The request that the call is for. The call is stored in its state, so that the
                middleware counts it if it continues after a 504.
            function: Decodes the body.
            args: The arguments of the function.

        Returns:
            What the function returns.

        Raises:
            HTTPException: 413 if memory runs out.
        """
        running_call = self.executor.submit(function, *args)
        request_state(request.scope).work = running_call
        try:
            return await asyncio.wrap_future(running_call)
        except MemoryError:
            message = (
                "the request needs more memory than is available; send fewer or smaller images."
            )
            raise HTTPException(413, message) from None

    async def score(
        self,
        request: Request,
        images: list[Pixels],
        with_layers: bool,
    ) -> Results:
        """Score the images of a request, in a batch with those of other requests.

        Args:
            request: The request. The scoring is stored in its state, so that the middleware counts
                it if it continues after a 504.
            images: The images, at least one, each [c, h, w].
            with_layers: Whether the results hold the share of each layer.

        Returns:
            The fields of a `Result` for each image, without its id.

        Raises:
            HTTPException: 504 if the deadline passed in the queue, 500 if the scoring failed, 422
                if the network cannot score images of these sizes.
        """
        state = request_state(request.scope)
        score_request = ScoreRequest(images, with_layers, state.received_at)
        state.work = asyncio.ensure_future(self.send(score_request))
        # At the deadline, the middleware cancels this route; `shield` lets the scoring continue.
        response: ScoreResponse = await asyncio.shield(state.work)
        if response.timed_out:
            raise HTTPException(504, "the request waited too long to be scored; retry later.")
        if response.failed:
            message = "the images could not be scored; see the service's log."
            raise HTTPException(500, message)
        if response.results is None:
            sizes = ", ".join(sorted({_describe_size(image) for image in images}))
            message = f"the network cannot score images of {sizes} pixels; try another size."
            raise HTTPException(422, message)
        decisions = [result["decision"] for result in response.results]
        self.metrics.count_images(decisions, response.batch_images)
        return response.results

    async def read_images(self, request: Request) -> tuple[list[str], list[Pixels]]:
        """Read the images of a request to `/v1/score`, from files or from nested lists.

        Args:
            request: A request whose body should be a form or JSON.

        Returns:
            The ids of the images (names of files, or positions), and the images.

        Raises:
            HTTPException: If the network is not ready, or if the body is invalid.
        """
        reader = self.make_image_reader()
        media_type = content_type(request)
        if media_type == "application/json":
            body = await request.body()
            images = await self.run_in_thread(request, _parse_arrays, body, reader)
            ids = [str(position) for position in range(len(images))]
            return ids, images
        if media_type != "multipart/form-data":
            message = (
                "the content type is not supported; send multipart/form-data or application/json."
            )
            raise HTTPException(415, message)
        files = await _read_form(request, self.config.max_images)
        images = await self.run_in_thread(request, reader.read_files, files)
        ids = [name for name, _ in files]
        return ids, images


def content_type(request: Request) -> str:
    """Return the media type of a request in lower case, such as `application/json`.

    Parameters such as `charset` are removed. Without the header, the result is empty.
    """
    header: str = request.headers.get("content-type", "")
    return header.partition(";")[0].strip().lower()


async def _read_form(request: Request, max_files: int) -> list[tuple[str, bytes]]:
    """Read the files of a form.

    Args:
        request: A request whose body is a form.
        max_files: The most files in a form.

    Returns:
        The name and the content of each file.

    Raises:
        HTTPException: If there are too many files or other parts, or if the form cannot be parsed.
    """
    try:
        async with request.form(max_files=max_files, max_fields=MAX_FORM_FIELDS) as form:
            files = []
            for position, part in enumerate(_image_parts(form)):
                name = part.filename or f"image {position}"
                files.append((name, await part.read()))
            return files
    except StarletteHTTPException as error:
        if error.status_code != 400:
            raise
        # Starlette has no error class for each cause, only its message.
        if "Too many files" in error.detail:
            message = f"the request has more than {max_files} images; send fewer."
            raise HTTPException(413, message) from None
        message = "the form cannot be parsed; send multipart/form-data with its boundary."
        raise HTTPException(400, message) from None


def _image_parts(form: FormData) -> list[UploadFile]:
    """Return the files of a form, and require that it has nothing but files named `images`.

    Raises:
        HTTPException: 422 if there are other parts.
    """
    parts = []
    # `multi_items`, since all parts have the same name.
    for name, part in form.multi_items():
        if name != "images" or not isinstance(part, UploadFile):
            message = "the form has parts that are not files named `images`; remove them."
            raise HTTPException(422, message)
        parts.append(part)
    return parts


def _parse_arrays(body: bytes, reader: ImageReader) -> list[Pixels]:
    """Parse a JSON body, and convert its nested lists to images.

    Args:
        body: The request's body.
        reader: Converts the images, and checks the limits on their number and pixels.

    Returns:
        The images, each [c, h, w].

    Raises:
        ValidationError: If the body is not an `ImageArrays`.
        HTTPException: If there are too many images or pixels, or if an array is not an image.
    """
    arrays = ImageArrays.model_validate_json(body)
    return reader.read_arrays(arrays.images, arrays.white)


def _describe_size(image: Pixels) -> str:
    """Format the size of an image [c, h, w] as `width x height`."""
    _, height, width = image.shape
    return f"{width} x {height}"
