"""How far a measure might be off because the inputs are only a sample: the percentile bootstrap."""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qualms.errors import QualmsError
from qualms.metrics.checks import array

# A measure that most resamples leave undefined has no interval worth the name.
DRAWS_PER_RESAMPLE = 10


def interval(
    measure: Callable[..., float],
    *samples: Any,
    paired: bool = False,
    resamples: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> tuple[float, float]:
    """The middle of what a measure gives on resamples, drawn with replacement, of the same sizes.

    A resample on which the measure is undefined (it raises `QualmsError`) is drawn again.

    Args:
        measure: such as `auroc`.
        samples: its arguments, arrays whose first axis counts the inputs.
        paired: the samples are columns of one table, whose rows are drawn together
            (`raulc(uncertainty, correct)`); otherwise each is a sample of its own
            (`auroc(in_scores, out_scores)`).
        resamples: how many.
        level: the share of them between the two ends.
        seed: decides the draws.

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
    tables = [array(sample, f"sample {i}") for i, sample in enumerate(samples, 1)]
    sizes = [len(table) if table.ndim else 0 for table in tables]
    if not all(sizes) or not tables or (paired and len(set(sizes)) > 1):
        raise QualmsError(
            f"the samples have {sizes} inputs; pass at least one sample, and paired ones with a row for each input."
        )
    if resamples < 1 or not 0 < level < 1:
        raise QualmsError(
            f"resamples={resamples}, level={level}: one resample at least, and a share between 0 and 1."
        )
    measure(*tables)  # if it has no value on the samples themselves, it says why
    values = _resampled_values(measure, tables, paired, resamples, seed)
    return middle_of(list(islice(values, resamples)), level)


def middle_of(values: Sequence[float], level: float) -> tuple[float, float]:
    """The quantiles (1 - level) / 2 and (1 + level) / 2.

    Args:
        values: in any order.
        level: the share of the values between the two.
    """
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def _resampled_values(
    measure: Callable[..., float],
    tables: list[NDArray[Any]],
    paired: bool,
    resamples: int,
    seed: int,
) -> Iterator[float]:
    """The measure on one resample after the other.

    Args:
        measure: of the tables.
        tables: whose rows are drawn.
        paired: whether the same rows are drawn from all of them.
        resamples: how many are needed; many more are not tried.
        seed: decides the draws.
    """
    random = np.random.default_rng(seed)
    for _ in range(DRAWS_PER_RESAMPLE * resamples):
        resample, rows = [], None
        for table in tables:
            if rows is None or not paired:
                rows = random.integers(len(table), size=len(table))
            resample.append(table[rows])
        try:
            yield measure(*resample)
        except QualmsError:
            continue
    raise QualmsError("the measure is undefined on nearly all resamples; take more inputs.")
