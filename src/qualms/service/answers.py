"""What goes out."""

import math
from typing import Any, Literal

from pydantic import BaseModel, Field

from qualms.result import Scored


class LayerShare(BaseModel):
    """How much of the score comes from one layer."""

    name: str
    share: float = Field(description="From 0 to 1.")


class Result(BaseModel):
    """What the network says of one image, and whether to trust it."""

    id: str = Field(description="The file's name, or the image's number in the request.")
    prediction: int = Field(description="The most probable class, counted from 0.")
    class_name: str | None = Field(description="Its name, if the classes have names.")
    confidence: float = Field(description="Its probability.")
    scores: dict[str, float] = Field(description="By method; higher always means more uncertain.")
    percentile: float | None = Field(
        description="The percentage of the threshold's reference scores that are lower, by the first method."
    )
    decision: Literal["accepted", "abstain"] | None = Field(
        description="By the threshold, if the service has one."
    )
    layers: list[LayerShare] | None = Field(
        description="If asked for: the layers that the first method's score comes from, in the order of the network."
    )


class Answer(BaseModel):
    """The answer to one request, its images in the order in which they came."""

    model: str
    model_hash: str = Field(description="A digest of the network's weights.")
    method: str = Field(description="The first method, which decides.")
    threshold: float | None = Field(
        description="The highest score that is accepted; null if none is, or without a threshold."
    )
    seconds: float = Field(description="From the request's headers to the answer.")
    results: list[Result]


class Problem(BaseModel):
    """What is wrong, in one sentence."""

    error: str


class NotReady(BaseModel):
    """Why the network does not answer, for probes."""

    status: Literal["warming up", "failed", "hangs"]
    step: str = Field(description="What is being done, or was as it failed.")
    step_number: int = Field(description="From 1.")
    steps: int
    seconds: float = Field(description="Since the service began to start.")


class About(BaseModel):
    """What the service serves."""

    model: str
    model_hash: str
    methods: list[str] = Field(description="The first one decides.")
    class_names: list[str] | None
    threshold: float | None
    rule: str | None = Field(description="How the threshold was set.")
    reference: list[float] = Field(
        description="Scores that the threshold was set on, in rising order."
    )
    layers: bool = Field(description="Whether the first method's score comes from layers.")
    tolerance: float | None = Field(
        description="The standard error that a gradient score may have, as a share of its value; 0 is exact. Null: not "
        "settled yet, or no score is one."
    )


PROBLEMS: dict[int | str, dict[str, Any]] = {
    400: {"model": Problem, "description": "The body cannot be read."},
    401: {"model": Problem, "description": "The token is missing or wrong."},
    403: {
        "model": Problem,
        "description": "Without a token, only 127.0.0.1 and localhost are answered.",
    },
    408: {"model": Problem, "description": "The body did not arrive in time."},
    413: {
        "model": Problem,
        "description": "The body, the images or the number of images is too large.",
    },
    415: {"model": Problem, "description": "The body's type is not known."},
    422: {"model": Problem, "description": "The body can be read, but is not a valid request."},
    429: {
        "model": Problem,
        "description": "Too many requests are waiting; come back after `Retry-After` seconds.",
    },
    500: {"model": Problem, "description": "A defect; the service's log has the details."},
    503: {
        "model": Problem,
        "description": "The network is not ready; come back after `Retry-After` seconds.",
    },
    504: {"model": Problem, "description": "The scores did not come in time."},
}


def results(scored: Scored) -> list[dict[str, Any]]:
    """A `Result` for each input, but for its id."""
    threshold = scored.threshold
    names = scored.class_names
    percentiles = (
        scored.percentile.tolist()
        if threshold is not None and threshold.reference
        else [None] * len(scored)
    )
    accepted = scored.accepted.tolist() if threshold is not None else [None] * len(scored)
    rows = zip(
        scored.prediction.tolist(), scored.confidence.tolist(), percentiles, accepted, strict=True
    )
    return [
        {
            "prediction": prediction,
            "class_name": names[prediction] if names else None,
            "confidence": confidence,
            "scores": {name: float(values[i]) for name, values in scored.scores.items()},
            "percentile": percentile,
            "decision": None if taken is None else "accepted" if taken else "abstain",
            "layers": None,
        }
        for i, (prediction, confidence, percentile, taken) in enumerate(rows)
    ]


def finite(value: float | None) -> float | None:
    """A number that JSON can hold."""
    return value if value is not None and math.isfinite(value) else None
