"""Format rows of scored texts as Markdown tables."""

from collections.abc import Iterable, Sequence

from qualms.report.tables import group_rows, markdown_table
from qualms.tasks.rows import NextTokenRow, Row, TextRow


def text_table(rows: Iterable[Row]) -> str:
    """Format the rows of `qualms bench text`, in percent.

    There is a table of AUROC and AUPR for each pair of texts, by tokens and by spans, and a table
    of how well methods detect wrong next tokens.

    Args:
        rows: Rows of tasks; rows of other kinds are ignored.
    """
    text_rows: list[TextRow] = []
    next_token_rows: list[NextTokenRow] = []
    for row in rows:
        if row["row"] == "text":
            text_rows.append(row)
        elif row["row"] == "next-token":
            next_token_rows.append(row)
    rows_by_pair = group_rows(text_rows, lambda row: (row["in"], row["out"]))
    tables = list(map(_pair_table, rows_by_pair.values()))
    if next_token_rows:
        tables.append(_next_token_table(next_token_rows))
    return "\n\n".join(tables)


def _pair_table(rows: Sequence[TextRow]) -> str:
    """Format the rows of a pair of texts: a line per method, a column per span length."""
    first_row = rows[0]
    spans = list(dict.fromkeys(row["span"] for row in rows))
    headings = ["method"]
    for span in spans:
        headings.append(f"{span_name(span, first_row['window'])}, AUROC / AUPR")
    lines = []
    for name, method_rows in group_rows(rows, lambda row: row["method"]).items():
        by_span = {row["span"]: row for row in method_rows}
        line = [name]
        for span in spans:
            row = by_span[span]
            line.append(f"{format_auroc(row)} / {100 * row['aupr_out']:.1f}")
        lines.append(line)
    windows = (
        f"{first_row['n_in']} and {first_row['n_out']} windows of {first_row['window']} tokens"
    )
    title = f"{first_row['in']} → {first_row['out']}: {windows}, %"
    return f"{title}\n\n{markdown_table(headings, lines)}"


def _next_token_table(rows: Sequence[NextTokenRow]) -> str:
    """Format a table of how well methods detect wrong next tokens: a line per method."""
    first_row = rows[0]
    lines = []
    for row in rows:
        raulc_text = f"{row['raulc']:.3f} [{row['raulc_low']:.3f}, {row['raulc_high']:.3f}]"
        prr_text = f"{row['prr']:.3f} [{row['prr_low']:.3f}, {row['prr_high']:.3f}]"
        lines.append([row["method"], format_auroc(row), raulc_text, prr_text])
    headings = ["method", "AUROC of wrong ones, %", "rAULC", "PRR of p(next token)"]
    accuracy = f"{100 * first_row['accuracy']:.1f} % right"
    title = f"Next tokens of {first_row['in']}: {first_row['n']} windows, {accuracy}"
    return f"{title}\n\n{markdown_table(headings, lines)}"


def span_name(span: int, window: int) -> str:
    """Return the heading for spans of some length: `tokens`, `spans of 8` or `whole windows`.

    Args:
        span: The number of tokens in a span.
        window: The number of tokens in a window.
    """
    if span == 1:
        return "tokens"
    if span == window:
        return "whole windows"
    return f"spans of {span}"


def format_auroc(row: TextRow | NextTokenRow) -> str:
    """Format the AUROC of a row with its interval, in percent, such as `91.3 [90.1, 92.4]`."""
    interval = f"[{100 * row['auroc_low']:.1f}, {100 * row['auroc_high']:.1f}]"
    return f"{100 * row['auroc']:.1f} {interval}"
