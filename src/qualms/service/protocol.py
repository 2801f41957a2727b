"""The open inference protocol (version 2): the same results, as named arrays."""

import math
from itertools import chain
from typing import Any

import numpy as np
from fastapi import FastAPI, HTTPException, Request
from pydantic import BaseModel, ConfigDict, Field

from qualms.service.requests import RequestHandler, Results, content_type
from qualms.service.schemas import (
    MAX_ECHO,
    InferRequest,
    ModelInfo,
    error_responses,
    infer_body_schema,
)
from qualms.service.uploads import ImageReader, Pixels
from qualms.version import __version__

ANY_LENGTH = -1  # stands for a length that is not fixed, in the shapes of the protocol
MAX_AXES = 4  # images, height, width and channels


class TensorMetadata(BaseModel):
    """One input or output of the network."""

    name: str
    datatype: str
    shape: list[int] = Field(description="-1 stands for any length.")


class ModelMetadata(BaseModel):
    """The network's inputs and outputs."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class ServerMetadata(BaseModel):
    """The server's name and version."""

    name: str
    version: str
    extensions: list[str]


class Live(BaseModel):
    """Whether the server runs."""

    live: bool


class Ready(BaseModel):
    """Whether the network is loaded and responds."""

    ready: bool


class OutputTensor(TensorMetadata):
    """One output, with an entry for each image."""

    data: list[Any]


class InferResponse(BaseModel):
    """A response of the open inference protocol."""

    model_config = ConfigDict(protected_namespaces=())

    model_name: str
    model_version: str
    id: str | None = None
    outputs: list[OutputTensor]


def add_protocol_routes(
    app: FastAPI,
    handler: RequestHandler,
    token_dependencies: list[Any],
) -> None:
    """Add the routes below /v2.

    The model's name is a fixed part of the paths, so no other model can be requested.

    Args:
        app: The app to add the routes to.
        handler: Decodes and scores the requests.
        token_dependencies: The dependencies of the routes that need a token, for OpenAPI.
    """
    errors = error_responses(401)
    errors_or_not_ready = error_responses(401, 503)
    _add_health_routes(app, handler)

    @app.get("/v2", responses=errors, dependencies=token_dependencies)
    async def server() -> ServerMetadata:
        """Describe the server."""
        return ServerMetadata(
            name="qualms",
            version=__version__,
            extensions=[],
        )

    path = f"/v2/models/{handler.startup.model_info.model}"

    @app.get(f"{path}/ready", responses=errors_or_not_ready, dependencies=token_dependencies)
    async def model_ready() -> Ready:
        """Check that the network is loaded and responds."""
        handler.require_ready()
        return Ready(ready=True)

    @app.get(path, responses=errors_or_not_ready, dependencies=token_dependencies)
    async def metadata() -> ModelMetadata:
        """Describe the network's inputs and outputs."""
        handler.require_ready()
        return _describe_model(handler)

    @app.post(
        f"{path}/infer",
        responses=error_responses(),
        openapi_extra={"requestBody": infer_body_schema()},
        dependencies=token_dependencies,
    )
    async def infer(request: Request) -> InferResponse:
        """Score images sent as one array. Other sizes are resized to the network's."""
        return await _answer_inference(request, handler)


def _add_health_routes(app: FastAPI, handler: RequestHandler) -> None:
    """Add the routes by which others check that the service runs; they need no token.

    Args:
        app: The app to add the routes to.
        handler: Knows whether the network is ready.
    """

    @app.get("/v2/health/live")
    async def live() -> Live:
        """Check that the server runs."""
        return Live(live=True)

    @app.get("/v2/health/ready", responses=error_responses(503))
    async def server_ready() -> Ready:
        """Check that the network is loaded and responds."""
        handler.require_ready()
        return Ready(ready=True)


def _describe_model(handler: RequestHandler) -> ModelMetadata:
    """Describe the network's inputs and outputs, with -1 for lengths that may differ.

    Args:
        handler: The handler of a network that is ready.
    """
    info = handler.startup.model_info
    transform = handler.startup.transform
    shape = [ANY_LENGTH] * MAX_AXES
    if transform is not None:
        shape = [ANY_LENGTH, *transform.size, transform.channels or ANY_LENGTH]
    outputs = []
    for name, datatype in _output_datatypes(info).items():
        output = TensorMetadata(
            name=name,
            datatype=datatype,
            shape=[ANY_LENGTH],
        )
        outputs.append(output)
    images = TensorMetadata(
        name="images",
        datatype="UINT8",
        shape=shape,
    )
    return ModelMetadata(
        name=info.model,
        versions=[info.model_hash],
        platform="pytorch",
        inputs=[images],
        outputs=outputs,
    )


async def _answer_inference(request: Request, handler: RequestHandler) -> InferResponse:
    """Score the images of one inference request, and return the requested outputs.

    Args:
        request: A request whose body should be an `InferRequest`.
        handler: Decodes and scores the images.

    Raises:
        HTTPException: If the network is not ready, or if the request is invalid.
        ValidationError: If the body is not an `InferRequest`.
    """
    if content_type(request) != "application/json":
        raise HTTPException(415, "the content type is not supported; send application/json.")
    reader = handler.make_image_reader()
    body = await request.body()
    infer_request, images = await handler.run_in_thread(request, _parse_infer_request, body, reader)
    info = handler.startup.model_info
    output_names = _select_outputs(infer_request, info)
    results = await handler.score(request, images, with_layers=False)
    return InferResponse(
        model_name=info.model,
        model_version=info.model_hash,
        id=infer_request.id,
        outputs=_make_output_tensors(results, output_names, info),
    )


