"""Numbers in, curves out, as plain values for the page's JSON; each figure comes with a sentence
that sums it up.

Colors are numbers: 0 for the known images, 1 and up for the unknown groups, None for what is only
there to compare.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from qualms.metrics import auroc, lift_curve, raulc, roc, selective_risk
from qualms.report.content import Content
from qualms.report.numbers import Curve, thinned

Figure = dict[str, Any]


def roc_curves(content: Content, method: str) -> Figure:
    """How many unknown images are flagged, against how many known ones."""
    lines, said = [_line("chance", None, [0, 100], [0, 100])], []
    for i, group in enumerate(content.unknown, 1):
        scores = content.known.scores[method], group.scores[method]
        x, y = thinned(*roc(*scores))
        lines.append(_line(group.name, i, rounded(100 * x), rounded(100 * y)))
        said.append(f"{group.name} {percent(auroc(*scores))}")
    return {
        "x": "known images flagged, %",
        "y": "unknown images flagged, %",
        "lines": lines,
        "summary": f"Area under the curve (AUROC): {', '.join(said)}.",
    }


def lift(content: Content, method: str) -> Figure:
    """Accuracy of the most certain known images, in units of the accuracy of all."""
    correct, scores = content.known.correct, content.known.scores[method]
    assert correct is not None
    share = 100 * np.arange(1, len(scores) + 1) / len(scores)
    lines = []
    for name, number, order in (("ideal order", None, ~correct), (method, 0, scores)):
        x, y = thinned(share, lift_curve(order, correct))
        lines.append(_line(name, number, rounded(x), rounded(y)))
    half, whole = (1 - selective_risk(scores, correct, coverage) for coverage in (0.5, 1.0))
    said = f"Of the most certain half {percent(half)} are right, of all {percent(whole)}"
    end = (
        f"; rAULC {raulc(scores, correct):.3f}."
        if 0 < whole < 1
        else "; where all are right there is no rAULC."
    )
    return {
        "x": "known images accepted, %",
        "y": "accuracy / overall accuracy",
        "lines": lines,
        "summary": said + end,
    }


def learning(curves: Sequence[Curve], title: str, best: str) -> Figure:
    """A measure over the number of labels, a line for each method; bars from the least to the most
    over the seeds.
    """
    scale = 100 if best == "highest" else 1
    lines = []
    for i, curve in enumerate(curves):
        mean, low, high = (
            rounded(scale * np.array(v)) for v in (curve.mean, curve.low, curve.high)
        )
        lines.append({**_line(curve.method, i, curve.labeled, mean), "low": low, "high": high})
    chosen = (max if best == "highest" else min)(curves, key=lambda curve: curve.mean[-1])
    last = percent(chosen.mean[-1]) if best == "highest" else f"{chosen.mean[-1]:.3f}"
    said = f"After {chosen.labeled[-1]} labels {chosen.method} is {best}: {last}."
    return {"x": "labeled images", "y": title, "lines": lines, "summary": said}


def _line(
    name: str, color: int | None, x: Sequence[int | float], y: Sequence[int | float]
) -> dict[str, Any]:
    return {"name": name, "color": color, "x": list(x), "y": list(y)}


def percent(share: float) -> str:
    """With one decimal; the sign stays on the line of the number."""
    return f"{100 * share:.1f}\N{NO-BREAK SPACE}%"


def rounded(values: np.ndarray, digits: int = 5) -> list[float]:
    """As many significant digits as a drawing can show."""
    return [float(f"{v:.{digits}g}") for v in values]
