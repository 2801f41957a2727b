"""Percentile bootstrap intervals: the uncertainty of a measure over the choice of inputs."""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qualms.errors import QualmsError
from qualms.metrics.checks import array

# The most draws for each resample that is needed: gives up where a measure is undefined on more
# than nine tenths of the draws.
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
        paired: Whether row i of all samples is one input, as in `raulc(uncertainty, correct)`. If
            not, each sample is drawn on its own, as in `auroc(in_scores, out_scores)`.
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
    tables = []
    sizes = []
    for i, sample in enumerate(samples, 1):
        table = array(sample, f"sample {i}")
        tables.append(table)
        sizes.append(len(table) if table.ndim else 0)
    differ = len(set(sizes)) > 1
    if not tables or not all(sizes) or (paired and differ):
        raise QualmsError(
            f"the samples have {sizes} inputs; pass at least one sample, "
            "and paired samples of the same size."
        )
    if resamples < 1 or not 0 < level < 1:
        raise QualmsError(
            f"resamples={resamples} and level={level} are invalid; "
            "pass at least 1 resample and a level between 0 and 1."
        )
    # Raises an error if it is undefined on the samples themselves.
    measure(*tables)
    values = _resampled_values(measure, tables, paired, resamples, seed)
    return central_interval(list(islice(values, resamples)), level)


def central_interval(values: Sequence[float], level: float) -> tuple[float, float]:
    """Compute the quantiles (1 - level) / 2 and (1 + level) / 2 of some values.

    Args:
        values: Numbers in any order.
        level: The share of them between the two quantiles.
    """
    ends = [(1 - level) / 2, (1 + level) / 2]
    low, high = np.quantile(values, ends)
    return float(low), float(high)


def _resampled_values(
    measure: Callable[..., float],
    tables: list[NDArray[Any]],
    paired: bool,
    resamples: int,
    seed: int,
) -> Iterator[float]:
    """Yield the measure on one resample after the other, without those where it is undefined.

    Args:
        measure: A function of the tables.
        tables: Arrays whose rows are drawn.
        paired: Whether the same rows are drawn from all of them.
        resamples: The number of values needed, which bounds the number of draws.
        seed: The seed of the draws.
    """
    random = np.random.default_rng(seed)
    for _ in range(DRAWS_PER_RESAMPLE * resamples):
        resample = []
        rows = None
        for table in tables:
            if rows is None or not paired:
                rows = random.integers(len(table), size=len(table))
            resample.append(table[rows])
        try:
            yield measure(*resample)
        except QualmsError:
            continue
    raise QualmsError("the measure is undefined on nearly all resamples; pass more inputs.")
