"""AUROC with an interval over groups of inputs, such as the tokens of a text, which are drawn
together.

Tokens of one text are alike, so that an interval over tokens would be far too narrow. The pairs of
every two groups are counted once; a resample of groups then only weights the counts.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from qualms.errors import QualmsError
from qualms.metrics.bootstrap import middle_of
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
    """The middle of what `auroc` gives on resamples of whole groups, drawn as `interval` draws inputs.

    Args:
        in_groups: the scores of the known inputs, an array for each group; one may be empty.
        out_groups: those of the unknown ones.
        paired: group i of both is one thing, such as the right and the wrong answers on one text.
        resamples: how many.
        level: the share of them between the two ends.
        seed: decides the draws.
    """
    won = pairs_won(in_groups, out_groups)
    sizes = _sizes(in_groups, out_groups)
    return _share_interval(won, sizes, paired, resamples, level, seed)


def lead_interval(
    ours: tuple[Sequence[Floats], Sequence[Floats]],
    theirs: tuple[Sequence[Floats], Sequence[Floats]],
    *,
    resamples: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> tuple[float, float]:
    """The same for the lead of one score's AUROC over another's, on the same resamples of the same
    groups.

    Args:
        ours: the known and the unknown groups, by one score.
        theirs: the same inputs, by the other.
        resamples: how many.
        level: the share of them between the two ends.
        seed: decides the draws.
    """
    sizes = _sizes(*ours)
    if sizes != _sizes(*theirs):
        raise QualmsError(
            "the two scores have groups of different sizes; compare scores of the same inputs."
        )
    lead = pairs_won(*ours) - pairs_won(*theirs)
    return _share_interval(lead, sizes, False, resamples, level, seed)


def pairs_won(in_groups: Sequence[Floats], out_groups: Sequence[Floats]) -> Float[Floats, "i o"]:
    """For every two groups, in how many pairs of their inputs the unknown one has the higher score;
    a tie is half.

    Args:
        in_groups: the scores of the known inputs, an array for each group.
        out_groups: those of the unknown ones.
    """
    known = np.concatenate(in_groups)
    owner = np.repeat(np.arange(len(in_groups)), [len(group) for group in in_groups])
    won = np.empty((len(in_groups), len(out_groups)))
    for column, group in enumerate(out_groups):
        ordered = np.sort(group)
        not_lower = len(group) - np.searchsorted(ordered, known, "left")
        higher = len(group) - np.searchsorted(ordered, known, "right")
        won[:, column] = np.bincount(
            owner, weights=(not_lower + higher) / 2, minlength=len(in_groups)
        )
    return won


def _share_interval(
    won: Float[Floats, "i o"],
    sizes: tuple[list[int], list[int]],
    paired: bool,
    resamples: int,
    level: float,
    seed: int,
) -> tuple[float, float]:
    """The middle of the share of pairs that are won, over resamples of the groups.

    Args:
        won: pairs, for every two groups.
        sizes: of the known groups, and of the unknown ones.
        paired: whether the same groups are drawn of both.
        resamples: how many.
        level: the share of them between the two ends.
        seed: decides the draws.
    """
    inside, outside = np.array(sizes[0], float), np.array(sizes[1], float)
    random = np.random.default_rng(seed)
    values = []
    for _ in range(resamples):
        a = _draw_counts(random, len(inside))
        b = a if paired else _draw_counts(random, len(outside))
        pairs = (a @ inside) * (b @ outside)
        if pairs:
            values.append((a @ won @ b) / pairs)
    if not values:
        raise QualmsError("no resample has inputs of both kinds; take more of them.")
    return middle_of(values, level)


def _sizes(
    in_groups: Sequence[Floats], out_groups: Sequence[Floats]
) -> tuple[list[int], list[int]]:
    return [len(group) for group in in_groups], [len(group) for group in out_groups]


def _draw_counts(random: np.random.Generator, count: int) -> Float[Floats, " n"]:
    """How often each of some groups is drawn, if as many are drawn with replacement."""
    drawn = random.integers(count, size=count)
    return np.bincount(drawn, minlength=count).astype(float)
