"""How far a measure might be off because the inputs are only a sample: the percentile bootstrap."""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qualms.errors import QualmsError
from qualms.metrics.checks import array

DRAWS_PER_RESAMPLE = (
    10  # a measure that most resamples leave undefined has no interval worth the name
)


def interval(
    measure: Callable[..., float],
    *samples: Any,
    paired: bool = False,
    resamples: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> tuple[float, float]:
    """The middle `level` of what `measure` gives on resamples, drawn with replacement, of the same
    sizes.

    Args:
        measure: such as `auroc`.
        samples: its arguments, arrays whose first axis counts the inputs.
        paired: the samples are columns of one table, whose rows are drawn together
            (`raulc(uncertainty, correct)`); otherwise each is a sample of its own
            (`auroc(in_scores, out_scores)`).
        resamples: how many.
        level: the share of them between the two ends.
        seed: decides the draws.

    A resample on which the measure is undefined (it raises `QualmsError`) is drawn again.

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
    values = list(islice(_values(measure, tables, paired, resamples, seed), resamples))
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def _values(
    measure: Callable[..., float],
    tables: list[NDArray[Any]],
    paired: bool,
    resamples: int,
    seed: int,
) -> Iterator[float]:
    """The measure on one resample after the other."""
    random = np.random.default_rng(seed)
    for _ in range(DRAWS_PER_RESAMPLE * resamples):
        if paired:
            rows = [random.integers(len(tables[0]), size=len(tables[0]))] * len(tables)
        else:
            rows = [random.integers(len(table), size=len(table)) for table in tables]
        try:
            yield measure(*(table[i] for table, i in zip(tables, rows, strict=True)))
        except QualmsError:
            continue
    raise QualmsError("the measure is undefined on nearly all resamples; take more inputs.")
