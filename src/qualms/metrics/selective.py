"""Selective prediction: the error rate on the inputs that the model is most certain of."""

import math
from typing import Any

import numpy as np
from jaxtyping import Float

from qualms.errors import QualmsError
from qualms.metrics.checks import Floats, scores_and_outcomes
from qualms.metrics.ties import total_among_most_certain


def selective_risk(uncertainty: Any, correct: Any, coverage: float) -> float:
    """Compute the error rate of the most certain inputs, a share `coverage` of all inputs.

    Args:
        uncertainty: One number per input, of shape [n]; higher means more uncertain.
        correct: Whether each prediction is right, of shape [n].
        coverage: The share of inputs that is accepted; their number is rounded up.

    Example:
        ```python
        from qualms.metrics import selective_risk

        uncertainty, correct = [0.1, 0.2, 0.8, 0.9], [True, True, False, True]
        # The two most certain inputs are right:
        assert selective_risk(uncertainty, correct, coverage=0.5) == 0
        ```
    """
    risks = risk_coverage(uncertainty, correct)
    if not 0 < coverage <= 1:
        raise QualmsError(
            f"coverage={coverage} is invalid; pass a fraction of the inputs, above 0 and at most 1."
        )
    # Without 1e-9, rounding could turn 0.95 * 100 into 96 of 100.
    num_accepted = max(1, math.ceil(coverage * len(risks) - 1e-9))
    return float(risks[num_accepted - 1])


def risk_coverage(uncertainty: Any, correct: Any) -> Float[Floats, " n"]:
    """Compute risk_i, the error rate of the i most certain inputs, i = 1..n.

    Inputs of equal uncertainty count as the average over all of their orders.

    Args:
        uncertainty: One number per input, of shape [n]; higher means more uncertain.
        correct: Whether each prediction is right, of shape [n].

    Returns:
        The risk at each i, of shape [n].

    Example:
        ```python
        from qualms.metrics import risk_coverage

        uncertainty, correct = [0.1, 0.2, 0.8, 0.9], [True, True, False, True]
        assert risk_coverage(uncertainty, correct).tolist() == [0, 0, 1 / 3, 1 / 4]
        ```
    """
    u, right = scores_and_outcomes(uncertainty, correct)
    num_accepted = np.arange(1, len(u) + 1)
    num_wrong = num_accepted - total_among_most_certain(u, right)
    return num_wrong / num_accepted


def aurc(uncertainty: Any, correct: Any) -> float:
    """Compute the area under the risk-coverage curve; 0 is perfect.

    It is the mean over i = 1..n of the error rate of the i most certain inputs.

    Args:
        uncertainty: One number per input, of shape [n]; higher means more uncertain.
        correct: Whether each prediction is right, of shape [n].

    Example:
        ```python
        from qualms.metrics import aurc

        uncertainty, correct = [0.1, 0.2, 0.8, 0.9], [True, True, False, True]
        print(aurc(uncertainty, correct))
        ```
    """
    return float(risk_coverage(uncertainty, correct).mean())
