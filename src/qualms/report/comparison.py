"""The table that compares methods: its columns, its cells, and a summary of a few sentences."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from qualms.report.content import Content
from qualms.report.figures import format_percent
from qualms.report.numbers import Estimate, MethodSummary, Verdict
from qualms.report.roles import find_default, not_for_use

# Up to so many unknown groups, AUROC columns are shown on a wide screen.
MAX_WIDE_COLUMNS = 3


@dataclass(frozen=True)
class Column:
    """The heading of a column of the table that compares methods.

    Args:
        of: The name of the group of images that the column is about; empty if there is none.
        text: The heading.
        why: An explanation of the heading.
        place: Where it is shown: `first` always, `wide` on anything wider than a phone, `more` on
            request.
    """

    of: str
    text: str
    why: str
    place: str


@dataclass(frozen=True)
class Span:
    """The range of values that whiskers (drawn intervals) share in the cells of the table.

    Args:
        low: The value at the left end.
        high: The value at the right end.
        chance: The measure of a random score, such as an AUROC of 0.5.
    """

    low: float
    high: float
    chance: float

    def place(self, value: float) -> float:
        """Return where a value lies between the ends, from 0 to 100; values outside lie at an end."""
        share = (value - self.low) / (self.high - self.low)
        return round(100 * min(1.0, max(0.0, share)), 2)


def columns(content: Content, summaries: Sequence[MethodSummary]) -> list[Column]:
    """Return the columns of the table for which there are groups of images, labels or costs.

    Args:
        content: The content of the report.
        summaries: The summaries of all methods.
    """
    groups = content.unknown
    table_columns = []
    if len(groups) > 1:
        title = f"mean of {len(groups)}"
        table_columns.append(
            Column(title, "AUROC, %", "over the unknown groups; 50 is chance", "first")
        )
    place = _group_column_place(len(groups))
    for group in groups:
        table_columns.append(
            Column(group.name, "AUROC, %", "with its 95 % interval; 50 is chance", place)
        )
    for group in groups:
        table_columns.append(
            Column(group.name, "AUPR, %", "unknown images as the positive class", "more")
        )
    if any(summary.raulc is not None for summary in summaries):
        why = "with its 95 % interval; 1 is the ideal order, 0 is chance"
        place = "more" if groups else "first"
        table_columns.append(Column(content.known.name, "rAULC", why, place))
    if content.costs:
        if all(isinstance(cost, int | float) for cost in content.costs.values()):
            table_columns.append(Column("", "cost", "time, where 1× is a forward pass", "first"))
        else:
            table_columns.append(Column("", "cost", "in forward passes", "more"))
    return table_columns


def _group_column_place(groups: int) -> str:
    """Return the `Column.place` of the AUROC columns of that many unknown groups."""
    if groups == 1:
        return "first"
    if groups <= MAX_WIDE_COLUMNS:
        return "wide"
    return "more"


def cells(
    content: Content, summaries: Sequence[MethodSummary], row_summary: MethodSummary
) -> list[dict[str, Any]]:
    """Return the cells of a row, in the order of `columns`.

    Args:
        content: The content of the report.
        summaries: The summaries of all methods. Those that are for use decide the range of
            whiskers.
        row_summary: The summary of the method in this row.

    Returns:
        For each cell its text, the key to sort by, and the positions of the dot and the whisker
        (see `_estimate_cell`).
    """
    unused = not_for_use(content)
    areas: list[Estimate] = []
    lifts: list[Estimate] = []
    for summary in summaries:
        if summary.method in unused:
            continue
        areas += summary.auroc
        if summary.mean_auroc is not None:
            areas.append(summary.mean_auroc)
        if summary.raulc is not None:
            lifts.append(summary.raulc)
    area_span, lift_span = _span(areas, 0.5), _span(lifts, 0.0)
    row_cells = []
    if len(content.unknown) > 1 and row_summary.mean_auroc is not None:
        row_cells.append(_estimate_cell(row_summary.mean_auroc, 100, 1, area_span))
    for area in row_summary.auroc:
        row_cells.append(_estimate_cell(area, 100, 1, area_span))
    for precision in row_summary.aupr:
        row_cells.append(_plain_cell(f"{100 * precision:.1f}", precision))
    if row_summary.raulc is not None:
        row_cells.append(_estimate_cell(row_summary.raulc, 1, 3, lift_span))
    if content.costs:
        row_cells.append(_cost_cell(row_summary.cost))
    return row_cells


def _cost_cell(cost: int | float | str | None) -> dict[str, Any]:
    """Return the cell of a cost in forward passes, which is empty if it is not known."""
    if cost is None:
        return _plain_cell("", "")
    if isinstance(cost, str):
        return _plain_cell(cost, cost)
    return _plain_cell(format_cost(cost), cost)


def format_cost(cost: int | float) -> str:
    """Format a cost in forward passes, such as `56×` or `1.2×`."""
    if cost >= 9.95:
        return f"{cost:.0f}×"
    return f"{cost:.1f}".removesuffix(".0") + "×"


def describe_comparison(
    content: Content, summaries: Sequence[MethodSummary], verdict: Verdict
) -> list[str]:
    """Describe the table in sentences, which call a method best only if it is above chance.

    Args:
        content: The content of the report.
        summaries: The summaries of all methods.
        verdict: The result of `compare_methods`.
    """
    if verdict.highest is None:
        return [_explain_no_comparison(content)]
    # The name of `MethodSummary.main`, its value at chance, and how it is formatted.
    measure, chance, scale, digits = "AUROC", "50 %", 100, 1
    if len(content.unknown) > 1:
        measure = "mean AUROC"
    elif not content.unknown:
        measure, chance, scale, digits = "rAULC", "0", 1, 3
    texts = {}
    for summary in summaries:
        if summary.main is not None:
            texts[summary.method] = _format_estimate(summary.main, scale, digits)
    highest = verdict.highest.method
    sentences = [f"{highest} has the highest {measure}, {texts[highest]}."]
    if verdict.best is None:
        sentences = [
            f"No method does better than chance here ({chance}): the highest {measure}, "
            f"of {highest}, is {texts[highest]}."
        ]
    if len(verdict.tied) == 1:
        sentences.append("The interval of 1 other method overlaps (tinted).")
    elif verdict.tied:
        count = len(verdict.tied)
        sentences.append(f"The intervals of {count} other methods overlap (tinted).")
    default = find_default(content)
    if default not in (None, highest) and default in texts:
        sentences.append(f"The default, {default}, has {texts[default]}.")
    return sentences


def _explain_no_comparison(content: Content) -> str:
    """Return why no method can be called better than another."""
    correct = content.known.correct
    start = "Methods cannot be compared on these images: there are no unknown images to detect"
    if correct is None:
        return f"{start}, and no labels that show which predictions are wrong."
    if correct.all():
        return f"{start}, and every prediction is right."
    return f"{start}, and no prediction is right."


def _format_estimate(estimate: Estimate, scale: int, digits: int) -> str:
    """Format a value with its interval, such as `91.3 % [90.1, 92.4]`.

    Args:
        estimate: The value and its interval.
        scale: The factor of the numbers; 100 gives percent.
        digits: The number of decimals.
    """
    value = f"{estimate.value:.{digits}f}"
    if scale == 100:
        value = format_percent(estimate.value)
    return f"{value} {_format_interval(estimate, scale, digits)}".strip()


def _format_interval(estimate: Estimate, scale: int, digits: int) -> str:
    """Format an interval, such as `[90.1, 92.4]`; empty if it is not known.

    Args:
        estimate: The value and its interval.
        scale: The factor of the numbers.
        digits: The number of decimals.
    """
    if not math.isfinite(estimate.low):
        return ""
    return f"[{scale * estimate.low:.{digits}f}, {scale * estimate.high:.{digits}f}]"


def _span(estimates: Sequence[Estimate], chance: float) -> Span:
    """Return the range of whiskers: of some estimates and their intervals, with a margin.

    Below chance, the range is at most a tenth as long as above it: worse methods end at its edge.

    Args:
        estimates: The estimates of the methods that are for use.
        chance: The measure of a random score.
    """
    ends = []
    for estimate in estimates:
        for end in (estimate.low, estimate.value, estimate.high):
            if math.isfinite(end):
                ends.append(end)
    if not ends:
        ends = [0.0, 1.0]
    low, high = min(ends), max(ends)
    low = max(low, chance - 0.1 * abs(high - chance))
    margin = 0.04 * (high - low) or 0.05
    return Span(low - margin, high + margin, chance)


def _plain_cell(text: str, key: int | float | str) -> dict[str, Any]:
    """Return a cell without a whisker.

    Args:
        text: The text of the cell.
        key: The key to sort by.
    """
    return {"text": text, "key": key, "range": "", "whisker": None}


def _estimate_cell(estimate: Estimate, scale: int, digits: int, span: Span) -> dict[str, Any]:
    """Return a cell with a dot and a whisker.

    Args:
        estimate: The value and its interval.
        scale: The factor of the numbers in the text; 100 gives percent.
        digits: The number of decimals.
        span: The range that the whisker is drawn on.

    Returns:
        The text, the key to sort by, the interval as text, and in percent of the cell's width the
        left end and the width of the whisker, the place of the dot (`at`), and the place of chance
        (-1 if it is outside).
    """
    low, high = estimate.low, estimate.high
    if not math.isfinite(low):
        low, high = estimate.value, estimate.value
    whisker = {
        "low": span.place(low),
        "width": round(span.place(high) - span.place(low), 2),
        "at": span.place(estimate.value),
        "chance": -1.0,
    }
    if span.low < span.chance < span.high:
        whisker["chance"] = span.place(span.chance)
    return {
        "text": f"{scale * estimate.value:.{digits}f}",
        "key": estimate.value,
        "range": _format_interval(estimate, scale, digits),
        "whisker": whisker,
    }
