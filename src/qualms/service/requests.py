"""What may come in, and what is told of it in OpenAPI. Nothing in it names a file, a network or an
object to load.
"""

from typing import Annotated, Any, Literal

from fastapi import Request
from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError

from qualms.service.uploads import ECHO, FORMATS

Number = Annotated[float, Field(strict=True, ge=0, le=255, allow_inf_nan=False)]
# The first mistake is told, and the others are not looked for: there may be millions.
Color = Annotated[list[Number], Field(min_length=1, max_length=3)]
Row = Annotated[list[Number | Color], FailFast(), Field(min_length=1)]
Image = Annotated[list[Row], FailFast(), Field(min_length=1)]
OUTPUTS = 100  # that a client may name; there are fewer
MISTAKES = 100  # up to which they are made into words


class Arrays(BaseModel):
    """Images as numbers."""

    model_config = ConfigDict(extra="forbid")

    images: Annotated[list[Image], FailFast()] = Field(
        min_length=1,
        description="Each image as [height][width] for gray or [height][width][3] for color, red, green and blue.",
        examples=[[[[0, 255], [255, 0]]]],
    )
    white: Literal[1, 255] = Field(
        255,
        description="Which number is white: 255 for whole numbers from 0 to 255, or 1 for numbers from 0 to 1.",
    )


INFER_EXAMPLE: dict[str, Any] = {
    "inputs": [
        {"name": "images", "shape": [1, 2, 2], "datatype": "UINT8", "data": [0, 255, 255, 0]}
    ]
}


class InputTensor(BaseModel):
    """The images, in the open inference protocol."""

    model_config = ConfigDict(extra="forbid")

    name: Literal["images"]
    shape: Annotated[list[Annotated[int, Field(strict=True, ge=1, le=2**31)]], FailFast()] = Field(
        min_length=3,
        max_length=4,
        description="[images, height, width] or [images, height, width, channels].",
    )
    datatype: Literal["UINT8", "FP32"] = Field(description="UINT8 has white at 255, FP32 at 1.")
    data: list[Any] = Field(min_length=1, description="The numbers row by row, nested or flat.")
    parameters: dict[str, Any] | None = Field(None, description="Not used.")


class WantedOutput(BaseModel):
    """One output that the client wants, in the open inference protocol."""

    model_config = ConfigDict(extra="forbid")

    name: str
    parameters: dict[str, Any] | None = Field(None, description="Not used.")


class InferRequest(BaseModel):
    """A request of the open inference protocol."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [INFER_EXAMPLE]})

    id: str | None = Field(None, max_length=200, description="Comes back with the answer.")
    inputs: Annotated[list[InputTensor], FailFast()] = Field(min_length=1, max_length=1)
    outputs: Annotated[list[WantedOutput], Field(max_length=OUTPUTS)] | None = Field(
        None, description="All outputs, if it is left out."
    )
    parameters: dict[str, Any] | None = Field(None, description="Not used.")


def score_body(most: int) -> dict[str, Any]:
    """The body of a request to score at most so many images, for OpenAPI: FastAPI does not see two
    kinds of bodies.
    """
    files = {
        "type": "array",
        "minItems": 1,
        "maxItems": most,
        "items": {"type": "string", "format": "binary"},
        "description": f"One or more image files: {', '.join(FORMATS)}.",
    }
    form = {
        "type": "object",
        "required": ["images"],
        "properties": {"images": files},
        "additionalProperties": False,
    }
    arrays = Arrays.model_json_schema()
    arrays["properties"]["images"]["maxItems"] = most
    return {
        "required": True,
        "content": {
            "multipart/form-data": {"schema": form},
            "application/json": {"schema": arrays},
        },
    }


def kind_of(request: Request) -> str:
    """The type of a request's body, without its parameters."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def infer_body() -> dict[str, Any]:
    """The body of a request of the open inference protocol, for OpenAPI: the route reads it by
    itself.
    """
    schema = InferRequest.model_json_schema()
    return {
        "required": True,
        "content": {"application/json": {"schema": _whole(schema, schema.pop("$defs"))}},
    }


def _whole(schema: Any, parts: dict[str, Any]) -> Any:
    """A schema with its parts in place: OpenAPI looks for references in its own document."""
    if isinstance(schema, list):
        return [_whole(one, parts) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _whole(parts[schema["$ref"].rpartition("/")[2]], parts)
    return {key: _whole(value, parts) for key, value in schema.items()}


def problem(error: ValidationError) -> tuple[int, str]:
    """What is wrong with a body: the status of the answer, and one sentence."""
    if error.error_count() > MISTAKES:  # each would be an object
        return 422, f"the body has {error.error_count():,} mistakes; /docs lists what it may hold."
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        return 400, "the body is not JSON; check it."
    # Without pydantic's names of the kinds that it tried.
    where = (
        ".".join(str(part) for part in first["loc"] if str(part).replace("_", "").isalnum())
        or "the body"
    )
    return (
        422,
        f"{where[:ECHO]} is not as it should be: {first['msg'][:1].lower()}{first['msg'][1:]}.",
    )
