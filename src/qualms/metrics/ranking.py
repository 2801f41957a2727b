"""Out-of-distribution detection: how well uncertainty separates *out* inputs from *in* inputs.

Out-of-distribution is the positive class, and uncertainty is its score. With `positive="in"`,
in-distribution is positive, and negated uncertainty is its score. AUROC is the same in both; AUPR
and FPR95 are not.
"""

import math
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from qualms.errors import QualmsError
from qualms.metrics.checks import Floats, Integers, scores


def auroc(in_scores: Any, out_scores: Any) -> float:
    """Compute P(u_out > u_in) + P(u_out = u_in) / 2 for a random pair of inputs.

    1 is perfect, and 0.5 is chance.

    Args:
        in_scores: The uncertainty of in-distribution inputs, of shape [n].
        out_scores: The uncertainty of out-of-distribution inputs, of shape [m].

    Example:
        ```python
        from qualms.metrics import auroc

        known, unknown = [0.1, 0.2, 0.4], [0.3, 0.9]
        assert auroc(known, unknown) == 5 / 6  # of six pairs, only 0.4 and 0.3 are out of order
        ```
    """
    inside = np.sort(scores(in_scores, "in_scores"))
    outside = scores(out_scores, "out_scores")
    below = np.searchsorted(inside, outside, "left").sum()
    not_above = np.searchsorted(inside, outside, "right").sum()
    return float(below + not_above) / (2 * len(inside) * len(outside))


def aupr(in_scores: Any, out_scores: Any, positive: str = "out") -> float:
    """Compute the average precision Σ_t (recall_t - recall_{t-1}) precision_t.

    t goes through the distinct scores, from the highest; inputs of equal score enter together, and
    nothing is interpolated. Chance is the share of positives.

    Args:
        in_scores: The uncertainty of in-distribution inputs, of shape [n].
        out_scores: The uncertainty of out-of-distribution inputs, of shape [m].
        positive: The class to detect, "out" or "in".

    Example:
        ```python
        from qualms.metrics import aupr

        known, unknown = [0.1, 0.2, 0.4], [0.3, 0.9]
        print(aupr(known, unknown), aupr(known, unknown, positive="in"))
        ```
    """
    caught, false_alarms = _counts(*_positives(in_scores, out_scores, positive))
    precision = caught / (caught + false_alarms)
    recall_steps = np.diff(caught, prepend=0) / caught[-1]
    return float((recall_steps * precision).sum())


def fpr95(in_scores: Any, out_scores: Any, positive: str = "out") -> float:
    """Compute the false-positive rate at the highest threshold that catches 95 % of the positives.

    By default this is the share of in-distribution inputs at or above the threshold that flags 95 %
    of the out-of-distribution ones. Much of the literature on OOD detection means
    `positive="in"`: the share of out-of-distribution inputs below the threshold that accepts 95 %
    of the in-distribution ones. The two differ, so say which one you report.

    Args:
        in_scores: The uncertainty of in-distribution inputs, of shape [n].
        out_scores: The uncertainty of out-of-distribution inputs, of shape [m].
        positive: The class to detect, "out" or "in".

    Example:
        ```python
        from qualms.metrics import fpr95

        known, unknown = [0.1, 0.2, 0.4], [0.3, 0.9]
        # Flagging both unknown inputs also flags one of three known ones:
        assert fpr95(known, unknown) == 1 / 3
        ```
    """
    caught, false_alarms = _counts(*_positives(in_scores, out_scores, positive))
    # Without 1e-9, rounding could turn 0.95 * 100 into 96 of 100.
    needed = math.ceil(0.95 * int(caught[-1]) - 1e-9)
    enough = np.searchsorted(caught, needed)
    return float(false_alarms[enough] / false_alarms[-1])


def roc(in_scores: Any, out_scores: Any) -> tuple[Float[Floats, " t"], Float[Floats, " t"]]:
    """Compute the ROC curve: false-positive and true-positive rates, out-of-distribution positive.

    The area under the curve is `auroc`.

    Args:
        in_scores: The uncertainty of in-distribution inputs, of shape [n].
        out_scores: The uncertainty of out-of-distribution inputs, of shape [m].

    Returns:
        The two rates, both of shape [t]: (0, 0), then a point per distinct score, up to (1, 1).
        Ties are straight lines.

    Example:
        ```python
        from qualms.metrics import roc

        fpr, tpr = roc([0.1, 0.2, 0.4], [0.3, 0.9])
        for x, y in zip(fpr, tpr):
            print(f"{x:.2f} of the known inputs flagged, {y:.2f} of the unknown ones")
        ```
    """
    caught, false_alarms = _counts(*_positives(in_scores, out_scores, "out"))
    fpr = np.concatenate([[0.0], false_alarms / false_alarms[-1]])
    tpr = np.concatenate([[0.0], caught / caught[-1]])
    return fpr, tpr


def _positives(in_scores: Any, out_scores: Any, positive: str) -> tuple[Floats, Floats]:
    """Order two sets of scores into positives and negatives; higher then means more positive.

    Args:
        in_scores: The uncertainty of in-distribution inputs, of shape [n].
        out_scores: The uncertainty of out-of-distribution inputs, of shape [m].
        positive: The class that counts as positive: "out"; or "in", with scores negated.

    Returns:
        The scores of the positive class, and those of the negative class.
    """
    inside = scores(in_scores, "in_scores")
    outside = scores(out_scores, "out_scores")
    if positive not in ("out", "in"):
        raise QualmsError(f"positive={positive!r} is invalid; choose 'out' or 'in'.")
    if positive == "out":
        return outside, inside
    return -inside, -outside


def _counts(
    positives: Float[Floats, " p"], negatives: Float[Floats, " n"]
) -> tuple[Int[Integers, " t"], Int[Integers, " t"]]:
    """Count the positives and the negatives at or above each distinct score, highest first."""
    thresholds = np.unique(np.concatenate([positives, negatives]))[::-1]
    positives_below = np.searchsorted(np.sort(positives), thresholds, "left")
    negatives_below = np.searchsorted(np.sort(negatives), thresholds, "left")
    caught = len(positives) - positives_below
    false_alarms = len(negatives) - negatives_below
    return caught, false_alarms