def _select_outputs(infer_request: InferRequest, info: ModelInfo) -> list[str]:
    """Return the names of the requested outputs; all outputs if the request names none.

    Args:
        infer_request: The request.
        info: The model's description, which decides the available outputs.

    Raises:
        HTTPException: 422 if a requested output does not exist.
    """
    available = list(_output_datatypes(info))
    if infer_request.outputs is None:
        return available
    names = [output.name for output in infer_request.outputs]
    for name in names:
        if name not in available:
            message = f"there is no output {name[:MAX_ECHO]!r}; choose from {', '.join(available)}."
            raise HTTPException(422, message)
    return names


def _make_output_tensors(
    results: Results,
    output_names: list[str],
    info: ModelInfo,
) -> list[OutputTensor]:
    """Convert results to arrays: one for each output, with an entry for each image.

    Args:
        results: For each image the fields of a `Result`, without its id.
        output_names: The names of the requested outputs; repeated names give one array.
        info: The model's description.
    """
    datatypes = _output_datatypes(info)
    unique_names = dict.fromkeys(output_names)  # as a set, but in the requested order
    tensors = []
    for name in unique_names:
        data = [_output_value(result, name) for result in results]
        tensor = OutputTensor(
            name=name,
            datatype=datatypes[name],
            shape=[len(data)],
            data=data,
        )
        tensors.append(tensor)
    return tensors


def _output_datatypes(info: ModelInfo) -> dict[str, str]:
    """Return a dict from the name of each output to its datatype, in the protocol's notation.

    Outputs that need names of classes, a threshold or its reference scores are left out if the
    service does not have these.

    Args:
        info: The model's description.
    """
    datatypes = {"prediction": "INT64", "confidence": "FP64"}
    for method in info.methods:
        datatypes[f"score_{method}"] = "FP64"
    if info.class_names:
        datatypes["class_name"] = "BYTES"
    if info.reference:
        datatypes["percentile"] = "FP64"
    # Every threshold has a rule, even one without a finite value.
    if info.rule is not None:
        datatypes["accepted"] = "BOOL"
    return datatypes


def _output_value(result: dict[str, Any], name: str) -> Any:
    """Return the value of one output for one image.

    Args:
        result: The fields of a `Result` for this image.
        name: The output's name, one of `_output_datatypes`.
    """
    if name == "accepted":
        return result["decision"] == "accepted"
    if name.startswith("score_"):
        return result["scores"][name.removeprefix("score_")]
    return result[name]


def _parse_infer_request(body: bytes, reader: ImageReader) -> tuple[InferRequest, list[Pixels]]:
    """Parse the body of an inference request, and convert its array to images.

    Args:
        body: The request's body.
        reader: Converts the images, and checks the limits on their number and pixels.

    Returns:
        The request, and its images, each [c, h, w].

    Raises:
        ValidationError: If the body is not an `InferRequest`.
        HTTPException: If the data does not match the shape or is not images, or if there are too
            many images or pixels.
    """
    infer_request = InferRequest.model_validate_json(body)
    tensor = infer_request.inputs[0]  # the only one (see `InferRequest`)
    # Before the numbers are read, since a shape can announce any number of them.
    reader.require_count(tensor.shape[0])
    reader.require_pixels(tensor.shape)
    count = math.prod(tensor.shape)
    values = _flatten_numbers(tensor.data, count)
    if values is None:
        message = (
            f"data does not hold the {count} numbers of shape {tensor.shape}; send exactly "
            "that many."
        )
        raise HTTPException(422, message)
    white = 255 if tensor.datatype == "UINT8" else 1
    arrays = list(values.reshape(tensor.shape))
    return infer_request, reader.read_arrays(arrays, white)


def _flatten_numbers(data: list[Any], count: int) -> np.ndarray | None:
    """Flatten nested lists of numbers.

    All items must be numbers before NumPy converts them: it would convert anything, and for one
    long string it would allocate the length of that string for each item.

    Args:
        data: Nested lists of any depth, or a flat one.
        count: The expected number of numbers.

    Returns:
        An array [count]; None if there are more or fewer items, or items other than numbers.
    """
    flat = data
    # Each pass removes one level of nesting.
    for _ in range(MAX_AXES - 1):
        if not flat or type(flat[0]) is not list:
            break
        length = len(flat[0])
        if len(flat) * length > count or not _are_lists_of_length(flat, length):
            return None
        flat = list(chain.from_iterable(flat))
    # `type` instead of `isinstance`, for which True would be an int.
    if len(flat) != count or not {int, float}.issuperset(map(type, flat)):
        return None
    try:
        values = np.asarray(flat)
    # Integers that are too large for all of NumPy's dtypes.
    except (ValueError, OverflowError):
        return None
    # Large integers may also become an array of objects.
    return values if values.dtype.kind in "iuf" else None


def _are_lists_of_length(items: list[Any], length: int) -> bool:
    """Whether all items are lists with `length` items each."""
    return all(type(item) is list and len(item) == length for item in items)
