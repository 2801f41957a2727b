"""Check scores, outcomes, logits and labels from users, and return them as NumPy arrays."""

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
    """Convert values to a NumPy array; raise an error unless they are one or more numbers.

    Args:
        values: What NumPy accepts, or a tensor on any device, which may require gradients.
        what: The name of the values in errors.
    """
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        if values.is_floating_point():
            values = values.double()  # NumPy has no bfloat16
    try:
        converted = np.asarray(values)
    except (ValueError, TypeError, RuntimeError):
        # An array of objects, which is refused below.
        converted = np.asarray(None)
    # The dtypes of booleans, integers, unsigned integers and floats.
    if converted.dtype.kind not in "biuf":
        raise QualmsError(f"{what} is not an array of numbers; pass a list, an array or a tensor.")
    if converted.size == 0:
        raise QualmsError(f"{what} is empty; pass at least one number.")
    return converted


def scores(values: Any, what: str) -> Float[Floats, " n"]:
    """Convert scores to an array [n] in double precision; raise an error unless all are finite.

    Args:
        values: n numbers, in anything that NumPy accepts, or a tensor on any device.
        what: The name of the values in errors.
    """
    converted = array(values, what)
    if converted.ndim != 1:
        raise QualmsError(
            f"{what} has shape {converted.shape}; pass a one-dimensional array, one number per "
            "input."
        )
    return _require_finite(converted.astype(np.float64), what)


def scores_and_outcomes(
    uncertainty: Any,
    correct: Any,
) -> tuple[Float[Floats, " n"], Bool[Bools, " n"]]:
    """Convert the uncertainty and the correctness of each input to checked arrays.

    Args:
        uncertainty: Finite numbers, of shape [n].
        correct: Booleans, or 0 and 1, of shape [n].

    Returns:
        Floats and booleans, both of shape [n].
    """
    u = scores(uncertainty, "uncertainty")
    right = scores(correct, "correct")
    _require_same_length(u, "scores in uncertainty", right, "outcomes in correct")
    if not np.isin(right, (0, 1)).all():
        raise QualmsError(
            "correct has values other than 0 and 1; "
            "pass one value per input: whether its prediction is correct."
        )
    return u, right.astype(np.bool_)


def scores_and_qualities(
    uncertainty: Any,
    quality: Any,
) -> tuple[Float[Floats, " n"], Float[Floats, " n"]]:
    """Convert the uncertainty and the quality of each output to checked arrays of shape [n].

    Args:
        uncertainty: Finite numbers, of shape [n].
        quality: Finite numbers, of shape [n].
    """
    u = scores(uncertainty, "uncertainty")
    q = scores(quality, "quality")
    _require_same_length(u, "scores in uncertainty", q, "numbers in quality")
    return u, q


def logits_and_labels(
    logits: Any,
    labels: Any,
) -> tuple[Float[Floats, "n c"], Int[Integers, " n"]]:
    """Convert logits of shape [n, c] and labels of shape [n] to checked arrays.

    Args:
        logits: Finite numbers, of shape [n, c].
        labels: Integers from 0 to c - 1, of shape [n].
    """
    z = array(logits, "logits")
    y = array(labels, "labels")
    if z.ndim != 2:
        raise QualmsError(
            f"logits has shape {z.shape}; pass one row per input and one column per class."
        )
    if y.ndim != 1 or y.dtype.kind == "f":
        raise QualmsError(
            f"labels has shape {y.shape} and type {y.dtype}; pass one integer per input: its class."
        )
    _require_same_length(z, "rows in logits", y, "labels")
    outside = (y < 0) | (y >= z.shape[1])
    if outside.any():
        raise QualmsError(
            f"label {y[outside][0]} is not one of the {z.shape[1]} classes; classes are numbered "
            "from 0."
        )
    return _require_finite(z.astype(np.float64), "logits"), y.astype(np.int64)


def _require_finite(values: NDArray[Any], what: str) -> NDArray[Any]:
    """Return the values unchanged, or raise an error if any is NaN or infinite.

    Args:
        values: An array whose first axis counts the inputs.
        what: The name of the values in the error, which also names the first such input.
    """
    is_bad = ~np.isfinite(values)
    if is_bad.any():
        first = int(np.argwhere(is_bad)[0][0])
        raise QualmsError(f"{what} is NaN or infinite for input {first}; leave out such inputs.")
    return values


def _require_same_length(
    a: NDArray[Any],
    a_name: str,
    b: NDArray[Any],
    b_name: str,
) -> None:
    """Raise an error unless two arrays have the same length.

    Args:
        a: The first array.
        a_name: What the error calls the rows of `a`, in the plural.
        b: The second array.
        b_name: What the error calls the rows of `b`, in the plural.
    """
    if len(a) != len(b):
        raise QualmsError(f"there are {len(a)} {a_name} and {len(b)} {b_name}; pass one per input.")
