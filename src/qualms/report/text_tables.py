"""Format rows of scored texts as Markdown tables."""

from collections.abc import Iterable, Sequence

from qualms.report.tables import group_rows, markdown
from qualms.tasks.rows import NextTokenRow, Row, TextRow


def text_table(rows: Iterable[Row]) -> str:
    """Format the rows of `qualms bench text`, in percent.

    There is a table of AUROC and AUPR for each pair of texts, by tokens and by spans, and a table
    of how well methods detect wrong next tokens.

    Args:
        rows: Rows of other kinds are ignored.
    """
    texts: list[TextRow] = []
    errors: list[NextTokenRow] = []
    for row in rows:
        if row["row"] == "text":
            texts.append(row)
        elif row["row"] == "next-token":
            errors.append(row)
    pairs = group_rows(texts, lambda row: (row["in"], row["out"]))
    parts = list(map(_pair_table, pairs.values()))
    if errors:
        parts.append(_error_table(errors))
    return "\n\n".join(parts)


def _pair_table(rows: Sequence[TextRow]) -> str:
    """Format the rows of a pair of texts: a line per method, a column per length of spans."""
    first_row = rows[0]
    spans = list(dict.fromkeys(row["span"] for row in rows))
    head = ["method"]
    for span in spans:
        head.append(f"{span_name(span, first_row['window'])}, AUROC / AUPR")
    lines = []
    for name, method_rows in group_rows(rows, lambda row: row["method"]).items():
        by_span = {row["span"]: row for row in method_rows}
        line = [name]
        for span in spans:
            row = by_span[span]
            line.append(f"{auroc_text(row)} / {100 * row['aupr_out']:.1f}")
        lines.append(line)
    windows = (
        f"{first_row['n_in']} and {first_row['n_out']} windows of {first_row['window']} tokens"
    )
    title = f"{first_row['in']} → {first_row['out']}: {windows}, %"
    return f"{title}\n\n{markdown(head, lines)}"


def _error_table(rows: Sequence[NextTokenRow]) -> str:
    """Format how well methods detect wrong next tokens: a line per method."""
    first_row = rows[0]
    lines = []
    for row in rows:
        lift = f"{row['raulc']:.3f} [{row['raulc_low']:.3f}, {row['raulc_high']:.3f}]"
        ratio = f"{row['prr']:.3f} [{row['prr_low']:.3f}, {row['prr_high']:.3f}]"
        lines.append([row["method"], auroc_text(row), lift, ratio])
    head = ["method", "AUROC of wrong ones, %", "rAULC", "PRR of p(next token)"]
    accuracy = f"{100 * first_row['accuracy']:.1f} % right"
    title = f"Next tokens of {first_row['in']}: {first_row['n']} windows, {accuracy}"
    return f"{title}\n\n{markdown(head, lines)}"


def span_name(span: int, window: int) -> str:
    """Return the heading of spans of a length: `tokens`, `spans of 8` or `whole windows`.

    Args:
        span: The number of tokens in a span.
        window: The number of tokens in a window.
    """
    if span == 1:
        return "tokens"
    if span == window:
        return "whole windows"
    return f"spans of {span}"


def auroc_text(row: TextRow | NextTokenRow) -> str:
    """Format AUROC with its interval, in percent."""
    interval = f"[{100 * row['auroc_low']:.1f}, {100 * row['auroc_high']:.1f}]"
    return f"{100 * row['auroc']:.1f} {interval}"
