"""The report page: one HTML file that contains everything and loads nothing."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qualms.disk import require_writable
from qualms.report import comparison, figures
from qualms.report.content import Content, Group
from qualms.report.gallery import class_name, confident_mistakes, extreme_images, image_url
from qualms.report.numbers import (
    LearningMeasure,
    MethodSummary,
    Verdict,
    compare_methods,
    layer_shares,
    learning_curves,
    score_axis,
    summarize_methods,
)
from qualms.report.offline import (
    format_facts,
    pack_array,
    pack_words,
    render_template,
    require_packages,
    write_html,
)
from qualms.report.roles import explain_no_default, find_default, find_method, not_for_use

COVERAGE = 95  # the first threshold, in percent of the known images
CURVES = {"roc": "ROC curves", "lift": "Lift curve"}
CURVE_FIGURES = {"roc": figures.roc_figure, "lift": figures.lift_figure}
LEARNING: dict[LearningMeasure, tuple[str, str]] = {  # the title of the axis, the best value
    "accuracy": ("accuracy, %", "highest"),
    "nll": ("negative log-likelihood", "lowest"),
}


def write_page(content: Content, path: str | Path, *, resamples: int = 1000) -> Path:
    """Write a report as one HTML file.

    Args:
        content: The content of the page.
        path: The file.
        resamples: The number of bootstrap resamples that each interval is computed from.

    Returns:
        The path of the file.
    """
    require_packages("jinja2", "PIL")
    require_writable(path)
    return write_html(path, _html(content, summarize_methods(content, resamples)))


def _html(content: Content, summaries: list[MethodSummary]) -> str:
    """Return the HTML of the page.

    Args:
        content: The content of the page.
        summaries: The summaries of all methods, in the order of the table.
    """
    verdict = compare_methods(content, summaries)
    names = [summary.method for summary in summaries]
    start = _first_method(content, verdict) or names[0]
    learning = _learning_figures(content)
    curves = {key: title for key, title in CURVES.items() if _has_curve(content, key)}
    return render_template(
        "page.html.jinja",
        styles=("page.css",),
        scripts=("page.values.js", "page.charts.js", "page.js"),
        title=content.title,
        facts=_facts(content),
        groups=[group.name for group in content.groups],
        columns=comparison.columns(content, summaries),
        bodies=_table_bodies(content, summaries, verdict),
        summary=comparison.describe_comparison(content, summaries, verdict),
        start=names.index(start),
        no_default=explain_no_default(content),
        left_out=content.left_out,
        coverage=COVERAGE,
        curves=curves,
        no_curves=_explain_no_curves(content),
        learning=learning,
        labeled=content.known.correct is not None,
        layered=bool(content.layers),
        mistakes=_describe_mistakes(content),
        data=_data(content, names, learning),
    )


def _first_method(content: Content, verdict: Verdict) -> str | None:
    """Return the method that the page opens on: the default, or else the highest-ranked method."""
    default = find_default(content)
    if default is None and verdict.highest is not None:
        return verdict.highest.method
    return default


def _facts(content: Content) -> list[str]:
    """Return the facts below the title: those of the content, and the accuracy if it is known."""
    facts = format_facts(content.about)
    known = content.known
    if known.correct is not None:
        share = figures.format_percent(known.correct.mean())
        facts.append(f"{share} of the {len(known.images)} {known.name} predicted correctly")
    return facts


def _table_bodies(
    content: Content, summaries: list[MethodSummary], verdict: Verdict
) -> list[list[dict[str, Any]]]:
    """Return the rows of the table in two lists: methods for use, and those for comparison only.

    Args:
        content: The content of the page.
        summaries: The summaries of all methods, in the order of the table.
        verdict: The result of their comparison.
    """
    unused = not_for_use(content)
    default = find_default(content)
    best = []
    if verdict.best is not None:
        best = [verdict.best.method, *verdict.tied]
    shown: list[dict[str, Any]] = []
    folded: list[dict[str, Any]] = []
    for number, summary in enumerate(summaries):
        row = {
            "method": summary.method,
            "number": number,
            "cells": comparison.cells(content, summaries, summary),
            "tied": summary.method in best,
            "default": summary.method == default,
        }
        if summary.method in unused:
            folded.append(row)
        else:
            shown.append(row)
    return [shown, folded]


def _has_curve(content: Content, curve: str) -> bool:
    """Whether a curve can be drawn: `roc` needs unknown images, `lift` some right predictions.

    Args:
        content: The content of the page.
        curve: A key of `CURVES`.
    """
    if curve == "roc":
        return bool(content.unknown)
    return content.known.correct is not None and bool(content.known.correct.any())


def _explain_no_curves(content: Content) -> list[str]:
    """Return a sentence for each curve that cannot be drawn, with what it needs."""
    sentences = []
    if not content.unknown:
        sentences.append(
            "There are no ROC curves, because there are no unknown images: name some with --ood."
        )
    if content.known.correct is None:
        sentences.append(
            f"There is no lift curve, because the images of {content.known.name} have no labels: "
            "sort them into one folder per class."
        )
    elif not content.known.correct.any():
        sentences.append("There is no lift curve, because no prediction is right.")
    return sentences


def _describe_mistakes(content: Content) -> str:
    """Return the text above the confident mistakes, or in place of them."""
    known = content.known
    if known.correct is None:
        return f"The images of {known.name} have no labels, so no prediction can be called wrong."
    total = len(known.images)
    if known.correct.all():
        return f"All {total} predictions are right."
    wrong = int((~known.correct).sum())
    count = f"{wrong} of the {total} predictions for {known.name} are wrong"
    if known.confidence is None:
        return f"{count}; the confidence of the network is not known."
    return f"{count}. The most confident ones come first."


def _learning_figures(content: Content) -> list[dict[str, Any]]:
    """Return the curves of active learning, a figure for each measure and dataset."""
    learning = []
    for measure, (title, best) in LEARNING.items():
        for data, curves in learning_curves(content.cycles, measure).items():
            if curves:
                figure = figures.learning_figure(curves, title, best)
                learning.append({"title": f"{data}: {title}", **figure})
    return learning


def _data(content: Content, methods: list[str], learning: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what the page's script reads.

    Args:
        content: The content of the page.
        methods: The names of the methods, in the order of the table.
        learning: The figures of active learning.
    """
    classes = tuple(content.classes) or content.known.images.classes
    mistakes = confident_mistakes(content.known)
    method_data = [_method_data(content, method) for method in methods]
    galleries = [data["gallery"] for data in method_data]
    groups = []
    for group in content.groups:
        groups.append(_group_data(group, classes, group is content.known))
    return {
        "groups": groups,
        "methods": method_data,
        "wrong": mistakes,
        "images": _pictures(content, mistakes, galleries),
        "learning": learning,
    }


