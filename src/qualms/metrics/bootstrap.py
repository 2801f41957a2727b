"""Percentile bootstrap intervals: the uncertainty of a measure over the choice of inputs."""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qualms.errors import QualmsError
from qualms.metrics.checks import array

# The most draws for each resample that is needed: a measure that is undefined on more than nine
# tenths of the draws is an error.
DRAWS_PER_RESAMPLE = 10


def interval(
    measure: Callable[..., float],
    *samples: Any,
    paired: bool = False,
    resamples: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> tuple[float, float]:
    """Compute the percentile bootstrap interval of a measure.

    Resamples are drawn with replacement and have the sizes of the samples. A resample on which the
    measure is undefined (it raises `QualmsError`) is drawn again.

    Args:
        measure: A function of the samples, such as `auroc`.
        samples: Its arguments, arrays whose first axis counts the inputs.
        paired: Whether row i of all samples belongs to one input, as in `raulc(uncertainty,
            correct)`. If not, each sample is resampled independently, as in `auroc(in_scores,
            out_scores)`.
        resamples: The number of resamples.
        level: The share of resamples between the two ends.
        seed: The seed of the draws.

    Returns:
        The quantiles (1 - level) / 2 and (1 + level) / 2.

    Example:
        ```python
        from qualms.metrics import auroc, interval

        known, unknown = [0.1, 0.2, 0.4, 0.3], [0.3, 0.9, 0.8]
        low, high = interval(auroc, known, unknown, resamples=200)
        print(f"AUROC {auroc(known, unknown):.2f}, between {low:.2f} and {high:.2f}")
        ```
    """
    arrays = []
    sizes = []
    for i, sample in enumerate(samples, 1):
        values = array(sample, f"sample {i}")
        arrays.append(values)
        # A single number has no axis of inputs, and is refused below.
        sizes.append(len(values) if values.ndim else 0)
    sizes_differ = len(set(sizes)) > 1
    if not arrays or not all(sizes) or (paired and sizes_differ):
        raise QualmsError(
            f"the samples have {sizes} inputs; pass at least one sample, "
            "and paired samples of the same size."
        )
    if resamples < 1 or not 0 < level < 1:
        raise QualmsError(
            f"resamples={resamples} and level={level} are invalid; "
            "pass at least 1 resample and a level between 0 and 1."
        )
    # Raises an error if the measure is undefined on the samples themselves.
    measure(*arrays)
    resampled = _measure_resamples(
        measure,
        arrays,
        paired=paired,
        resamples=resamples,
        seed=seed,
    )
    return central_interval(list(islice(resampled, resamples)), level)


def central_interval(values: Sequence[float], level: float) -> tuple[float, float]:
    """Compute the quantiles (1 - level) / 2 and (1 + level) / 2 of some values.

    Args:
        values: Numbers in any order.
        level: The share of them between the two quantiles.
    """
    ends = [(1 - level) / 2, (1 + level) / 2]
    low, high = np.quantile(values, ends)
    return float(low), float(high)


def _measure_resamples(
    measure: Callable[..., float],
    arrays: list[NDArray[Any]],
    paired: bool,
    resamples: int,
    seed: int,
) -> Iterator[float]:
    """Draw resamples, and yield the measure of each on which it is defined.

    Args:
        measure: A function of the arrays; it raises a `QualmsError` where it is undefined.
        arrays: The arrays whose rows are drawn with replacement.
        paired: Whether the same rows are drawn from all arrays, which then have one length.
        resamples: The number of values that the caller needs.
        seed: The seed of the draws.

    Raises:
        QualmsError: If ten times as many draws do not give the values that the caller needs.
    """
    random = np.random.default_rng(seed)
    for _ in range(DRAWS_PER_RESAMPLE * resamples):
        resample = []
        rows = None
        for values in arrays:
            # Paired arrays share the rows drawn for the first one.
            if rows is None or not paired:
                rows = random.integers(len(values), size=len(values))
            resample.append(values[rows])
        try:
            yield measure(*resample)
        except QualmsError:
            # Undefined on this resample: draw another one.
            continue
    raise QualmsError("the measure is undefined on nearly all resamples; pass more inputs.")
