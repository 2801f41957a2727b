"""Rows of scored texts as tables to read."""

from collections.abc import Iterable, Sequence

from qualms.report.tables import markdown
from qualms.tasks.rows import NextTokenRow, Row, TextRow


def text_table(rows: Iterable[Row]) -> str:
    """For each pair of texts AUROC and AUPR by tokens and spans; then how well wrong next tokens
    are found. Percent.
    """
    found = list(rows)
    apart = [row for row in found if row["row"] == "text"]
    errors = [row for row in found if row["row"] == "next-token"]
    pairs = dict.fromkeys((row["in"], row["out"]) for row in apart)
    parts = [_pair([row for row in apart if (row["in"], row["out"]) == pair]) for pair in pairs]
    return "\n\n".join([*parts, *([_errors(errors)] if errors else [])])


def _pair(rows: Sequence[TextRow]) -> str:
    spans = list(dict.fromkeys(row["span"] for row in rows))
    head = ["method", *(f"{span_name(span, rows[0]['window'])}, AUROC / AUPR" for span in spans)]
    lines = []
    for name in dict.fromkeys(row["method"] for row in rows):
        of_method = {row["span"]: row for row in rows if row["method"] == name}
        lines.append(
            [
                name,
                *(
                    f"{area(of_method[span])} / {100 * of_method[span]['aupr_out']:.1f}"
                    for span in spans
                ),
            ]
        )
    one = rows[0]
    title = f"{one['in']} → {one['out']}: {one['n_in']} and {one['n_out']} windows of {one['window']} tokens, %"
    return f"{title}\n\n{markdown(head, lines)}"


def _errors(rows: Sequence[NextTokenRow]) -> str:
    one = rows[0]
    title = f"Next tokens of {one['in']}: {one['n']} windows, {100 * one['accuracy']:.1f} % right"
    lines = [
        [
            row["method"],
            area(row),
            f"{row['raulc']:.3f} [{row['raulc_low']:.3f}, {row['raulc_high']:.3f}]",
            f"{row['prr']:.3f} [{row['prr_low']:.3f}, {row['prr_high']:.3f}]",
        ]
        for row in rows
    ]
    return f"{title}\n\n{markdown(['method', 'AUROC of wrong ones, %', 'rAULC', 'PRR of p(next token)'], lines)}"


def span_name(span: int, window: int) -> str:
    """What a column of spans is called."""
    return "tokens" if span == 1 else "whole windows" if span == window else f"spans of {span}"


def area(row: TextRow | NextTokenRow) -> str:
    """AUROC with its interval, in percent."""
    return f"{100 * row['auroc']:.1f} [{100 * row['auroc_low']:.1f}, {100 * row['auroc_high']:.1f}]"
