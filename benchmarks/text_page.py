"""The tables of docs/results.md about texts, from the rows of `text.py`."""

import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pages
from pages import table

PAGE = Path(__file__).parent.parent / "docs" / "results.md"
TEXTS = {
    "wizard_of_oz": "Oz",
    "hamlet_gutenberg": "Hamlet",
    "fortunes_science": "science quotes",
    "fortunes_literature": "literature quotes",
    "tinystories_valid_excerpt": "held-out stories",
}
CONTROL = "tinystories_valid_excerpt"
PARAMS = {
    "model.layers.*": "blocks alone, without embeddings and head",
    "model.layers.[34].*": "the last two blocks",
    "model.layers.4.*": "the last block",
}
Row = dict[str, Any]


def fill(rows: list[Row]) -> None:
    """Write the tables."""
    scores = [row for row in rows if row["part"] == "score"]
    main = [
        row
        for row in scores
        if row["seed"] == 0 and not row["params"] and row["method"] != "regrad+layers"
    ]
    parts = {
        "text tokens": tokens(main),
        "text spans": spans(main),
        "text leads": leads([row for row in rows if row["part"] == "leads"]),
        "text errors": errors(main),
        "text seeds": seeds(scores),
        "text tangents": tangents([row for row in rows if row["part"] == "tangents"]),
        "text hybrid": hybrid([row for row in rows if row["part"] == "hybrid"]),
        "text cost": cost([row for row in rows if row["part"] == "cost"]),
    }
    pages.fill(PAGE, parts)


def tokens(rows: list[Row]) -> str:
    """AUROC with intervals, and AUPR, of single tokens."""
    texts = [name for name in TEXTS if name in rows[0]["texts"]]
    lines = [
        [f"`{row['method']}`", *(with_interval(row["texts"][t]["1"]) for t in texts)]
        for row in rows
    ]
    known, others = rows[0]["n"], {TEXTS[t]: rows[0]["texts"][t]["n"] for t in texts}
    counts = ", ".join(f"{name} {n}" for name, n in others.items())
    note = f"Windows of 128 tokens: {known} of the known stories, {counts}. AUROC with its 95 % interval / AUPR, %."
    return f"{table(['score at a token', *others], lines)}\n\n{note}"


def spans(rows: list[Row]) -> str:
    """AUROC of spans, of whole windows, and of the mean so far."""
    kinds = {"8": "spans of 8", "32": "of 32", "128": "windows", "so far": "so far"}
    texts = [name for name in TEXTS if name in rows[0]["texts"]]
    body = {(t, kind): column(rows, t, kind) for kind in kinds for t in texts}
    lines = [
        [f"`{row['method']}`", *(" / ".join(body[t, kind][i] for t in texts) for kind in kinds)]
        for i, row in enumerate(rows)
        if row["method"] != "perplexity"  # it is the surprise so far
    ]
    note = f"AUROC, %: {' / '.join(TEXTS[t] for t in texts)}. The highest of each in bold, except for the control."
    return f"{table(['mean of', *kinds.values()], lines)}\n\n{note}"


def column(rows: list[Row], text: str, kind: str) -> list[str]:
    """One text by one kind of span, the highest in bold."""
    values = [round(100 * row["texts"][text][kind]["auroc"], 1) for row in rows]
    top = max(v for v, row in zip(values, rows, strict=True) if row["method"] != "perplexity")
    is_bold = text != CONTROL
    return [f"**{value:.1f}**" if is_bold and value == top else f"{value:.1f}" for value in values]


def leads(rows: list[Row]) -> str:
    """By how much REGrad is ahead, where both are drawn together."""
    lines = []
    for kind, name in {"1": "tokens", "8": "spans of 8", "32": "spans of 32"}.items():
        for rival in dict.fromkeys(row["rival"] for row in rows):
            own = {row["text"]: row[kind] for row in rows if row["rival"] == rival}
            lines.append(
                [name, f"`{rival}`", *(lead(own[text]) for text in TEXTS if text != CONTROL)]
            )
    return table(
        ["by", "`regrad` over", *(name for text, name in TEXTS.items() if text != CONTROL)], lines
    )


def lead(of: Row) -> str:
    """A lead in points with its interval, in bold where that does not hold zero."""
    lead = f"{100 * of['lead']:+.1f} [{100 * of['low']:+.1f}, {100 * of['high']:+.1f}]"
    return f"**{lead}**" if of["low"] > 0 or of["high"] < 0 else lead


