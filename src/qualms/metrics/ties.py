"""The order of rising uncertainty, in which equal scores have no order: every one of theirs is equally likely."""

import numpy as np
from jaxtyping import Bool, Float

from qualms.metrics.arrays import Bools, Floats


def correct_among_most_certain(uncertainty: Float[Floats, " n"], correct: Bool[Bools, " n"]) -> Float[Floats, " n"]:
    """The expected number of correct predictions among the i most certain, i = 1..n.

    Among m equal scores with k correct ones, each place in the order holds a correct one with probability k/m: within a
    tie the expected number grows linearly, whatever the order of the inputs.
    """
    _, tie, sizes = np.unique(uncertainty, return_inverse=True, return_counts=True)
    right = np.bincount(tie, weights=correct)
    ends, totals = (np.concatenate([[0.0], np.cumsum(each)]) for each in (sizes, right))
    return np.interp(np.arange(1, len(uncertainty) + 1), ends, totals)
