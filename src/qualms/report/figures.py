"""The curves of a report, as plain values for the page's JSON, each with a sentence about it.

Colors are numbers: 0 for the known images, 1 and up for the unknown groups. Lines to compare to,
such as chance, have None.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from qualms.metrics import auroc, lift_curve, raulc, roc, selective_risk
from qualms.report.content import Content
from qualms.report.numbers import LearningCurve, thin_curve

Figure = dict[str, Any]


def roc_figure(content: Content, method: str) -> Figure:
    """Return the ROC curve of each unknown group against the known images.

    A curve shows the percentage of unknown images that is flagged over the percentage of known
    images that is flagged.

    Args:
        content: The content of the report.
        method: The method whose scores are drawn.

    Returns:
        The titles of the axes (`x`, `y`), the `lines` (see `_make_line`), and a sentence as
        `summary`.
    """
    lines = [_make_line("chance", None, [0, 100], [0, 100])]
    auroc_texts = []
    for color, group in enumerate(content.unknown, 1):
        known = content.known.scores[method]
        unknown = group.scores[method]
        x, y = thin_curve(*roc(known, unknown))
        lines.append(_make_line(group.name, color, round_digits(100 * x), round_digits(100 * y)))
        auroc_text = format_percent(auroc(known, unknown))
        auroc_texts.append(f"{group.name} {auroc_text}")
    return {
        "x": "known images flagged, %",
        "y": "unknown images flagged, %",
        "lines": lines,
        "summary": f"Area under the curve (AUROC): {', '.join(auroc_texts)}.",
    }


def lift_figure(content: Content, method: str) -> Figure:
    """Return the lift curves of a method and of the ideal order.

    Lift is the accuracy of the most certain known images, divided by the overall accuracy.

    Args:
        content: The content of the report. The known images have labels, and some of their
            predictions are right.
        method: The method whose scores decide the order.

    Returns:
        The titles of the axes (`x`, `y`), the `lines` (see `_make_line`), and a sentence as
        `summary`.
    """
    correct = content.known.correct
    scores = content.known.scores[method]
    assert correct is not None
    accepted_percent = 100 * np.arange(1, len(scores) + 1) / len(scores)
    lines = []
    # Ordered by `~correct`, right predictions (False) come before wrong ones: the ideal order.
    for name, color, order in (("ideal order", None, ~correct), (method, 0, scores)):
        x, y = thin_curve(accepted_percent, lift_curve(order, correct))
        lines.append(_make_line(name, color, round_digits(x), round_digits(y)))
    accuracy_of_half = 1 - selective_risk(scores, correct, 0.5)
    accuracy_of_all = 1 - selective_risk(scores, correct, 1.0)
    raulc_text = "rAULC is undefined, because all predictions are right."
    if 0 < accuracy_of_all < 1:
        raulc_text = f"rAULC {raulc(scores, correct):.3f}."
    half_text = format_percent(accuracy_of_half)
    all_text = format_percent(accuracy_of_all)
    summary = f"Accuracy: {half_text} on the most certain half, {all_text} on all; {raulc_text}"
    return {
        "x": "known images accepted, %",
        "y": "accuracy / overall accuracy",
        "lines": lines,
        "summary": summary,
    }


def learning_figure(curves: Sequence[LearningCurve], title: str, best: str) -> Figure:
    """Return a measure of active learning over the number of labels, a line per method.

    Args:
        curves: The curves of a dataset, at least one.
        title: The title of the vertical axis.
        best: Which value is best: `highest` if the measure is a share, `lowest` if it is not.

    Returns:
        The titles of the axes (`x`, `y`), the `lines` (see `_make_line`), each with the smallest
        and largest values over seeds as `low` and `high`, and a sentence as `summary`.
    """
    is_share = best == "highest"
    scale = 100 if is_share else 1
    lines = []
    for color, curve in enumerate(curves):
        line = _make_line(curve.method, color, curve.labeled, _scale_and_round(curve.mean, scale))
        line["low"] = _scale_and_round(curve.low, scale)
        line["high"] = _scale_and_round(curve.high, scale)
        lines.append(line)
    curves_from_best = sorted(curves, key=lambda curve: curve.mean[-1], reverse=is_share)
    best_curve = curves_from_best[0]
    value_text = f"{best_curve.mean[-1]:.3f}"
    if is_share:
        value_text = format_percent(best_curve.mean[-1])
    num_labels = best_curve.labeled[-1]
    summary = f"After {num_labels} labels, {best_curve.method} has the {best} value, {value_text}."
    return {"x": "labeled images", "y": title, "lines": lines, "summary": summary}


def _scale_and_round(values: Sequence[float], scale: int) -> list[float]:
    """Multiply values by `scale`, and round them to the digits that a drawing can show."""
    return round_digits(scale * np.array(values))


def _make_line(
    name: str, color: int | None, x: Sequence[int | float], y: Sequence[int | float]
) -> dict[str, Any]:
    """Return a line of a figure as values for JSON.

    Args:
        name: The name in the legend.
        color: The number of the color: 0 for the known images, 1 and up for unknown groups; or
            the index of a method. None for a reference such as chance.
        x: The horizontal coordinates of the points.
        y: The vertical coordinates of the points.
    """
    return {"name": name, "color": color, "x": list(x), "y": list(y)}


def format_percent(share: float) -> str:
    """Format a share with one decimal and a percent sign that stays on the same line."""
    return f"{100 * share:.1f}\N{NO-BREAK SPACE}%"


def round_digits(values: np.ndarray, digits: int = 5) -> list[float]:
    """Round each value to `digits` significant digits: what a drawing can show, in a small file."""
    return [float(f"{value:.{digits}g}") for value in values]
