"""Sums over the most certain inputs, averaged over all orders of equal scores."""

import numpy as np
from jaxtyping import Bool, Float

from qualms.metrics.checks import Bools, Floats


def total_among_most_certain(
    uncertainty: Float[Floats, " n"], values: Bool[Bools, " n"] | Float[Floats, " n"]
) -> Float[Floats, " n"]:
    """Compute the expected sum of the values of the i most certain inputs, i = 1..n.

    Each place among m equal scores holds each of their m values with probability 1/m, so within a
    tie the expected sum grows linearly.

    Args:
        uncertainty: One number per input, of shape [n].
        values: What is summed, of shape [n]; for outcomes, the sum counts the correct ones.

    Returns:
        The sum for each i, of shape [n].
    """
    # For each input the index of its distinct score; and how many inputs have each distinct score.
    _, tie, sizes = np.unique(uncertainty, return_inverse=True, return_counts=True)
    sums = np.bincount(tie, weights=values)
    ends = np.concatenate([[0.0], np.cumsum(sizes)])
    totals = np.concatenate([[0.0], np.cumsum(sums)])
    # Exact sums where a group of equal scores ends, and a straight line in between.
    places = np.arange(1, len(uncertainty) + 1)
    return np.interp(places, ends, totals)
