"""The order of rising uncertainty, in which equal scores have no order: every one of theirs is
equally likely.
"""

import numpy as np
from jaxtyping import Bool, Float

from qualms.metrics.checks import Bools, Floats


def total_among_most_certain(
    uncertainty: Float[Floats, " n"], values: Bool[Bools, " n"] | Float[Floats, " n"]
) -> Float[Floats, " n"]:
    """The expected sum of the values of the i most certain inputs, i = 1..n; of outcomes, how many
    are correct.

    Each place among m equal scores holds each of their m values with probability 1/m: within a tie
    the expected sum grows linearly, whatever the order of the inputs.
    """
    _, tie, sizes = np.unique(uncertainty, return_inverse=True, return_counts=True)
    sums = np.bincount(tie, weights=values)
    ends = np.concatenate([[0.0], np.cumsum(sizes)])
    totals = np.concatenate([[0.0], np.cumsum(sums)])
    return np.interp(np.arange(1, len(uncertainty) + 1), ends, totals)