def _pictures(
    content: Content,
    mistakes: Sequence[int],
    galleries: Sequence[Sequence[tuple[list[int], list[int]]]],
) -> dict[str, str]:
    """Return the images that the page can show, as data URLs by `group/image`.

    Args:
        content: The content of the page.
        mistakes: The indices of the known images that are shown as mistakes.
        galleries: For each method and group, the indices of the images with the lowest and with the
            highest scores.

    Returns:
        By keys such as `0/12`, for image 12 of the known images (group 0), a data URL.
    """
    shown = set()
    for i in mistakes:
        shown.add((0, i))
    for gallery in galleries:
        for group, (lowest, highest) in enumerate(gallery):
            for i in (*lowest, *highest):
                shown.add((group, i))
    pictures = {}
    for group, i in sorted(shown):
        pictures[f"{group}/{i}"] = image_url(content.groups[group].images, i)
    return pictures


def _group_data(group: Group, classes: tuple[str, ...], is_known: bool) -> dict[str, Any]:
    """Return what the page's script reads about a group, except for the scores.

    Args:
        group: The images.
        classes: The names of the network's classes.
        is_known: Whether these are the known images. Only their predictions are marked right or
            wrong, as labels of other images are not among the network's classes.
    """
    columns: dict[str, Any] = {
        "name": group.name,
        "ids": list(group.images.ids) or None,
        "predicted": _pack_classes(group.predicted, classes),
        "confidence": None,
        "labels": None,
        "right": None,
    }
    if group.confidence is not None:
        columns["confidence"] = pack_array(group.confidence)
    if group.labels is not None:
        columns["labels"] = _pack_classes(group.labels, group.images.classes)
    if is_known and group.correct is not None:
        columns["right"] = pack_array(group.correct.astype(np.uint8))
    return columns