def errors(rows: list[Row]) -> str:
    """Wrong next tokens."""
    lines = []
    for row in sorted(rows, key=lambda row: -row["errors"]["auroc"]):
        e = row["errors"]
        lift, ratio = (
            f"{e[m]:.3f} [{e[m + '_low']:.3f}, {e[m + '_high']:.3f}]" for m in ("raulc", "prr")
        )
        area = f"{100 * e['auroc']:.1f} [{100 * e['auroc_low']:.1f}, {100 * e['auroc_high']:.1f}]"
        lines.append([f"`{row['method']}`", area, lift, ratio])
    note = f"The likeliest next token is right at {100 * rows[0]['errors']['accuracy']:.1f} % of the known tokens."
    return f"{table(['score', 'AUROC of wrong ones, %', 'rAULC', 'PRR of p(next token)'], lines)}\n\n{note}"


def seeds(rows: list[Row]) -> str:
    """Gradient scores by which weights count, over seeds."""
    kinds = (
        ("wizard_of_oz", "1"),
        ("wizard_of_oz", "8"),
        ("fortunes_science", "1"),
        ("fortunes_science", "8"),
    )
    lines = []
    kinds_of = dict.fromkeys((row["method"], row["params"]) for row in rows)
    for method, params in sorted(
        kinds_of, key=lambda kind: (kind[0] == "regrad+layers", bool(kind[1]))
    ):
        own = [row for row in rows if (row["method"], row["params"]) == (method, params)]
        if method in ("entropy", "msp", "gen", "energy", "surprise", "perplexity"):
            continue
        name = f"`{method}`, {PARAMS[params]}" if params else f"`{method}`"
        areas = [spread(row["texts"][text][span]["auroc"] for row in own) for text, span in kinds]
        areas.append(spread(row["errors"]["auroc"] for row in own))
        lines.append([name, str(len(own)), *areas])
    head = [f"{TEXTS[text]}, {'tokens' if span == '1' else 'spans of 8'}" for text, span in kinds]
    return table(["score, 16 tangents", "seeds", *head, "wrong next tokens"], lines)


def tangents(rows: list[Row]) -> str:
    """How few tangents rank like many."""
    lines = []
    for k in sorted({row["tangents"] for row in rows}):
        own = [row for row in rows if row["tangents"] == k and row["method"] == "regrad"]
        of = [
            spread((row["spearman"] for row in own), 1, 3) if k < 128 else "",
            spread(row["oz"] for row in own),
        ]
        fisher = [
            row["spearman"]
            for row in rows
            if row["tangents"] == k and row["method"] == "fisher" and k < 128
        ]
        of += [spread(row["science"] for row in own), spread(fisher, 1, 3) if fisher else ""]
        lines.append([str(k), str(len(own)), *of])
    head = [
        "tangents",
        "seeds",
        "`regrad`: Spearman with 128",
        "AUROC, Oz",
        "AUROC, science",
        "`fisher`: Spearman",
    ]
    return f"{table(head, lines)}\n\n{rows[0]['n']} tokens." if rows else ""


def hybrid(rows: list[Row]) -> str:
    """The best mix and the best single score."""
    lines = [
        [
            str(r["seed"]),
            r["role"],
            r["method"],
            f"{100 * r['auroc']:.1f} [{100 * r['low']:.1f}, {100 * r['high']:.1f}]",
        ]
        for r in rows
    ]
    return table(
        ["seed", "best of the", "chosen on one half", "AUROC of wrong ones on the other half, %"],
        lines,
    )


def cost(rows: list[Row]) -> str:
    """In forward passes."""
    last = {row["texts"]: row for row in rows}  # the latest measurement of each
    lines = []
    for row in last.values():
        p = row["passes"]
        costs = [
            p["one by one"],
            p["entropy"],
            p["regrad 8"],
            p["regrad 16"],
            p["regrad 32"],
            p["all 16"],
            p["regrad+layers 16"],
        ]
        lines.append(
            [
                str(row["texts"]),
                f"{row['forward_ms']:.1f} ms",
                *map(str, costs),
                str(row["per_tangent"]),
            ]
        )
    scores = ["`entropy`", "`regrad`, k = 8", "16", "32", "four scores, 16", "`regrad+layers`, 16"]
    head = ["texts", "forward pass", "one by one", *scores]
    return table([*head, "each tangent"], lines)


def with_interval(of: Row) -> str:
    """AUROC with its interval, and AUPR."""
    area = f"{100 * of['auroc']:.1f} [{100 * of['auroc_low']:.1f}, {100 * of['auroc_high']:.1f}]"
    return f"{area} / {100 * of['aupr_out']:.1f}"


def spread(values: Iterable[float], unit: float = 100, digits: int = 1) -> str:
    """The mean, and how far seeds are from it (standard deviation)."""
    found = [unit * value for value in values]
    mean = f"{statistics.fmean(found):.{digits}f}"
    return f"{mean} ± {statistics.stdev(found):.{digits + 1}f}" if len(found) > 1 else mean
