"""The JSON of requests and answers, as pydantic models and in OpenAPI.

    POST /v1/score    ImageArrays (or a form with files)  ->  Answer with a Result for each image
    POST /v2/…/infer  InferRequest                        ->  InferResponse (in protocol.py)
    GET  /v1/model                                        ->  ModelInfo
    GET  /readyz                                          ->  NotReady, until the network is ready
    all errors                                            ->  ErrorBody

No field of a request names a file, a network or an object to load. Lists fail at their first
mistake (`FailFast`), because a request may hold millions. The docstrings and descriptions of the
models are shown at /docs and in /openapi.json.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError

# Pillow decodes these itself. For others it may start a program such as Ghostscript.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
MAX_ECHO = 80  # characters of a request that an error message repeats
# The most names of outputs in a request; a service has fewer outputs.
MAX_OUTPUTS = 100
# With more mistakes, only their number is reported: Pydantic makes an object for each description.
MAX_MISTAKES = 100

Number = Annotated[
    float,
    Field(
        strict=True,
        ge=0,
        le=255,
        allow_inf_nan=False,
    ),
]
# The length of an axis.
Length = Annotated[
    int,
    Field(
        strict=True,
        ge=1,
        le=2**31,
    ),
]
Color = Annotated[list[Number], Field(min_length=1, max_length=3)]
Row = Annotated[list[Number | Color], FailFast(), Field(min_length=1)]
Image = Annotated[list[Row], FailFast(), Field(min_length=1)]


class ImageArrays(BaseModel):
    """Images as nested lists of numbers."""

    model_config = ConfigDict(extra="forbid")

    images: Annotated[list[Image], FailFast()] = Field(
        min_length=1,
        description="Each image as [height][width] (gray) or [height][width][3] (RGB).",
        examples=[[[[0, 255], [255, 0]]]],
    )
    white: Literal[1, 255] = Field(
        255,
        description="255 for integers from 0 to 255, 1 for numbers from 0 to 1.",
    )


class LayerShare(BaseModel):
    """One layer's share of the score."""

    name: str
    share: float = Field(description="The share, from 0 to 1.")


class Result(BaseModel):
    """The prediction for one image, its scores, and the decision whether to trust it."""

    id: str = Field(description="The file's name, or the position of the image in the request.")
    prediction: int = Field(description="The most probable class, counted from 0.")
    class_name: str | None = Field(description="The name of the class, if the classes have names.")
    confidence: float = Field(description="The probability of the class.")
    scores: dict[str, float] = Field(
        description="A score per method; higher always means more uncertain."
    )
    percentile: float | None = Field(
        description="The percentage of the threshold's reference scores that are lower."
    )
    decision: Literal["accepted", "abstain"] | None = Field(
        description="Whether to trust the prediction; null if the service has no threshold."
    )
    layers: list[LayerShare] | None = Field(
        description="Each layer's share of the first method's score, if requested."
    )


class Answer(BaseModel):
    """The results of one request, in the order of its images."""

    model: str
    model_hash: str = Field(description="A digest of the network's weights.")
    method: str = Field(description="The first method, which decides what is accepted.")
    threshold: float | None = Field(
        description="The highest accepted score; null without a threshold, or if no score is "
        "accepted."
    )
    seconds: float = Field(
        description="The time from receiving the request's headers to sending the response."
    )
    results: list[Result]


class ErrorBody(BaseModel):
    """Why a request failed, in one sentence."""

    error: str


class NotReady(BaseModel):
    """Why the network does not answer yet, or not any more."""

    status: Literal["warming up", "failed", "hangs"]
    step: str = Field(description="The current step of startup, or the one that failed.")
    step_number: int = Field(description="The number of the step, counted from 1.")
    steps: int
    seconds: float = Field(description="The time since the service was started.")


class ModelInfo(BaseModel):
    """The network, the methods and the threshold of the service."""

    model: str
    model_hash: str
    methods: list[str] = Field(description="The first one decides what is accepted.")
    class_names: list[str] | None
    threshold: float | None
    rule: str | None = Field(description="How the threshold was set.")
    reference: list[float] = Field(
        description="The scores that the threshold was set on, in ascending order."
    )
    layers: bool = Field(description="Whether the first method's score is a sum over layers.")
    tolerance: float | None = Field(
        description="The largest relative standard error of gradient scores; 0 is exact. "
        "Null until the network is loaded, or without gradient scores."
    )


