"""A report's content in, one HTML file out: all that it needs is inside, and it asks nothing of any
network.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qualms.disk import require_writable
from qualms.report import comparison, figures
from qualms.report.content import Content, Group
from qualms.report.gallery import class_name, confident_and_wrong, ends, png
from qualms.report.numbers import (
    Judged,
    LearningMeasure,
    at_a_glance,
    axis,
    layer_shares,
    learning_curves,
    verdict,
)
from qualms.report.offline import coded, filled, packed, require_packages, write_html
from qualms.report.roles import default_of, kind_of, not_for_use, why_not_default

COVERAGE = 95  # where the threshold stands first, in percent of the known images
CURVES = {"roc": "ROC curves", "lift": "Lift curve"}
LEARNING: dict[LearningMeasure, tuple[str, str]] = {  # the axis, and which end of it is best
    "accuracy": ("accuracy, %", "highest"),
    "nll": ("negative log-likelihood", "lowest"),
}


def write_page(content: Content, path: str | Path, *, resamples: int = 1000) -> Path:
    """Write the report as one HTML file; `resamples` is how many each interval is made from."""
    require_packages("jinja2", "PIL")
    require_writable(path)
    return write_html(path, _html(content, at_a_glance(content, resamples)))


def _html(content: Content, judged: list[Judged]) -> str:
    found, unused = verdict(content, judged), not_for_use(content)
    names = [j.method for j in judged]
    start = default_of(content) or (found.highest.method if found.highest else names[0])
    learning = _learning(content)
    rows = [
        {
            "method": j.method,
            "number": i,
            "cells": comparison.cells(content, judged, j),
            "tied": found.best is not None and j.method in (found.best.method, *found.tied),
            "default": j.method == default_of(content),
        }
        for i, j in enumerate(judged)
    ]
    return filled(
        "page.html.jinja",
        styles=("page.css",),
        scripts=("page.values.js", "page.charts.js", "page.js"),
        title=content.title,
        facts=[f"{name}: {value}" for name, value in content.about.items()] + _told(content.known),
        groups=[group.name for group in content.groups],
        columns=comparison.columns(content, judged),
        bodies=[[r for r in rows if (r["method"] in unused) == folded] for folded in (False, True)],
        said=comparison.said(content, judged, found),
        start=names.index(start),
        why_not_default=why_not_default(content),
        left_out=content.left_out,
        coverage=COVERAGE,
        curves={key: title for key, title in CURVES.items() if _has(content, key)},
        no_curves=_why_no_curves(content),
        learning=learning,
        labeled=content.known.correct is not None,
        layered=bool(content.layers),
        wrong=_wrong(content),
        data=_data(content, judged, learning),
    )


def _told(known: Group) -> list[str]:
    if known.correct is None:
        return []
    return [
        f"{figures.percent(known.correct.mean())} of the {len(known.images)} {known.name} predicted right"
    ]


def _has(content: Content, curve: str) -> bool:
    if curve == "roc":
        return bool(content.unknown)
    return content.known.correct is not None and bool(content.known.correct.any())


def _why_no_curves(content: Content) -> list[str]:
    """What would be there, and what it would take."""
    found = []
    if not content.unknown:
        found.append(
            "There are no ROC curves, because there are no unknown images: name some with --ood."
        )
    if content.known.correct is None:
        found.append(
            f"There is no lift curve, because nothing says which predictions are right: the images of "
            f"{content.known.name} have no labels. Sort them into one folder for each class."
        )
    elif not content.known.correct.any():
        found.append("There is no lift curve, because no prediction is right.")
    return found


def _wrong(content: Content) -> str:
    """What stands above, or in place of, the images that the network is confident and wrong about."""
    known = content.known
    if known.correct is None:
        return f"The images of {known.name} have no labels, so no prediction can be called wrong."
    if known.correct.all():
        return f"Every one of the {len(known.images)} predictions is right."
    count = f"{int((~known.correct).sum())} of the {len(known.images)} predictions for {known.name} are wrong"
    if known.confidence is None:
        return f"{count}; how confident they were is not known."
    return f"{count}. Those that the network is most confident of come first."


def _learning(content: Content) -> list[dict[str, Any]]:
    return [
        {"title": f"{data}: {title}", **figures.learning(curves, title, best)}
        for measure, (title, best) in LEARNING.items()
        for data, curves in learning_curves(content.cycles, measure).items()
        if curves
    ]


def _data(content: Content, judged: list[Judged], learning: list[dict[str, Any]]) -> dict[str, Any]:
    """What the page's script reads."""
    classes = tuple(content.classes) or content.known.images.classes
    wrong = confident_and_wrong(content.known)
    methods = [_method(content, j.method) for j in judged]
    shown = {(0, i) for i in wrong}
    shown |= {
        (g, i) for m in methods for g, both in enumerate(m["gallery"]) for end in both for i in end
    }
    return {
        "groups": [
            _group(group, classes, known=group is content.known) for group in content.groups
        ],
        "methods": methods,
        "wrong": wrong,
        "images": {f"{g}/{i}": png(content.groups[g].images, i) for g, i in sorted(shown)},
        "learning": learning,
    }


