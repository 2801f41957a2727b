"""Rejection: does quality rise when the uncertain outputs are rejected?

Malinin & Gales, Uncertainty Estimation in Autoregressive Structured Prediction, ICLR 2021; in the
form of lm-polygraph (Vashurin et al., Benchmarking Uncertainty Quantification Methods for Large
Language Models, TACL 2025).
"""

from typing import Any

import numpy as np

from qualms.errors import QualmsError
from qualms.metrics.checks import Floats, scores_and_qualities
from qualms.metrics.ties import total_among_most_certain


def prr(uncertainty: Any, quality: Any) -> float:
    """Prediction rejection ratio: (area by the score - area at random) / (area of the ideal order -
    area at random).

    The area is lm-polygraph's: the mean quality of the outputs that are kept, averaged over all
    rates of rejection, from none to all but one, the most uncertain going first. At random it is
    the mean quality; the ideal order keeps the best. 1 is the ideal order, 0 no better than chance,
    negative worse. Outputs of equal uncertainty count as in every order of theirs, on average.

    Args:
        uncertainty: one number for each output; higher means more uncertain.
        quality: one number for each output, higher is better: ROUGE, the probability of what was
            right, or whether an answer is right. For right and wrong alone it is `raulc`.

    Example:
        ```python
        from qualms.metrics import prr

        assert prr([0.1, 0.2, 0.8], [0.9, 0.7, 0.2]) == 1  # the better, the more certain
        ```
    """
    u, q = scores_and_qualities(uncertainty, quality)
    if q.min() == q.max():
        raise QualmsError(
            f"the quality is {q[0]:g} everywhere, so no order of the outputs is better than another, and there is no "
            "PRR; take more outputs, or a harder set."
        )
    # Its unit and its zero do not matter, and may be beyond what a sum holds; a power of two leaves
    # all digits.
    q = np.ldexp(q, -np.frexp(np.abs(q).max())[1])
    q = (q - q.min()) / (q.max() - q.min())
    chance = q.mean()
    return float((_area(u, q) - chance) / (_area(-q, q) - chance))


def _area(u: Floats, q: Floats) -> float:
    """The mean over i of the mean quality of the i most certain."""
    return float((total_among_most_certain(u, q) / np.arange(1, len(u) + 1)).mean())
