"""What users pass as scores, outcomes, logits and labels, as checked numpy arrays."""

from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from qualms.errors import QualmsError

Floats: TypeAlias = NDArray[np.float64]
Integers: TypeAlias = NDArray[np.int64]
Bools: TypeAlias = NDArray[np.bool_]


def array(values: Any, what: str) -> NDArray[Any]:
    """An array of at least one number.

    Args:
        values: whatever numpy takes, and tensors on any device, with or without a graph.
        what: what errors call them.
    """
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        if values.is_floating_point():
            values = values.double()  # numpy has no bfloat16
    try:
        found = np.asarray(values)
    except (ValueError, TypeError, RuntimeError):
        found = np.asarray(None)
    if found.dtype.kind not in "biuf":
        raise QualmsError(f"{what} is not an array of numbers; pass a list, an array or a tensor.")
    if found.size == 0:
        raise QualmsError(f"{what} is empty; pass at least one number.")
    return found


def scores(values: Any, what: str) -> Float[Floats, " n"]:
    """One finite number for each input, in double precision.

    Args:
        values: what `array` takes.
        what: what errors call them.
    """
    found = array(values, what)
    if found.ndim != 1:
        raise QualmsError(
            f"{what} has shape {found.shape}; pass one number for each input, in one axis."
        )
    return _finite(found.astype(np.float64), what)


def scores_and_outcomes(
    uncertainty: Any, correct: Any
) -> tuple[Float[Floats, " n"], Bool[Bools, " n"]]:
    """For each input its uncertainty, and whether the prediction is right.

    Args:
        uncertainty: finite numbers [n].
        correct: truth values, or 0 and 1, [n].
    """
    u, right = scores(uncertainty, "uncertainty"), scores(correct, "correct")
    _same_length(u, "scores in uncertainty", right, "outcomes in correct")
    if not np.isin(right, (0, 1)).all():
        raise QualmsError(
            "correct has values other than 0 and 1; pass for each input whether the prediction is right."
        )
    return u, right.astype(np.bool_)


def scores_and_qualities(
    uncertainty: Any, quality: Any
) -> tuple[Float[Floats, " n"], Float[Floats, " n"]]:
    """For each output its uncertainty, and how good it is.

    Args:
        uncertainty: finite numbers [n].
        quality: finite numbers [n].
    """
    u, q = scores(uncertainty, "uncertainty"), scores(quality, "quality")
    _same_length(u, "scores in uncertainty", q, "numbers in quality")
    return u, q


def logits_and_labels(logits: Any, labels: Any) -> tuple[Float[Floats, "n c"], Int[Integers, " n"]]:
    """For each input the logits of all classes, and the number of its class.

    Args:
        logits: finite numbers [n, classes].
        labels: whole numbers [n], from 0.
    """
    z, y = array(logits, "logits"), array(labels, "labels")
    if z.ndim != 2:
        raise QualmsError(
            f"logits has shape {z.shape}; pass one row for each input and one column for each class."
        )
    if y.ndim != 1 or y.dtype.kind == "f":
        raise QualmsError(
            f"labels has shape {y.shape} and type {y.dtype}; pass one whole number for each input, its class."
        )
    _same_length(z, "rows in logits", y, "labels")
    outside = (y < 0) | (y >= z.shape[1])
    if outside.any():
        raise QualmsError(
            f"label {y[outside][0]} is not one of the {z.shape[1]} classes; they count from 0."
        )
    return _finite(z.astype(np.float64), "logits"), y.astype(np.int64)


def _finite(values: NDArray[Any], what: str) -> NDArray[Any]:
    """The values, if all of them are finite."""
    bad = ~np.isfinite(values)
    if bad.any():
        raise QualmsError(
            f"{what} is NaN or infinite for input {int(np.argwhere(bad)[0][0])}; leave such inputs out."
        )
    return values


def _same_length(a: NDArray[Any], a_name: str, b: NDArray[Any], b_name: str) -> None:
    """Raise unless two arrays have as many rows.

    Args:
        a: the one.
        a_name: what its rows are, in the plural.
        b: the other.
        b_name: what its rows are, in the plural.
    """
    if len(a) != len(b):
        raise QualmsError(
            f"there are {len(a)} {a_name} and {len(b)} {b_name}; give one for each input."
        )
