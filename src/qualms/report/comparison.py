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
        group_name: The name of the group of images that the column is about; empty if there is
            none.
        heading: The name of the measure.
        explanation: An explanation of the heading.
        visibility: When the column is shown: `first` always, `wide` on any screen wider than a
            phone, `more` on request.
    """

    group_name: str
    heading: str
    explanation: str
    visibility: str


@dataclass(frozen=True)
class WhiskerRange:
    """The range of values that the whiskers (drawn intervals) of a measure have in common.

    Args:
        low: The value at the left end.
        high: The value at the right end.
        chance: The value of the measure for random scores, such as an AUROC of 0.5.
    """

    low: float
    high: float
    chance: float

    def position_of(self, value: float) -> float:
        """Return the position of a value, from 0 at `low` to 100 at `high`, clipped to these."""
        share = (value - self.low) / (self.high - self.low)
        return round(100 * min(1.0, max(0.0, share)), 2)


def list_columns(content: Content, summaries: Sequence[MethodSummary]) -> list[Column]:
    """Return the columns of the table of methods; a measure that was not computed has no column.

    Whether a column is always shown is its `visibility` (see `Column`).

    Args:
        content: The content of the report.
        summaries: The summaries of all methods.
    """
    groups = content.unknown
    table_columns = []
    if len(groups) > 1:
        title = f"mean of {len(groups)}"
        table_columns.append(
            Column(
                group_name=title,
                heading="AUROC, %",
                explanation="over the unknown groups; 50 is chance",
                visibility="first",
            )
        )
    visibility = _group_column_visibility(len(groups))
    for group in groups:
        table_columns.append(
            Column(
                group_name=group.name,
                heading="AUROC, %",
                explanation="with its 95 % interval; 50 is chance",
                visibility=visibility,
            )
        )
    for group in groups:
        table_columns.append(
            Column(
                group_name=group.name,
                heading="AUPR, %",
                explanation="unknown images as the positive class",
                visibility="more",
            )
        )
    if any(summary.raulc is not None for summary in summaries):
        explanation = "with its 95 % interval; 1 is the ideal order, 0 is chance"
        visibility = "more" if groups else "first"
        table_columns.append(
            Column(
                group_name=content.known.name,
                heading="rAULC",
                explanation=explanation,
                visibility=visibility,
            )
        )
    if content.costs:
        if all(isinstance(cost, int | float) for cost in content.costs.values()):
            table_columns.append(
                Column(
                    group_name="",
                    heading="cost",
                    explanation="time, where 1× is a forward pass",
                    visibility="first",
                )
            )
        else:
            table_columns.append(
                Column(
                    group_name="",
                    heading="cost",
                    explanation="in forward passes",
                    visibility="more",
                )
            )
    return table_columns


def _group_column_visibility(num_groups: int) -> str:
    """Return the `visibility` (see `Column`) of the AUROC columns of this many unknown groups."""
    if num_groups == 1:
        return "first"
    if num_groups <= MAX_WIDE_COLUMNS:
        return "wide"
    return "more"


def make_cells(
    content: Content, summaries: Sequence[MethodSummary], row_summary: MethodSummary
) -> list[dict[str, Any]]:
    """Return the cells of a method's row, in the order of `list_columns`.

    Args:
        content: The content of the report.
        summaries: The summaries of all methods. The range of whiskers is that of the methods that
            are not only for comparison with the paper.
        row_summary: The summary of the row's method.

    Returns:
        For each cell its text, the key to sort by, and the positions of the dot and the whisker
        (see `_estimate_cell`).
    """
    methods_not_for_use = not_for_use(content)
    aurocs: list[Estimate] = []
    raulcs: list[Estimate] = []
    for summary in summaries:
        if summary.method in methods_not_for_use:
            continue
        aurocs += summary.auroc
        if summary.mean_auroc is not None:
            aurocs.append(summary.mean_auroc)
        if summary.raulc is not None:
            raulcs.append(summary.raulc)
    auroc_range = _whisker_range(aurocs, chance=0.5)
    raulc_range = _whisker_range(raulcs, chance=0.0)
    row_cells = []
    if len(content.unknown) > 1 and row_summary.mean_auroc is not None:
        row_cells.append(
            _estimate_cell(
                row_summary.mean_auroc,
                scale=100,
                digits=1,
                whisker_range=auroc_range,
            )
        )
    for auroc in row_summary.auroc:
        row_cells.append(
            _estimate_cell(
                auroc,
                scale=100,
                digits=1,
                whisker_range=auroc_range,
            )
        )
    for aupr in row_summary.aupr:
        row_cells.append(_plain_cell(f"{100 * aupr:.1f}", aupr))
    if row_summary.raulc is not None:
        row_cells.append(
            _estimate_cell(
                row_summary.raulc,
                scale=1,
                digits=3,
                whisker_range=raulc_range,
            )
        )
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
    # From 9.95 on, one decimal would print as 10.0 or more.
    if cost >= 9.95:
        return f"{cost:.0f}×"
    return f"{cost:.1f}".removesuffix(".0") + "×"


def describe_comparison(
    content: Content, summaries: Sequence[MethodSummary], verdict: Verdict
) -> list[str]:
    """Describe the comparison in sentences; a method is only called best if it is above chance.

    Args:
        content: The content of the report.
        summaries: The summaries of all methods.
        verdict: The result of `compare_methods`.
    """
    if verdict.highest is None:
        return [_explain_no_comparison(content)]
    # The name of the measure `MethodSummary.main`, and its value at chance.
    measure, chance = "AUROC", "50 %"
    if len(content.unknown) > 1:
        measure = "mean AUROC"
    elif not content.unknown:
        measure, chance = "rAULC", "0"
    # AUROC is formatted in percent with one decimal, rAULC with three decimals.
    scale, digits = (100, 1) if content.unknown else (1, 3)
    text_by_method = {}
    for summary in summaries:
        if summary.main is not None:
            text_by_method[summary.method] = _format_estimate(summary.main, scale, digits)
    highest = verdict.highest.method
    sentences = [f"{highest} has the highest {measure}, {text_by_method[highest]}."]
    if verdict.best is None:
        sentences = [
            f"No method does better than chance here ({chance}): the highest {measure}, "
            f"of {highest}, is {text_by_method[highest]}."
        ]
    if len(verdict.tied) == 1:
        sentences.append("The interval of 1 other method overlaps (tinted).")
    elif verdict.tied:
        count = len(verdict.tied)
        sentences.append(f"The intervals of {count} other methods overlap (tinted).")
    default = find_default(content)
    if default not in (None, highest) and default in text_by_method:
        sentences.append(f"The default, {default}, has {text_by_method[default]}.")
    return sentences


def _explain_no_comparison(content: Content) -> str:
    """Return why no method can be called better than another."""
    correct = content.known.correct
    beginning = "Methods cannot be compared on these images: there are no unknown images to detect"
    if correct is None:
        return f"{beginning}, and no labels that show which predictions are wrong."
    if correct.all():
        return f"{beginning}, and every prediction is right."
    # With right and wrong predictions, rAULC would compare the methods.
    return f"{beginning}, and no prediction is right."


def _format_estimate(estimate: Estimate, scale: int, digits: int) -> str:
    """Format a value with its interval, such as `91.3 % [90.1, 92.4]`.

    Args:
        estimate: The value and its interval.
        scale: The factor of the printed numbers; 100 prints percent.
        digits: The number of decimals; a value in percent always has one.
    """
    value = f"{estimate.value:.{digits}f}"
    if scale == 100:
        value = format_percent(estimate.value)
    return f"{value} {_format_interval(estimate, scale, digits)}".strip()


def _format_interval(estimate: Estimate, scale: int, digits: int) -> str:
    """Format an interval, such as `[90.1, 92.4]`; empty if it is not known.

    Args:
        estimate: The value and its interval.
        scale: The factor of the printed numbers.
        digits: The number of decimals.
    """
    if not math.isfinite(estimate.low):
        return ""
    return f"[{scale * estimate.low:.{digits}f}, {scale * estimate.high:.{digits}f}]"


def _whisker_range(estimates: Sequence[Estimate], chance: float) -> WhiskerRange:
    """Return the range that the whiskers of some estimates are drawn on, with a margin.

    Below chance, the range is at most a tenth as long as above it; whiskers of worse methods are
    cut off at its end.

    Args:
        estimates: The estimates of a measure, for the methods whose whiskers decide the range.
        chance: The value of the measure for random scores.
    """
    ends = []
    for estimate in estimates:
        for end in (estimate.low, estimate.value, estimate.high):
            if math.isfinite(end):
                ends.append(end)
    # Without estimates no whisker is drawn, but the range must have a length.
    if not ends:
        ends = [0.0, 1.0]
    low, high = min(ends), max(ends)
    low = max(low, chance - 0.1 * abs(high - chance))
    # If all values are equal, the range would have no length without the second margin.
    margin = 0.04 * (high - low) or 0.05
    return WhiskerRange(
        low=low - margin,
        high=high + margin,
        chance=chance,
    )


def _plain_cell(text: str, key: int | float | str) -> dict[str, Any]:
    """Return a cell without a whisker.

    Args:
        text: The text of the cell.
        key: The value that sorts the rows by this column.
    """
    return {"text": text, "key": key, "range": "", "whisker": None}


def _estimate_cell(
    estimate: Estimate, scale: int, digits: int, whisker_range: WhiskerRange
) -> dict[str, Any]:
    """Return a cell with a dot and a whisker.

    Args:
        estimate: The value and its interval.
        scale: The factor of the printed numbers; 100 prints percent.
        digits: The number of decimals.
        whisker_range: The range that the whisker is drawn on.

    Returns:
        The `text`; the `key` to sort by; the interval as text (`range`); and the `whisker`, in
        percent of the cell's width: its left end (`low`) and `width`, and the positions of the dot
        (`at`) and of `chance` (-1 if it is outside of the range).
    """
    low, high = estimate.low, estimate.high
    # Without an interval, the whisker has no length.
    if not math.isfinite(low):
        low, high = estimate.value, estimate.value
    whisker = {
        "low": whisker_range.position_of(low),
        "width": round(whisker_range.position_of(high) - whisker_range.position_of(low), 2),
        "at": whisker_range.position_of(estimate.value),
        "chance": -1.0,
    }
    if whisker_range.low < whisker_range.chance < whisker_range.high:
        whisker["chance"] = whisker_range.position_of(whisker_range.chance)
    return {
        "text": f"{scale * estimate.value:.{digits}f}",
        "key": estimate.value,
        "range": _format_interval(estimate, scale, digits),
        "whisker": whisker,
    }
