"""AUROC with an interval over groups of inputs, such as the tokens of a text, which are drawn together.

Tokens of one text are alike, so that an interval over tokens would be far too narrow. The pairs of every two groups are
counted once; a resample of groups then only weights the counts.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from qualms.errors import QualmsError
from qualms.metrics.arrays import Floats


def auroc_interval(
    in_groups: Sequence[Floats],
    out_groups: Sequence[Floats],
    *,
    paired: bool = False,
    resamples: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> tuple[float, float]:
    """The middle `level` of what `auroc` gives on resamples of whole groups, drawn as `interval` draws inputs.

    Args:
        in_groups: the scores of the known inputs, an array for each group; one may be empty.
        out_groups: those of the unknown ones.
        paired: group i of both is one thing, such as the right and the wrong answers on one text.
        resamples: how many.
        level: the share of them between the two ends.
        seed: decides the draws.
    """
    higher = pairs_won(in_groups, out_groups)
    inside, outside = (np.array([len(group) for group in groups], float) for groups in (in_groups, out_groups))
    random = np.random.default_rng(seed)
    values = []
    for _ in range(resamples):
        a = _times_drawn(random, len(inside))
        b = a if paired else _times_drawn(random, len(outside))
        pairs = (a @ inside) * (b @ outside)
        if pairs:
            values.append((a @ higher @ b) / pairs)
    if not values:
        raise QualmsError("no resample has inputs of both kinds; take more of them.")
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def pairs_won(in_groups: Sequence[Floats], out_groups: Sequence[Floats]) -> Float[Floats, "i o"]:
    """For every two groups, in how many pairs of their inputs the unknown one has the higher score; a tie is half."""
    known = np.concatenate(in_groups)
    owner = np.repeat(np.arange(len(in_groups)), [len(group) for group in in_groups])
    won = np.empty((len(in_groups), len(out_groups)))
    for column, group in enumerate(out_groups):
        ordered = np.sort(group)
        not_lower = len(group) - np.searchsorted(ordered, known, "left")
        higher = len(group) - np.searchsorted(ordered, known, "right")
        won[:, column] = np.bincount(owner, weights=(not_lower + higher) / 2, minlength=len(in_groups))
    return won


def _times_drawn(random: np.random.Generator, count: int) -> Float[Floats, " n"]:
    return np.bincount(random.integers(count, size=count), minlength=count).astype(float)
