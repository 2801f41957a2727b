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

COVERAGE = 95  # percent of the known images that the threshold accepts when the page opens
CURVES = {"roc": "ROC curves", "lift": "Lift curve"}
CURVE_FIGURES = {"roc": figures.roc_figure, "lift": figures.lift_figure}
# By measure of active learning, the title of the axis, and whether the `highest` or the `lowest`
# value is best.
LEARNING: dict[LearningMeasure, tuple[str, str]] = {
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
    return write_html(path, _render_page(content, summarize_methods(content, resamples)))


def _render_page(content: Content, summaries: list[MethodSummary]) -> str:
    """Return the HTML of the page.

    Args:
        content: The content of the page.
        summaries: The summaries of all methods, in the order of the table.
    """
    verdict = compare_methods(content, summaries)
    names = [summary.method for summary in summaries]
    first_method = _first_method(content, verdict) or names[0]
    learning = _learning_figures(content)
    curves = {key: title for key, title in CURVES.items() if _has_curve(content, key)}
    return render_template(
        "page.html.jinja",
        styles=("page.css",),
        scripts=("page.values.js", "page.charts.js", "page.js"),
        title=content.title,
        facts=_list_facts(content),
        groups=[group.name for group in content.groups],
        columns=comparison.list_columns(content, summaries),
        bodies=_table_bodies(content, summaries, verdict),
        summary=comparison.describe_comparison(content, summaries, verdict),
        start=names.index(first_method),
        no_default=explain_no_default(content),
        left_out=content.left_out,
        coverage=COVERAGE,
        curves=curves,
        no_curves=_explain_no_curves(content),
        learning=learning,
        labeled=content.known.correct is not None,
        layered=bool(content.layers),
        mistakes=_describe_mistakes(content),
        data=_page_data(content, names, learning),
    )


def _first_method(content: Content, verdict: Verdict) -> str | None:
    """Return the method that the page opens on: the default, or else the highest-ranked method."""
    default = find_default(content)
    if default is None and verdict.highest is not None:
        return verdict.highest.method
    return default


def _list_facts(content: Content) -> list[str]:
    """Return the lines below the title: facts of the content, and the accuracy if it is known."""
    facts = format_facts(content.about)
    known = content.known
    if known.correct is not None:
        share = figures.format_percent(known.correct.mean())
        facts.append(f"{share} of the {len(known.images)} {known.name} predicted correctly")
    return facts


def _table_bodies(
    content: Content, summaries: list[MethodSummary], verdict: Verdict
) -> list[list[dict[str, Any]]]:
    """Return the rows of the table in two lists: of methods for use, and for comparison only.

    Args:
        content: The content of the page.
        summaries: The summaries of all methods, in the order of the table.
        verdict: The result of `compare_methods`: which methods are best and tied.
    """
    names_not_for_use = not_for_use(content)
    default = find_default(content)
    best_and_tied = []
    if verdict.best is not None:
        best_and_tied = [verdict.best.method, *verdict.tied]
    rows_for_use: list[dict[str, Any]] = []
    rows_for_comparison: list[dict[str, Any]] = []
    for index, summary in enumerate(summaries):
        row = {
            "method": summary.method,
            "number": index,
            "cells": comparison.make_cells(content, summaries, summary),
            "tied": summary.method in best_and_tied,
            "default": summary.method == default,
        }
        if summary.method in names_not_for_use:
            rows_for_comparison.append(row)
        else:
            rows_for_use.append(row)
    return [rows_for_use, rows_for_comparison]


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
    """Return the text of the section of mistakes: how many there are, or why none is shown."""
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
    """Return the figures of active learning, each with a title: one per measure and dataset."""
    learning = []
    for measure, (title, best) in LEARNING.items():
        for data, curves in learning_curves(content.cycles, measure).items():
            if curves:
                figure = figures.learning_figure(curves, title, best)
                learning.append({"title": f"{data}: {title}", **figure})
    return learning


def _page_data(
    content: Content, methods: list[str], learning: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return the data that the page's script reads, as values for JSON.

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
        "images": _image_urls(content, mistakes, galleries),
        "learning": learning,
    }


def _image_urls(
    content: Content,
    mistakes: Sequence[int],
    galleries: Sequence[Sequence[tuple[list[int], list[int]]]],
) -> dict[str, str]:
    """Return the images that the page can show, as data URLs.

    Args:
        content: The content of the page.
        mistakes: The indices of the known images that are shown as mistakes.
        galleries: For each method and group, the indices of the images with the lowest and with the
            highest scores.

    Returns:
        A dict from keys such as `0/12`, for image 12 of the known images (group 0), to data URLs.
    """
    shown = set()
    for image_index in mistakes:
        shown.add((0, image_index))
    for gallery in galleries:
        for group_index, (lowest, highest) in enumerate(gallery):
            for image_index in (*lowest, *highest):
                shown.add((group_index, image_index))
    urls = {}
    for group_index, image_index in sorted(shown):
        urls[f"{group_index}/{image_index}"] = image_url(
            content.groups[group_index].images, image_index
        )
    return urls


def _group_data(group: Group, classes: tuple[str, ...], is_known: bool) -> dict[str, Any]:
    """Return what the page's script reads about a group of images, except for the scores.

    Args:
        group: The images with their predictions.
        classes: The names of the network's classes.
        is_known: Whether these are the known images. Only their predictions are marked right or
            wrong, as labels of other images are not among the network's classes.
    """
    group_data: dict[str, Any] = {
        "name": group.name,
        "ids": list(group.images.ids) or None,
        "predicted": _pack_classes(group.predicted, classes),
        "confidence": None,
        "labels": None,
        "right": None,
    }
    if group.confidence is not None:
        group_data["confidence"] = pack_array(group.confidence)
    if group.labels is not None:
        group_data["labels"] = _pack_classes(group.labels, group.images.classes)
    if is_known and group.correct is not None:
        group_data["right"] = pack_array(group.correct.astype(np.uint8))
    return group_data


def _pack_classes(indices: np.ndarray, classes: tuple[str, ...]) -> dict[str, Any]:
    """Encode the names of n classes, given by their indices [n], for the page's JSON."""
    return pack_words([class_name(int(index), classes) for index in indices])


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
    """Return the bar chart of each layer's share of a method's scores.

    Args:
        content: The content of the page.
        method: The name of the method.

    Returns:
        A sentence as `summary`; the `groups` with layers, as indices into the groups of the report;
        and the `bars`, for each layer its name and its share in percent in each of these groups.
        Without layers, there are no bars, and the sentence says why.
    """
    if method not in content.layers:
        return {"summary": _explain_no_layers(content, method), "bars": []}
    layers = layer_shares(content, content.layers[method])
    clauses = []
    for name, shares in zip(layers.groups, layers.shares, strict=True):
        largest_layer = int(shares.argmax())
        share = figures.format_percent(shares[largest_layer])
        clauses.append(f"in {name} from {layers.names[largest_layer]} ({share})")
    sentence = f"On average, most of the score comes {_join_words(clauses)}."
    if layers.others:
        sentence += f" {layers.others} layers with smaller shares are not shown."
    bars = []
    for index, layer in enumerate(layers.names):
        shares = figures.round_digits(100 * layers.shares[:, index], 3)
        bars.append({"name": layer, "shares": shares})
    group_names = [group.name for group in content.groups]
    groups = [group_names.index(name) for name in layers.groups]
    return {"summary": sentence, "bars": bars, "groups": groups}


def _explain_no_layers(content: Content, method: str) -> str:
    """Explain why a method's scores have no layers, and name the methods whose scores have them."""
    found_method = find_method(content, method)
    other_methods = ""
    if content.layers:
        other_methods = f" Those of {_join_words(list(content.layers))} can."
    if found_method is None:
        return f"The scores of {method} cannot be split by layer.{other_methods}"
    why = "does not use gradients"
    # Only gradient scores have a direction; this one is not a sum over classes.
    if found_method.direction:
        why = "does not sum the gradients of classes"
    return f"{method} {why}, so its scores cannot be split by layer.{other_methods}"


def _join_words(words: Sequence[str]) -> str:
    """Join words or clauses, such as `a, b and c`."""
    if len(words) == 1:
        return words[0]
    return f"{', '.join(words[:-1])} and {words[-1]}"
