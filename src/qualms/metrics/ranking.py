"""How well uncertainty tells inputs from elsewhere (*out*) from those of the model's own
distribution (*in*).

Out-of-distribution is the positive class and uncertainty its score, unless `positive="in"` asks for
the other convention: in-distribution positive, negated uncertainty its score. AUROC is the same in
both, AUPR and FPR95 are not.
"""

import math
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from qualms.errors import QualmsError
from qualms.metrics.checks import Floats, Integers, scores


def auroc(in_scores: Any, out_scores: Any) -> float:
    """P(u_out > u_in) + P(u_out = u_in) / 2 for a random pair: 1 is perfect, 0.5 chance, a tie half
    a success.

    Args:
        in_scores: the uncertainty of inputs from the model's own distribution [n].
        out_scores: that of inputs from elsewhere [m].

    Example:
        ```python
        from qualms.metrics import auroc

        known, unknown = [0.1, 0.2, 0.4], [0.3, 0.9]
        assert auroc(known, unknown) == 5 / 6  # of six pairs, only 0.4 and 0.3 are out of order
        ```
    """
    inside, outside = np.sort(scores(in_scores, "in_scores")), scores(out_scores, "out_scores")
    below = np.searchsorted(inside, outside, "left").sum()
    not_above = np.searchsorted(inside, outside, "right").sum()
    return float(below + not_above) / (2 * len(inside) * len(outside))


def aupr(in_scores: Any, out_scores: Any, positive: str = "out") -> float:
    """Average precision: Σ_t (recall_t - recall_{t-1}) precision_t over the distinct scores t, from
    the highest.

    Inputs of equal score enter together, and nothing is interpolated. Chance is the share of
    positives.

    Args:
        in_scores: the uncertainty of inputs from the model's own distribution [n].
        out_scores: that of inputs from elsewhere [m].
        positive: "out" or "in", the class that is to be found.

    Example:
        ```python
        from qualms.metrics import aupr

        known, unknown = [0.1, 0.2, 0.4], [0.3, 0.9]
        print(aupr(known, unknown), aupr(known, unknown, positive="in"))
        ```
    """
    caught, false_alarms = _counts(*_positives(in_scores, out_scores, positive))
    precision = caught / (caught + false_alarms)
    return float((np.diff(caught, prepend=0) / caught[-1] * precision).sum())


def fpr95(in_scores: Any, out_scores: Any, positive: str = "out") -> float:
    """The false-positive rate at the highest threshold that catches at least 95 % of the positives.

    By default: the share of in-distribution inputs at or above the threshold that flags 95 % of the
    out-of-distribution ones. Much of the literature on OOD detection swaps the roles,
    `positive="in"`: the share of out-of-distribution inputs that pass at a threshold that lets 95 %
    of the in-distribution ones pass. The numbers differ: say which.

    Args:
        in_scores: the uncertainty of inputs from the model's own distribution [n].
        out_scores: that of inputs from elsewhere [m].
        positive: "out" or "in", the class that is to be found.

    Example:
        ```python
        from qualms.metrics import fpr95

        known, unknown = [0.1, 0.2, 0.4], [0.3, 0.9]
        # Flagging both unknown inputs also flags one of three known ones:
        assert fpr95(known, unknown) == 1 / 3
        ```
    """
    caught, false_alarms = _counts(*_positives(in_scores, out_scores, positive))
    # The rounding guard keeps 0.95 * 100 from asking for 96 of 100.
    enough = np.searchsorted(caught, math.ceil(0.95 * int(caught[-1]) - 1e-9))
    return float(false_alarms[enough] / false_alarms[-1])


def roc(in_scores: Any, out_scores: Any) -> tuple[Float[Floats, " t"], Float[Floats, " t"]]:
    """(false-positive rates, true-positive rates), out-of-distribution positive, from (0, 0) to (1,
    1).

    The area below the curve is `auroc`.

    Args:
        in_scores: the uncertainty of inputs from the model's own distribution [n].
        out_scores: that of inputs from elsewhere [m].

    Returns:
        One point for each distinct score, so that ties are straight lines, and the first one (0, 0).

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
    """Scores of the positive and of the negative class, higher meaning more likely positive."""
    inside, outside = scores(in_scores, "in_scores"), scores(out_scores, "out_scores")
    if positive not in ("out", "in"):
        raise QualmsError(f"positive={positive!r} is not known; choose 'out' or 'in'.")
    return (outside, inside) if positive == "out" else (-inside, -outside)


def _counts(
    positives: Float[Floats, " p"], negatives: Float[Floats, " n"]
) -> tuple[Int[Integers, " t"], Int[Integers, " t"]]:
    """How many positives and negatives are at or above each distinct score, from the highest to the
    lowest.
    """
    thresholds = np.unique(np.concatenate([positives, negatives]))[::-1]
    caught = len(positives) - np.searchsorted(np.sort(positives), thresholds, "left")
    false_alarms = len(negatives) - np.searchsorted(np.sort(negatives), thresholds, "left")
    return caught, false_alarms
