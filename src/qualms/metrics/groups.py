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

    Returns:
        The two ends of the interval.
    """
    won = count_pairs_won(in_groups, out_groups)
    return _share_interval(
        won,
        sizes=(_group_sizes(in_groups), _group_sizes(out_groups)),
        paired=paired,
        resamples=resamples,
        level=level,
        seed=seed,
    )


def auroc_difference_interval(
    ours: tuple[Sequence[Floats], Sequence[Floats]],
    theirs: tuple[Sequence[Floats], Sequence[Floats]],
    *,
    resamples: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> tuple[float, float]:
    """Compute the bootstrap interval of AUROC(ours) - AUROC(theirs), two scores of the same inputs.

    Whole groups of inputs are drawn.

    Args:
        ours: The scores of one method: (known groups, unknown groups), an array of scores per
            group.
        theirs: The scores of another method for the same inputs, in the same form.
        resamples: The number of resamples.
        level: The share of resamples between the two ends.
        seed: The seed of the draws.

    Returns:
        The two ends of the interval.
    """
    sizes = _group_sizes(ours[0]), _group_sizes(ours[1])
    if sizes != (_group_sizes(theirs[0]), _group_sizes(theirs[1])):
        raise QualmsError(
            "the two scores have groups of different sizes; pass scores of the same inputs."
        )
    # AUROC is the share of pairs won, so the difference of counts gives the difference of AUROCs.
    lead = count_pairs_won(*ours) - count_pairs_won(*theirs)
    return _share_interval(
        lead,
        sizes,
        paired=False,
        resamples=resamples,
        level=level,
        seed=seed,
    )


def count_pairs_won(
    in_groups: Sequence[Floats],
    out_groups: Sequence[Floats],
) -> Float[Floats, "i o"]:
    """Count the pairs in which the unknown input has the higher score, for every two groups.

    A pair is a known input of the one group and an unknown input of the other. A tie counts as half
    a pair.

    Args:
        in_groups: The scores of the known inputs, an array per group.
        out_groups: The scores of the unknown inputs, an array per group.

    Returns:
        The number of pairs won, of shape [known groups, unknown groups].
    """
    # The scores of all known inputs, and the index of each one's group.
    known = np.concatenate(in_groups)
    group_of_known = np.repeat(np.arange(len(in_groups)), _group_sizes(in_groups))
    won = np.empty((len(in_groups), len(out_groups)))
    for column, group in enumerate(out_groups):
        sorted_group = np.sort(group)
        # For each known input, how many of the unknown inputs in this group have a score that is
        # not lower, and how many have a higher one. Their mean counts ties half.
        num_not_lower = len(group) - np.searchsorted(sorted_group, known, "left")
        num_higher = len(group) - np.searchsorted(sorted_group, known, "right")
        won_by_known = (num_not_lower + num_higher) / 2
        # Summed over the known inputs of each group.
        won[:, column] = np.bincount(
            group_of_known,
            weights=won_by_known,
            minlength=len(in_groups),
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
    """Compute the bootstrap interval of the share of pairs that are won: the AUROC.

    Args:
        won: The number of pairs won, of shape [known groups, unknown groups], as `count_pairs_won`
            returns it; or the difference of two such counts.
        sizes: The numbers of inputs in the known groups, and those in the unknown groups.
        paired: Whether a resample takes known and unknown groups with the same indices.
        resamples: The number of resamples.
        level: The share of resamples between the two ends.
        seed: The seed of the draws.

    Returns:
        The two ends of the interval.
    """
    in_sizes = np.array(sizes[0], float)
    out_sizes = np.array(sizes[1], float)
    random = np.random.default_rng(seed)
    shares = []
    for _ in range(resamples):
        # How often each group is in the resample.
        in_counts = _draw_counts(random, len(in_sizes))
        out_counts = in_counts
        if not paired:
            out_counts = _draw_counts(random, len(out_sizes))
        num_pairs = (in_counts @ in_sizes) * (out_counts @ out_sizes)
        # A resample may draw empty groups alone, and then has no AUROC.
        if num_pairs:
            shares.append((in_counts @ won @ out_counts) / num_pairs)
    if not shares:
        raise QualmsError("no resample has inputs of both kinds; pass more inputs.")
    return central_interval(shares, level)


def _group_sizes(groups: Sequence[Floats]) -> list[int]:
    """Return the number of inputs in each group."""
    return list(map(len, groups))


def _draw_counts(random: np.random.Generator, num_groups: int) -> Float[Floats, " n"]:
    """Resample n groups: draw n of them with replacement, and count how often each is drawn.

    Args:
        random: The generator of the draws.
        num_groups: The number n of groups.
    """
    drawn = random.integers(num_groups, size=num_groups)
    return np.bincount(drawn, minlength=num_groups).astype(float)
