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
    """Return the share of unknown images that is flagged over that of known images, per group."""
    lines = [_line("chance", None, [0, 100], [0, 100])]
    areas = []
    for color, group in enumerate(content.unknown, 1):
        scores = content.known.scores[method], group.scores[method]
        x, y = thin_curve(*roc(*scores))
        lines.append(_line(group.name, color, round_digits(100 * x), round_digits(100 * y)))
        areas.append(f"{group.name} {format_percent(auroc(*scores))}")
    return {
        "x": "known images flagged, %",
        "y": "unknown images flagged, %",
        "lines": lines,
        "summary": f"Area under the curve (AUROC): {', '.join(areas)}.",
    }


def lift_figure(content: Content, method: str) -> Figure:
    """Return the accuracy of the most certain known images, in units of the overall accuracy."""
    correct, scores = content.known.correct, content.known.scores[method]
    assert correct is not None
    share = 100 * np.arange(1, len(scores) + 1) / len(scores)
    lines = []
    for name, color, order in (("ideal order", None, ~correct), (method, 0, scores)):
        x, y = thin_curve(share, lift_curve(order, correct))
        lines.append(_line(name, color, round_digits(x), round_digits(y)))
    half = 1 - selective_risk(scores, correct, 0.5)
    whole = 1 - selective_risk(scores, correct, 1.0)
    end = "where all are right there is no rAULC."
    if 0 < whole < 1:
        end = f"rAULC {raulc(scores, correct):.3f}."
    return {
        "x": "known images accepted, %",
        "y": "accuracy / overall accuracy",
        "lines": lines,
        "summary": f"Accuracy: {format_percent(half)} of the most certain half, "
        f"{format_percent(whole)} of all; {end}",
    }


def learning_figure(curves: Sequence[LearningCurve], title: str, best: str) -> Figure:
    """Return a measure of active learning over the number of labels, a line per method.

    Args:
        curves: Of a dataset, at least one.
        title: Of the vertical axis.
        best: Whether the `highest` or the `lowest` value is best; the former are shares.
    """
    is_share = best == "highest"
    scale = 100 if is_share else 1
    lines = []
    for color, curve in enumerate(curves):
        line = _line(curve.method, color, curve.labeled, _scale(curve.mean, scale))
        line["low"], line["high"] = _scale(curve.low, scale), _scale(curve.high, scale)
        lines.append(line)
    ordered = sorted(curves, key=lambda curve: curve.mean[-1], reverse=is_share)
    first, labels = ordered[0], ordered[0].labeled[-1]
    value = format_percent(first.mean[-1]) if is_share else f"{first.mean[-1]:.3f}"
    summary = f"After {labels} labels {first.method} is {best}: {value}."
    return {"x": "labeled images", "y": title, "lines": lines, "summary": summary}


def _scale(values: Sequence[float], scale: int) -> list[float]:
    return round_digits(scale * np.array(values))


def _line(
    name: str, color: int | None, x: Sequence[int | float], y: Sequence[int | float]
) -> dict[str, Any]:
    """Return a line of a figure.

    Args:
        name: In the legend.
        color: Its number; None for a reference.
        x: The first coordinates of its points.
        y: The second coordinates.
    """
    return {"name": name, "color": color, "x": list(x), "y": list(y)}


def format_percent(share: float) -> str:
    """Format a share with one decimal and a percent sign that stays on the same line."""
    return f"{100 * share:.1f}\N{NO-BREAK SPACE}%"


def round_digits(values: np.ndarray, digits: int = 5) -> list[float]:
    """Round to as many significant digits as a drawing can show."""
    return [float(f"{value:.{digits}g}") for value in values]