def _group(group: Group, classes: tuple[str, ...], known: bool) -> dict[str, Any]:
    """The images' columns beside their scores."""
    own, right = (
        group.images.classes,
        group.correct if known else None,
    )  # labels of unknown images are not its classes
    return {
        "name": group.name,
        "ids": list(group.images.ids) or None,
        "predicted": coded([class_name(int(c), classes) for c in group.predicted]),
        "confidence": None if group.confidence is None else packed(group.confidence),
        "labels": None
        if group.labels is None
        else coded([class_name(int(c), own) for c in group.labels]),
        "right": None if right is None else packed(right.astype(np.uint8)),
    }


def _method(content: Content, method: str) -> dict[str, Any]:
    scores = [group.scores[method] for group in content.groups]
    drawn = axis(scores)
    curves = {"roc": figures.roc_curves, "lift": figures.lift}
    return {
        "name": method,
        "scores": [packed(values) for values in scores],
        "axis": {"low": drawn.low, "high": drawn.high, "log": drawn.logarithmic},
        "curves": {
            key: draw(content, method) for key, draw in curves.items() if _has(content, key)
        },
        "gallery": [ends(values) for values in scores],
        "layers": _layers(content, method),
    }


def _layers(content: Content, method: str) -> dict[str, Any]:
    """Bars for a method that has layers, and words for every method."""
    if method not in content.layers:
        return {"said": _why_no_layers(content, method), "bars": []}
    found = layer_shares(content, content.layers[method])
    said = []
    for name, shares in zip(found.groups, found.shares, strict=True):
        most = int(shares.argmax())
        said.append(f"in {name} from {found.names[most]} ({figures.percent(shares[most])})")
    rest = f" {found.others} layers with smaller shares are not shown." if found.others else ""
    bars = [
        {"name": layer, "shares": figures.rounded(100 * found.shares[:, i], 3)}
        for i, layer in enumerate(found.names)
    ]
    order = [group.name for group in content.groups]
    return {
        "said": f"On average most of the score comes {_and(said)}.{rest}",
        "bars": bars,
        "groups": [order.index(name) for name in found.groups],
    }


def _why_no_layers(content: Content, method: str) -> str:
    kind = kind_of(content, method)
    having = f" Those of {_and(list(content.layers))} do." if content.layers else ""
    if kind is None:
        return f"Nothing says which layers the scores of {method} come from.{having}"
    why = (
        "does not add up the gradients of classes"
        if kind.direction
        else "is not made from gradients"
    )
    return f"{method} {why}, so its scores do not come from layers.{having}"


def _and(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
