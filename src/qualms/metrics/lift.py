"""Lift: does accuracy rise when the uncertain inputs are left out?

Postels et al., On the Practicality of Deterministic Epistemic Uncertainty, ICML 2022.
"""

from typing import Any

import numpy as np
from jaxtyping import Float

from qualms.errors import QualmsError
from qualms.metrics.checks import Floats, scores_and_outcomes
from qualms.metrics.ties import total_among_most_certain


def lift_curve(uncertainty: Any, correct: Any) -> Float[Floats, " n"]:
    """lift_i = accuracy of the i most certain inputs / overall accuracy, i = 1..n; ties in
    expectation.

    Args:
        uncertainty: one number for each input [n]; higher means more uncertain.
        correct: whether each prediction is right [n].

    Returns:
        A number for each i [n].

    Example:
        ```python
        from qualms.metrics import lift_curve

        uncertainty, correct = [0.1, 0.2, 0.8, 0.9], [True, True, False, True]
        # above 1 for the most certain inputs, and 1 for all of them:
        print(lift_curve(uncertainty, correct))
        ```
    """
    u, right = scores_and_outcomes(uncertainty, correct)
    if not right.any():
        raise QualmsError(
            "no prediction is correct, so accuracy is 0 and there is no lift, and no rAULC."
        )
    return total_among_most_certain(u, right) / np.arange(1, len(u) + 1) / right.mean()


def raulc(uncertainty: Any, correct: Any) -> float:
    """rAULC = AULC / AULC of the ideal order (correct first), with AULC = mean_i(lift_i) - 1.

    1 is the ideal order, 0 no better than chance, negative worse. Every input is a step. Inputs of
    equal uncertainty count as in every order of theirs, on average.

    Args:
        uncertainty: one number for each input [n]; higher means more uncertain.
        correct: whether each prediction is right [n].

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
            f"accuracy is {int(right[0])}, so no order of the inputs is better than another, and there is no rAULC; "
            "take more inputs, or a harder set."
        )
    return float((lift_curve(u, right).mean() - 1) / (lift_curve(~right, right).mean() - 1))
