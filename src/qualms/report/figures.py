"""The curves of a report, as plain values for the page's JSON, each with a sentence about it.

Colors are numbers: 0 for the known images, 1 and up for the unknown groups, None for references.
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

    The curves show the share of unknown images that is flagged over that of known images, in
    percent.

    Args:
        content: The content of the report.
        method: The method whose scores are drawn.

    Returns:
        The titles of the axes (`x`, `y`), the `lines` (see `_line`), and a sentence as `summary`.
    """
    lines = [_line("chance", None, [0, 100], [0, 100])]
    areas = []
    for color, group in enumerate(content.unknown, 1):
        known, unknown = content.known.scores[method], group.scores[method]
        x, y = thin_curve(*roc(known, unknown))
        line = _line(group.name, color, round_digits(100 * x), round_digits(100 * y))
        lines.append(line)
        area = format_percent(auroc(known, unknown))
        areas.append(f"{group.name} {area}")
    return {
        "x": "known images flagged, %",
        "y": "unknown images flagged, %",
        "lines": lines,
        "summary": f"Area under the curve (AUROC): {', '.join(areas)}.",
    }


def lift_figure(content: Content, method: str) -> Figure:
    """Return the lift curves of a method and of the ideal order.

    Lift is the accuracy of the most certain known images, divided by the overall accuracy.

    Args:
        content: The content of the report. The known images have labels, and some of their
            predictions are right.
        method: The method whose scores decide the order.

    Returns:
        The titles of the axes (`x`, `y`), the `lines` (see `_line`), and a sentence as `summary`.
    """
    correct = content.known.correct
    scores = content.known.scores[method]
    assert correct is not None
    share = 100 * np.arange(1, len(scores) + 1) / len(scores)
    lines = []
    # Right predictions before wrong ones is the ideal order.
    for name, color, order in (("ideal order", None, ~correct), (method, 0, scores)):
        x, y = thin_curve(share, lift_curve(order, correct))
        lines.append(_line(name, color, round_digits(x), round_digits(y)))
    half = 1 - selective_risk(scores, correct, 0.5)
    whole = 1 - selective_risk(scores, correct, 1.0)
    end = "rAULC is undefined, because all predictions are right."
    if 0 < whole < 1:
        end = f"rAULC {raulc(scores, correct):.3f}."
    best_half = format_percent(half)
    summary = (
        f"Accuracy: {best_half} on the most certain half, {format_percent(whole)} on all; {end}"
    )
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
        best: Which value is best: the `highest` of shares, or the `lowest` of other numbers.

    Returns:
        The titles of the axes (`x`, `y`), the `lines` (see `_line`) with the range over seeds as
        `low` and `high`, and a sentence as `summary`.
    """
    is_share = best == "highest"
    scale = 100 if is_share else 1
    lines = []
    for color, curve in enumerate(curves):
        line = _line(curve.method, color, curve.labeled, _scale(curve.mean, scale))
        line["low"] = _scale(curve.low, scale)
        line["high"] = _scale(curve.high, scale)
        lines.append(line)
    ordered = sorted(curves, key=lambda curve: curve.mean[-1], reverse=is_share)
    first = ordered[0]
    value = f"{first.mean[-1]:.3f}"
    if is_share:
        value = format_percent(first.mean[-1])
    summary = f"After {first.labeled[-1]} labels, {first.method} has the {best} value, {value}."
    return {"x": "labeled images", "y": title, "lines": lines, "summary": summary}


def _scale(values: Sequence[float], scale: int) -> list[float]:
    """Multiply values by a number, and round them for drawing."""
    return round_digits(scale * np.array(values))


def _line(
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