ERROR_DESCRIPTIONS = {
    400: "The body cannot be parsed.",
    401: "The token is missing or wrong.",
    403: "Without a token, the service answers only requests to 127.0.0.1 and localhost.",
    408: "The body did not arrive in time.",
    413: "The body is too large, or it has too many images or pixels.",
    415: "The content type is not supported.",
    422: "The body can be parsed, but is not a valid request.",
    429: "Too many requests are waiting; retry after `Retry-After` seconds.",
    500: "An internal error; see the service's log.",
    503: "The network is not ready; retry after `Retry-After` seconds.",
    504: "The scores were not ready in time.",
}


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Describe the error responses of a route, for OpenAPI.

    Args:
        statuses: The HTTP statuses that the route may answer; by default all in
            `ERROR_DESCRIPTIONS`.

    Returns:
        The argument `responses` of FastAPI's decorators.
    """
    responses: dict[int | str, dict[str, Any]] = {}
    for status in statuses or ERROR_DESCRIPTIONS:
        description = ERROR_DESCRIPTIONS[status]
        responses[status] = {"model": ErrorBody, "description": description}
    return responses


class InputTensor(BaseModel):
    """The images, in the open inference protocol."""

    model_config = ConfigDict(extra="forbid")

    name: Literal["images"]
    shape: Annotated[list[Length], FailFast()] = Field(
        min_length=3,
        max_length=4,
        description="[images, height, width] or [images, height, width, channels].",
    )
    datatype: Literal["UINT8", "FP32"] = Field(
        description="UINT8 for numbers from 0 to 255, FP32 for numbers from 0 to 1."
    )
    data: list[Any] = Field(
        min_length=1,
        description="The numbers in row-major order, nested or flat.",
    )
    parameters: dict[str, Any] | None = Field(None, description="Ignored.")


class RequestedOutput(BaseModel):
    """One output that the client asks for, in the open inference protocol."""

    model_config = ConfigDict(extra="forbid")

    name: str
    parameters: dict[str, Any] | None = Field(None, description="Ignored.")


INFER_EXAMPLE: dict[str, Any] = {
    "inputs": [
        {"name": "images", "shape": [1, 2, 2], "datatype": "UINT8", "data": [0, 255, 255, 0]}
    ]
}


class InferRequest(BaseModel):
    """A request of the open inference protocol."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [INFER_EXAMPLE]})

    id: str | None = Field(None, max_length=200, description="Returned with the response.")
    inputs: Annotated[list[InputTensor], FailFast()] = Field(min_length=1, max_length=1)
    outputs: Annotated[list[RequestedOutput], Field(max_length=MAX_OUTPUTS)] | None = Field(
        None,
        description="All outputs if omitted.",
    )
    parameters: dict[str, Any] | None = Field(None, description="Ignored.")


def score_body_schema(max_images: int) -> dict[str, Any]:
    """Return the OpenAPI description of the body of a request to `/v1/score`.

    FastAPI would infer one content type, but this route accepts two: a form and JSON.

    Args:
        max_images: The most images in a request.
    """
    files = {
        "type": "array",
        "minItems": 1,
        "maxItems": max_images,
        "items": {"type": "string", "format": "binary"},
        "description": f"One or more image files: {', '.join(FORMATS)}.",
    }
    form = {
        "type": "object",
        "required": ["images"],
        "properties": {"images": files},
        "additionalProperties": False,
    }
    arrays = ImageArrays.model_json_schema()
    arrays["properties"]["images"]["maxItems"] = max_images
    content = {"multipart/form-data": {"schema": form}, "application/json": {"schema": arrays}}
    return {"required": True, "content": content}


def infer_body_schema() -> dict[str, Any]:
    """Return the OpenAPI description of the body of an inference request.

    FastAPI cannot infer it, since the route parses the body itself.
    """
    schema = InferRequest.model_json_schema()
    definitions = schema.pop("$defs")
    content = {"application/json": {"schema": _inline_refs(schema, definitions)}}
    return {"required": True, "content": content}


def _inline_refs(schema: Any, definitions: dict[str, Any]) -> Any:
    """Return a JSON schema in which each `$ref` is replaced by the definition that it names.

    A `$ref` counts from the top of its document: within an OpenAPI document it would name nothing.

    Args:
        schema: A JSON schema, or a part of one: a dict, a list or a plain value.
        definitions: The `$defs` of the schema, by name.
    """
    if isinstance(schema, list):
        return [_inline_refs(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]  # from "#/$defs/NAME"
        return _inline_refs(definitions[name], definitions)
    return {key: _inline_refs(value, definitions) for key, value in schema.items()}


def describe_validation_error(error: ValidationError) -> tuple[int, str]:
    """Describe the first mistake in a body; with more than `MAX_MISTAKES`, only their number.

    Args:
        error: The error that pydantic raised.

    Returns:
        The status of the answer, 400 or 422, and its message.
    """
    count = error.error_count()
    if count > MAX_MISTAKES:
        return 422, f"the body has {count:,} errors; see /docs for the valid fields."
    first = error.errors(
        include_url=False,
        include_context=False,
        include_input=False,
    )[0]
    if first["type"] == "json_invalid":
        return 400, "the body is not valid JSON."
    # The fields and positions that lead to the mistake, such as "images", 0.
    path = []
    for part in map(str, first["loc"]):
        # Leave out Pydantic's names of types, such as `list[float]`.
        if part.replace("_", "").isalnum():
            path.append(part)
    where = ".".join(path) or "the body"
    message = first["msg"]
    return 422, f"{where[:MAX_ECHO]} is invalid: {message[:1].lower()}{message[1:]}."