def _pack_classes(numbers: np.ndarray, classes: tuple[str, ...]) -> dict[str, Any]:
    """Encode the names of the classes with these numbers [n] for the page's JSON."""
    return pack_words([class_name(int(number), classes) for number in numbers])


def _method_data(content: Content, method: str) -> dict[str, Any]:
    """Return what the page's script reads about a method: scores, curves, gallery and layers.

    Args:
        content: The content of the page.
        method: The name of the method.
    """
    scores = [group.scores[method] for group in content.groups]
    axis = score_axis(scores)
    curves = {}
    for key, figure in CURVE_FIGURES.items():
        if _has_curve(content, key):
            curves[key] = figure(content, method)
    return {
        "name": method,
        "scores": [pack_array(values) for values in scores],
        "axis": {"low": axis.low, "high": axis.high, "log": axis.logarithmic},
        "curves": curves,
        "gallery": [extreme_images(values) for values in scores],
        "layers": _layer_data(content, method),
    }


def _layer_data(content: Content, method: str) -> dict[str, Any]:
    """Return the chart of the layers that a method's scores come from.

    Args:
        content: The content of the page.
        method: The name of the method.

    Returns:
        A sentence as `summary`; and the `bars`, for each layer its name and its share in percent in
        each of the `groups` (indices). Without layers, there are no bars, and the sentence says
        why.
    """
    if method not in content.layers:
        return {"summary": _explain_no_layers(content, method), "bars": []}
    layers = layer_shares(content, content.layers[method])
    parts = []
    for name, shares in zip(layers.groups, layers.shares, strict=True):
        largest = int(shares.argmax())
        share = figures.format_percent(shares[largest])
        parts.append(f"in {name} from {layers.names[largest]} ({share})")
    sentence = f"On average, most of the score comes {_join(parts)}."
    if layers.others:
        sentence += f" {layers.others} layers with smaller shares are not shown."
    bars = []
    for i, layer in enumerate(layers.names):
        shares = figures.round_digits(100 * layers.shares[:, i], 3)
        bars.append({"name": layer, "shares": shares})
    order = [group.name for group in content.groups]
    groups = [order.index(name) for name in layers.groups]
    return {"summary": sentence, "bars": bars, "groups": groups}


def _explain_no_layers(content: Content, method: str) -> str:
    """Explain why a method's scores have no layers, and name the methods whose scores have them."""
    kind = find_method(content, method)
    others = ""
    if content.layers:
        others = f" Those of {_join(list(content.layers))} can."
    if kind is None:
        return f"The scores of {method} cannot be split by layer.{others}"
    why = "does not use gradients"
    if kind.direction:  # a gradient score, but not a sum over classes
        why = "does not sum the gradients of classes"
    return f"{method} {why}, so its scores cannot be split by layer.{others}"


def _join(parts: Sequence[str]) -> str:
    """Join words as in `a, b and c`."""
    if len(parts) == 1:
        return parts[0]
    return f"{', '.join(parts[:-1])} and {parts[-1]}"
