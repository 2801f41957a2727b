"""Lift: how much accuracy rises when uncertain inputs are left out.

Postels et al., On the Practicality of Deterministic Epistemic Uncertainty, ICML 2022.
"""

from typing import Any

import numpy as np
from jaxtyping import Float

from qualms.errors import QualmsError
from qualms.metrics.checks import Floats, scores_and_outcomes
from qualms.metrics.ties import total_among_most_certain


def lift_curve(uncertainty: Any, correct: Any) -> Float[Floats, " n"]:
    """Compute lift_i = accuracy of the i most certain inputs / overall accuracy, i = 1..n.

    Inputs of equal uncertainty count as the average over all of their orders.

    Args:
        uncertainty: One number per input, of shape [n]; higher means more uncertain.
        correct: Whether each prediction is right, of shape [n].

    Returns:
        The lift at each i, of shape [n].

    Example:
        ```python
        from qualms.metrics import lift_curve

        uncertainty, correct = [0.1, 0.2, 0.8, 0.9], [True, True, False, True]
        # Above 1 for the most certain inputs, and 1 for all of them:
        print(lift_curve(uncertainty, correct))
        ```
    """
    u, right = scores_and_outcomes(uncertainty, correct)
    if not right.any():
        raise QualmsError(
            "no prediction is correct, so accuracy is 0 and lift is undefined; "
            "pass inputs with correct predictions."
        )
    # How many of the i most certain inputs are right, i = 1..n.
    num_right = total_among_most_certain(u, right)
    accuracy = num_right / np.arange(1, len(u) + 1)
    return accuracy / right.mean()


def raulc(uncertainty: Any, correct: Any) -> float:
    """Compute rAULC = AULC / AULC of the ideal order, with AULC = mean_i(lift_i) - 1.

    AULC is the area under the lift curve: lift_i is the accuracy of the i most certain inputs,
    divided by that of all inputs. The ideal order has all correct predictions first; its rAULC is
    1. At 0, the order is no better than chance; below 0, it is worse. Inputs of equal uncertainty
    count as the average over all of their orders.

    Args:
        uncertainty: One number per input, of shape [n]; higher means more uncertain.
        correct: Whether each prediction is right, of shape [n].

    Example:
        ```python
        from qualms.metrics import raulc

        # Certain exactly where it is right:
        assert raulc([0.1, 0.2, 0.8, 0.9], [True, True, False, False]) == 1
        ```
    """
    u, right = scores_and_outcomes(uncertainty, correct)
    if right.all() or not right.any():
        raise QualmsError(
            f"accuracy is {int(right[0])}, so every order of the inputs is equally good and rAULC "
            "is undefined; pass inputs with both correct and wrong predictions."
        )
    area = lift_curve(u, right).mean() - 1
    # The ideal uncertainty is 0 for correct predictions, and 1 for wrong ones.
    ideal_area = lift_curve(~right, right).mean() - 1
    return float(area / ideal_area)
