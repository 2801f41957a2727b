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
    """Compute AUROC: P(u_out > u_in) + P(u_out = u_in) / 2 for a random pair of inputs, with u_out
    the uncertainty of an out-of-distribution input, and u_in that of an in-distribution one.

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
    sorted_in = np.sort(scores(in_scores, "in_scores"))
    checked_out = scores(out_scores, "out_scores")
    # The numbers of pairs with u_in < u_out, and with u_in <= u_out; their mean counts ties half.
    num_lower = np.searchsorted(sorted_in, checked_out, "left").sum()
    num_not_higher = np.searchsorted(sorted_in, checked_out, "right").sum()
    return float(num_lower + num_not_higher) / (2 * len(sorted_in) * len(checked_out))


def aupr(in_scores: Any, out_scores: Any, positive: str = "out") -> float:
    """Compute the average precision Σ_t (recall_t - recall_{t-1}) precision_t.

    The sum is over the distinct scores, t = 1 for the highest; recall_t and precision_t are those
    of detecting all inputs with at least this score. Nothing is interpolated. Chance is the share
    of positives.

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
    positives, negatives = _order_classes(in_scores, out_scores, positive)
    caught, false_alarms = _count_detections(positives, negatives)
    precision = caught / (caught + false_alarms)
    recall_steps = np.diff(caught, prepend=0) / len(positives)
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
    positives, negatives = _order_classes(in_scores, out_scores, positive)
    caught, false_alarms = _count_detections(positives, negatives)
    # Without 1e-9, rounding could turn 0.95 * 100 into 96 of 100.
    needed = math.ceil(0.95 * len(positives) - 1e-9)
    # The index of the highest threshold that catches as many as needed.
    first_enough = np.searchsorted(caught, needed)
    return float(false_alarms[first_enough] / len(negatives))


def roc(
    in_scores: Any,
    out_scores: Any,
) -> tuple[Float[Floats, " t"], Float[Floats, " t"]]:
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
    positives, negatives = _order_classes(in_scores, out_scores, "out")
    caught, false_alarms = _count_detections(positives, negatives)
    # The curve begins above all scores, where nothing is detected.
    fpr = np.concatenate([[0.0], false_alarms / len(negatives)])
    tpr = np.concatenate([[0.0], caught / len(positives)])
    return fpr, tpr


def _order_classes(
    in_scores: Any,
    out_scores: Any,
    positive: str,
) -> tuple[Floats, Floats]:
    """Return checked scores of the positive and of the negative class; higher is more positive.

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


def _count_detections(
    positives: Float[Floats, " p"],
    negatives: Float[Floats, " n"],
) -> tuple[Int[Integers, " t"], Int[Integers, " t"]]:
    """Count how many inputs are detected if the threshold is each of the t distinct scores.

    Args:
        positives: The scores of the p positive inputs.
        negatives: The scores of the n negative inputs.

    Returns:
        The numbers of positives and of negatives whose score is at least the threshold, from the
        highest threshold to the lowest.
    """
    # `unique` sorts in ascending order.
    thresholds = np.unique(np.concatenate([positives, negatives]))[::-1]
    positives_below = np.searchsorted(np.sort(positives), thresholds, "left")
    negatives_below = np.searchsorted(np.sort(negatives), thresholds, "left")
    caught = len(positives) - positives_below
    false_alarms = len(negatives) - negatives_below
    return caught, false_alarms
