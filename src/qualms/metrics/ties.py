"""Sums over the most certain inputs, averaged over all orders of equal scores."""

import numpy as np
from jaxtyping import Bool, Float

from qualms.metrics.checks import Bools, Floats


def total_among_most_certain(
    uncertainty: Float[Floats, " n"],
    values: Bool[Bools, " n"] | Float[Floats, " n"],
) -> Float[Floats, " n"]:
    """Compute the expected sum of the values of the i most certain inputs, i = 1..n.

    The sum is expected over all orders of inputs with equal scores. Each of m such inputs is
    equally likely at each of their m ranks, so the expected sum grows linearly over these ranks.

    Args:
        uncertainty: One number per input, of shape [n].
        values: The values to sum, of shape [n]; of booleans, the sum counts the true ones.

    Returns:
        The expected sum for each i, of shape [n].
    """
    # For each input the index of its group of equal scores, and the size of each group.
    _, group_of_input, group_sizes = np.unique(
        uncertainty,
        return_inverse=True,
        return_counts=True,
    )
    group_sums = np.bincount(group_of_input, weights=values)
    # Sums at the ranks where a group ends, beginning with a sum of 0 at rank 0.
    end_ranks = np.concatenate([[0.0], np.cumsum(group_sizes)])
    sums_at_ends = np.concatenate([[0.0], np.cumsum(group_sums)])
    # A straight line between the ends of groups.
    ranks = np.arange(1, len(uncertainty) + 1)
    return np.interp(ranks, end_ranks, sums_at_ends)
