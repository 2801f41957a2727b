"""The open inference protocol (version 2): the same answers, as named arrays."""

import math
from collections.abc import Awaitable, Callable
from itertools import chain
from typing import Any

import numpy as np
from fastapi import FastAPI, HTTPException, Request
from pydantic import BaseModel, ConfigDict, Field

from qualms.service.answers import PROBLEMS, About
from qualms.service.decoding import Decoding
from qualms.service.requests import InferRequest, infer_body, kind_of
from qualms.service.startup import Startup
from qualms.service.uploads import ECHO, Intake, Pixels
from qualms.version import __version__

Answered = Callable[[Request, list[Pixels], bool], Awaitable[list[dict[str, Any]]]]
ANY = -1  # a length that is not fixed
MOST_AXES = 4  # images, height, width and channels


class Described(BaseModel):
    """One input or output of the network."""

    name: str
    datatype: str
    shape: list[int] = Field(description="-1 stands for any length.")


class ModelMetadata(BaseModel):
    """What the protocol tells of a model."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[Described]
    outputs: list[Described]


class ServerMetadata(BaseModel):
    """What the protocol tells of the server."""

    name: str
    version: str
    extensions: list[str]


class Live(BaseModel):
    """Whether the server runs."""

    live: bool


class Ready(BaseModel):
    """Whether the network is loaded, and answers."""

    ready: bool


class OutputTensor(Described):
    """One output, with an entry for each image."""

    data: list[Any]


class InferAnswer(BaseModel):
    """An answer of the open inference protocol."""

    model_config = ConfigDict(protected_namespaces=())

    model_name: str
    model_version: str
    id: str | None = None
    outputs: list[OutputTensor]


def add_protocol(
    app: FastAPI,
    startup: Startup,
    intake: Callable[[], Intake],
    decode: Decoding,
    answered: Answered,
    require_ready: Callable[[], None],
    token: list[Any],
) -> None:
    """The routes below /v2. The model's name is part of their addresses: no other can be asked for.

    Args:
        app: to which the routes are added.
        startup: what is served.
        intake: how images come in; raises what the client is told while the network is not ready.
        decode: runs what reads a body.
        answered: scores the images of a request.
        require_ready: raises what the client is told while the network is not ready.
        token: what the routes that need one depend on, for OpenAPI.
    """
    path = f"/v2/models/{startup.about.model}"
    known: dict[int | str, dict[str, Any]] = {401: PROBLEMS[401]}

    @app.get("/v2", responses=known, dependencies=token)
    async def server() -> ServerMetadata:
        """The server."""
        return ServerMetadata(name="qualms", version=__version__, extensions=[])

    @app.get("/v2/health/live")
    async def live() -> Live:
        """Whether the server runs."""
        return Live(live=True)

    @app.get("/v2/health/ready", responses={503: PROBLEMS[503]})
    async def server_ready() -> Ready:
        """Whether the network is loaded, and answers."""
        require_ready()
        return Ready(ready=True)

    @app.get(f"{path}/ready", responses={**known, 503: PROBLEMS[503]}, dependencies=token)
    async def model_ready() -> Ready:
        """Whether the network is loaded, and answers."""
        require_ready()
        return Ready(ready=True)

    @app.get(path, responses={**known, 503: PROBLEMS[503]}, dependencies=token)
    async def metadata() -> ModelMetadata:
        """The network's inputs and outputs."""
        require_ready()
        about, fit = startup.about, startup.fit
        size = (ANY, ANY) if fit is None else fit.size
        channels = None if fit is None else fit.channels
        shape = [ANY, *size, channels or ANY]
        return ModelMetadata(
            name=about.model,
            versions=[about.model_hash],
            platform="pytorch",
            inputs=[Described(name="images", datatype="UINT8", shape=shape)],
            outputs=[
                Described(name=name, datatype=kind, shape=[ANY])
                for name, kind in _outputs(about).items()
            ],
        )

    @app.post(
        f"{path}/infer",
        responses=PROBLEMS,
        openapi_extra={"requestBody": infer_body()},
        dependencies=token,
    )
    async def infer(request: Request) -> InferAnswer:
        """Score images that come as one array. Those of another size are fitted to the network's."""
        if kind_of(request) != "application/json":
            raise HTTPException(415, "the body's type is not known; send application/json.")
        taken = intake()
        asked, images = await decode(request, _asked, await request.body(), taken)
        about = startup.about
        kinds = _outputs(about)
        wanted = list(kinds) if asked.outputs is None else [output.name for output in asked.outputs]
        unknown = [name for name in wanted if name not in kinds]
        if unknown:
            raise HTTPException(
                422, f"there is no output {unknown[0][:ECHO]!r}; choose from {', '.join(kinds)}."
            )
        found = await answered(request, images, False)
        columns = {name: [_column(result, name) for result in found] for name in wanted}
        return InferAnswer(
            model_name=about.model,
            model_version=about.model_hash,
            id=asked.id,
            outputs=[
                OutputTensor(name=n, datatype=kinds[n], shape=[len(v)], data=v)
                for n, v in columns.items()
            ],
        )


def _outputs(about: About) -> dict[str, str]:
    """Names and types of the outputs: those that the service has something to say for."""
    kinds = {
        "prediction": "INT64",
        "confidence": "FP64",
        **{f"score_{name}": "FP64" for name in about.methods},
    }
    kinds |= {"class_name": "BYTES"} if about.class_names else {}
    kinds |= {"percentile": "FP64"} if about.reference else {}
    return kinds | ({"accepted": "BOOL"} if about.rule is not None else {})


def _column(result: dict[str, Any], name: str) -> Any:
    if name == "accepted":
        return result["decision"] == "accepted"
    return (
        result["scores"][name.removeprefix("score_")] if name.startswith("score_") else result[name]
    )


def _asked(body: bytes, intake: Intake) -> tuple[InferRequest, list[Pixels]]:
    """A request, and its images."""
    asked = InferRequest.model_validate_json(body)
    tensor = asked.inputs[0]
    intake.require_count(tensor.shape[0])
    intake.require_pixels(tensor.shape)
    values = _numbers(tensor.data, math.prod(tensor.shape))
    if values is None:
        raise HTTPException(
            422,
            f"data does not hold the {math.prod(tensor.shape)} numbers of shape {tensor.shape}; send as many.",
        )
    white = 255 if tensor.datatype == "UINT8" else 1
    return asked, intake.of_numbers(list(values.reshape(tensor.shape)), white)


def _numbers(data: list[Any], count: int) -> np.ndarray | None:
    """So many numbers, flat; None if there are others, or something else.

    numpy would take whatever there is, and a text among many numbers takes its length for each of
    them.
    """
    flat = data
    for _ in range(MOST_AXES - 1):
        if not flat or type(flat[0]) is not list:
            break
        length = len(flat[0])
        if len(flat) * length > count or any(
            type(row) is not list or len(row) != length for row in flat
        ):
            return None
        flat = list(chain.from_iterable(flat))
    if len(flat) != count or not {int, float}.issuperset(map(type, flat)):
        return None
    try:
        values = np.asarray(flat)
    except (ValueError, OverflowError):
        return None
    return values if values.dtype.kind in "iuf" else None
