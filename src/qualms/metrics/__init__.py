"""Measures of uncertainty scores: ranking, selective prediction, likelihood, and intervals.

Higher scores mean more uncertain. Results do not depend on the order of equal scores.
Only NumPy and torch are used, as the library does not depend on scikit-learn or scipy.
"""

from qualms.metrics.bootstrap import interval
from qualms.metrics.lift import lift_curve, raulc
from qualms.metrics.pixels import pixel_metrics
from qualms.metrics.prediction import accuracy, nll, nll_softmax_twice
from qualms.metrics.ranking import aupr, auroc, fpr95, roc
from qualms.metrics.rejection import prr
from qualms.metrics.selective import aurc, risk_coverage, selective_risk

__all__ = [
    "accuracy",
    "aupr",
    "aurc",
    "auroc",
    "fpr95",
    "interval",
    "lift_curve",
    "nll",
    "nll_softmax_twice",
    "pixel_metrics",
    "prr",
    "raulc",
    "risk_coverage",
    "roc",
    "selective_risk",
]
