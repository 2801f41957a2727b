"""Rows of scored texts as tables to read."""

from collections.abc import Iterable, Sequence

from qualms.report.tables import group_rows, markdown
from qualms.tasks.rows import NextTokenRow, Row, TextRow


def text_table(rows: Iterable[Row]) -> str:
    """Format the rows of `qualms bench text`, in percent.

    For each pair of texts there is a table of AUROC and AUPR, by tokens and by spans; then one of
    how well wrong next tokens are found.
    """
    found = list(rows)
    pairs = group_rows(
        (row for row in found if row["row"] == "text"), lambda row: (row["in"], row["out"])
    )
    parts = [_pair_table(of_pair) for of_pair in pairs.values()]
    errors = [row for row in found if row["row"] == "next-token"]
    if errors:
        parts.append(_error_table(errors))
    return "\n\n".join(parts)


def _pair_table(rows: Sequence[TextRow]) -> str:
    """Format the rows of a pair of texts: a line per method, a column per span."""
    one = rows[0]
    spans = list(dict.fromkeys(row["span"] for row in rows))
    head = ["method"]
    for span in spans:
        head.append(f"{span_name(span, one['window'])}, AUROC / AUPR")
    lines = []
    for name, of_method in group_rows(rows, lambda row: row["method"]).items():
        by_span = {row["span"]: row for row in of_method}
        line = [name]
        for span in spans:
            row = by_span[span]
            line.append(f"{auroc_text(row)} / {100 * row['aupr_out']:.1f}")
        lines.append(line)
    title = (
        f"{one['in']} → {one['out']}: {one['n_in']} and {one['n_out']} windows "
        f"of {one['window']} tokens, %"
    )
    return f"{title}\n\n{markdown(head, lines)}"


def _error_table(rows: Sequence[NextTokenRow]) -> str:
    """Format how well methods find wrong next tokens."""
    one = rows[0]
    lines = []
    for row in rows:
        lift = f"{row['raulc']:.3f} [{row['raulc_low']:.3f}, {row['raulc_high']:.3f}]"
        ratio = f"{row['prr']:.3f} [{row['prr_low']:.3f}, {row['prr_high']:.3f}]"
        lines.append([row["method"], auroc_text(row), lift, ratio])
    head = ["method", "AUROC of wrong ones, %", "rAULC", "PRR of p(next token)"]
    accuracy = f"{100 * one['accuracy']:.1f} % right"
    title = f"Next tokens of {one['in']}: {one['n']} windows, {accuracy}"
    return f"{title}\n\n{markdown(head, lines)}"


def span_name(span: int, window: int) -> str:
    """Return the name of a column, such as `spans of 8`."""
    if span == 1:
        return "tokens"
    return "whole windows" if span == window else f"spans of {span}"


def auroc_text(row: TextRow | NextTokenRow) -> str:
    """Format AUROC with its interval, in percent."""
    return f"{100 * row['auroc']:.1f} [{100 * row['auroc_low']:.1f}, {100 * row['auroc_high']:.1f}]"
