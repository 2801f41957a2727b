"""Bootstrap intervals of AUROC over groups of inputs, such as the tokens of a text.

Tokens of one text are alike, so an interval over single tokens would be far too narrow; whole
groups are drawn instead. Pairs of inputs are counted once for every two groups, and a resample of
groups only weights these counts.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from qualms.errors import QualmsError
from qualms.metrics.bootstrap import central_interval
from qualms.metrics.checks import Floats


def auroc_interval(
    in_groups: Sequence[Floats],
    out_groups: Sequence[Floats],
    *,
    paired: bool = False,
    resamples: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> tuple[float, float]:
    """Compute the bootstrap interval of `auroc` over groups, which are drawn as a whole.

    Args:
        in_groups: The scores of the known inputs, an array per group; groups may be empty.
        out_groups: The scores of the unknown inputs, an array per group.
        paired: Whether known group i and unknown group i belong together, such as the right and the
            wrong answers to one text; then both are drawn or neither is.
        resamples: The number of resamples.
        level: The share of resamples between the two ends.
        seed: The seed of the draws.
    """
    won = pairs_won(in_groups, out_groups)
    sizes = _sizes(in_groups), _sizes(out_groups)
    return _share_interval(won, sizes, paired=paired, resamples=resamples, level=level, seed=seed)


def auroc_difference_interval(
    ours: tuple[Sequence[Floats], Sequence[Floats]],
    theirs: tuple[Sequence[Floats], Sequence[Floats]],
    *,
    resamples: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> tuple[float, float]:
    """Compute the bootstrap interval of AUROC(ours) - AUROC(theirs), two scores of the same inputs.

    Args:
        ours: Our scores: (known groups, unknown groups), one array of scores per group.
        theirs: Their scores of the same inputs, likewise.
        resamples: The number of resamples.
        level: The share of resamples between the two ends.
        seed: The seed of the draws.
    """
    sizes = _sizes(ours[0]), _sizes(ours[1])
    if sizes != (_sizes(theirs[0]), _sizes(theirs[1])):
        raise QualmsError(
            "the two scores have groups of different sizes; pass scores of the same inputs."
        )
    # AUROC is the share of pairs won, so the difference of counts gives the difference of AUROCs.
    lead = pairs_won(*ours) - pairs_won(*theirs)
    return _share_interval(lead, sizes, paired=False, resamples=resamples, level=level, seed=seed)


def pairs_won(in_groups: Sequence[Floats], out_groups: Sequence[Floats]) -> Float[Floats, "i o"]:
    """Count the pairs in which the unknown input has the higher score, for every two groups.

    A tie counts as half a pair.

    Args:
        in_groups: The scores of the known inputs, an array per group.
        out_groups: The scores of the unknown inputs, an array per group.

    Returns:
        The number of pairs won, of shape [known groups, unknown groups].
    """
    # With the index of its group in `owner`.
    known = np.concatenate(in_groups)
    owner = np.repeat(np.arange(len(in_groups)), _sizes(in_groups))
    won = np.empty((len(in_groups), len(out_groups)))
    for column, group in enumerate(out_groups):
        ordered = np.sort(group)
        not_lower = len(group) - np.searchsorted(ordered, known, "left")
        higher = len(group) - np.searchsorted(ordered, known, "right")
        # Of each known input with this group; ties count half.
        pairs = (not_lower + higher) / 2
        won[:, column] = np.bincount(owner, weights=pairs, minlength=len(in_groups))
    return won


def _share_interval(
    won: Float[Floats, "i o"],
    sizes: tuple[list[int], list[int]],
    paired: bool,
    resamples: int,
    level: float,
    seed: int,
) -> tuple[float, float]:
    """Compute the bootstrap interval of the share of pairs that are won.

    Args:
        won: The number of pairs won, of shape [known groups, unknown groups], as `pairs_won` counts
            them; or the difference of two such counts.
        sizes: The sizes of the known groups, and those of the unknown ones.
        paired: Whether a draw takes known and unknown groups with the same indices.
        resamples: The number of resamples.
        level: The share of resamples between the two ends.
        seed: The seed of the draws.
    """
    inside = np.array(sizes[0], float)
    outside = np.array(sizes[1], float)
    random = np.random.default_rng(seed)
    values = []
    for _ in range(resamples):
        # How often each known group (a) and each unknown group (b) is drawn.
        a = _draw_counts(random, len(inside))
        b = a
        if not paired:
            b = _draw_counts(random, len(outside))
        pairs = (a @ inside) * (b @ outside)
        if pairs:
            values.append((a @ won @ b) / pairs)
    if not values:
        raise QualmsError("no resample has inputs of both kinds; pass more inputs.")
    return central_interval(values, level)


def _sizes(groups: Sequence[Floats]) -> list[int]:
    """Return the number of inputs in each group."""
    return list(map(len, groups))


def _draw_counts(random: np.random.Generator, count: int) -> Float[Floats, " n"]:
    """Draw `count` of `count` groups with replacement, and count how often each is drawn."""
    drawn = random.integers(count, size=count)
    return np.bincount(drawn, minlength=count).astype(float)
