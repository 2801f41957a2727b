"""Scores at many positions, made one number for each input, or for each span of its tokens."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from qualms.errors import QualmsError

Reduce = str | float | None  # "mean", "max", "sum", or a quantile between 0 and 1
Spans = Sequence[Sequence[tuple[int, int]]]  # for each input, where its spans start and end


def require_reduction(reduce: Any) -> None:
    """An error if nothing can be reduced so."""
    quantile = isinstance(reduce, float) and 0 < reduce < 1
    if not (reduce is None or reduce in ("mean", "max", "sum") or quantile):
        raise QualmsError(
            f"reduce={reduce!r} is not known; choose mean, max, sum, or a quantile above 0 and below 1."
        )


def reduced(
    values: Float[Tensor, "n ..."], reduce: str | float, spans: Spans | None = None
) -> Float[Tensor, "n ..."]:
    """One number for each input, [n]; with spans, one for each of them, [n, s], NaN beyond an
    input's last.

    Positions that are NaN, since they are masked, do not count; where no other is left, the number
    is NaN.

    Args:
        values: scores at positions.
        reduce: `mean`, `max`, `sum`, or a quantile q between 0 and 1.
        spans: (start, end) of each span of each input, in tokens, the end not included.
    """
    require_reduction(reduce)
    if spans is None:
        return torch.stack([_one(of_input.flatten(), reduce) for of_input in values])
    if values.ndim != 2 or len(spans) != len(values):
        raise QualmsError(
            f"there are spans of {len(spans)} inputs for scores of shape {tuple(values.shape)}; give a list of (start, "
            "end) for each text."
        )
    if not all(len(span) == 2 for of_input in spans for span in of_input):
        raise QualmsError(
            "a span is not a pair of numbers; give (start, end) of each, in a list for each text."
        )
    longest = max((len(of_input) for of_input in spans), default=0)
    found = values.new_full((len(values), longest), math.nan)
    for i, of_input in enumerate(spans):
        for j, (start, end) in enumerate(of_input):
            if not 0 <= start < end <= values.shape[1]:
                raise QualmsError(
                    f"a span goes from {start} to {end} in an input of {values.shape[1]} positions; spans start before "
                    "they end, within the input."
                )
            found[i, j] = _one(values[i, start:end], reduce)
    return found


def _one(values: Float[Tensor, " t"], reduce: str | float) -> Float[Tensor, ""]:
    live = values[~values.isnan()]
    if len(live) == 0:
        return values.new_tensor(math.nan)
    if isinstance(reduce, float):
        return live.quantile(reduce)
    return live.amax() if reduce == "max" else live.sum() if reduce == "sum" else live.mean()
