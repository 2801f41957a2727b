"""Rejection: how much quality rises when uncertain outputs are rejected.

Malinin & Gales, Uncertainty Estimation in Autoregressive Structured Prediction, ICLR 2021, as
defined by lm-polygraph (Vashurin et al., Benchmarking Uncertainty Quantification Methods for Large
Language Models, TACL 2025).
"""

from typing import Any

import numpy as np

from qualms.errors import QualmsError
from qualms.metrics.checks import Floats, scores_and_qualities
from qualms.metrics.ties import total_among_most_certain


def prr(uncertainty: Any, quality: Any) -> float:
    """Compute the prediction rejection ratio (area - chance) / (ideal area - chance).

    The most uncertain outputs are rejected first. The area is the mean quality of the outputs that
    are kept, averaged over all rates of rejection, from none to all but one. Chance is the area if
    outputs are rejected at random: the mean quality of all. The ideal area results if the worst
    outputs are rejected first. A ratio of 1 is ideal, 0 is no better than chance, and a negative
    one is worse. Outputs of equal uncertainty count as the average over all of their orders.

    Args:
        uncertainty: One number per output, of shape [n]; higher means more uncertain.
        quality: One number per output, of shape [n]; higher is better. For example ROUGE, the
            probability of the right answer, or whether an answer is right, which gives `raulc`.

    Example:
        ```python
        from qualms.metrics import prr

        assert prr([0.1, 0.2, 0.8], [0.9, 0.7, 0.2]) == 1  # the better, the more certain
        ```
    """
    u, q = scores_and_qualities(uncertainty, quality)
    if q.min() == q.max():
        raise QualmsError(
            f"the quality is {q[0]:g} everywhere, so every order of the outputs is equally good "
            "and PRR is undefined; pass outputs of different quality."
        )
    # PRR does not depend on the scale and offset of the quality, so it is scaled to [0, 1], which
    # keeps sums from overflowing. It is first divided by a power of two, which keeps all digits, as
    # the difference q.max() - q.min() could overflow, too.
    exponent = np.frexp(np.abs(q).max())[1]
    q = np.ldexp(q, -exponent)
    q = (q - q.min()) / (q.max() - q.min())
    chance = q.mean()
    area = _mean_kept_quality(u, q)
    ideal_area = _mean_kept_quality(-q, q)
    return float((area - chance) / (ideal_area - chance))


def _mean_kept_quality(u: Floats, q: Floats) -> float:
    """Compute the mean over i = 1..n of the mean quality of the i most certain outputs.

    Args:
        u: The uncertainty of each output, of shape [n].
        q: The quality of each output, of shape [n].
    """
    num_kept = np.arange(1, len(u) + 1)
    mean_quality = total_among_most_certain(u, q) / num_kept
    return float(mean_quality.mean())
