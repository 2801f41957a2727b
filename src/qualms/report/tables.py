"""Rows of the tasks as tables to read, the paper's number beside ours."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from qualms.errors import QualmsError
from qualms.methods.registry import parse
from qualms.report.content import Content
from qualms.report.numbers import at_a_glance
from qualms.tasks.paper import ACTIVE, OOD, RAULC, RUNTIME, SWEEPS, VIT, paper_methods, paper_row
from qualms.tasks.rows import CalibrationRow, CycleRow, OodRow, Row

Line = Sequence[str]


def markdown(head: Line, lines: Iterable[Line]) -> str:
    """An aligned table."""
    cells = [list(head), *[list(line) for line in lines]]
    widths = [max(3, *(len(line[i]) for line in cells)) for i in range(len(head))]
    text = [
        "| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |"
        for line in cells
    ]
    rule = "|" + "|".join("-" * (w + 2) for w in widths) + "|"
    return "\n".join([text[0], rule, *text[1:]])


def ood_table(rows: Iterable[Row], paper: str = "table1") -> str:
    """For each pair of datasets: AUROC with its interval (or the spread over seeds), AUPR both
    ways, FPR95; percent.
    """
    found = [row for row in rows if row["row"] == "ood"]
    parts = []
    for pair in dict.fromkeys((row["in"], row["out"]) for row in found):
        of_pair = [row for row in found if (row["in"], row["out"]) == pair]
        theirs = _paper_ood("→".join(pair), paper)
        lines = []
        for name in dict.fromkeys(row["method"] for row in of_pair):
            of_method = [row for row in of_pair if row["method"] == name]
            rest = [
                _percent(row["aupr_out"] for row in of_method),
                _percent(row["aupr_in"] for row in of_method),
                _percent(row["fpr95"] for row in of_method),
            ]
            paper_number = _beside(
                name, pair[0], {k: f"{a:.2f}/{b:.2f}" for k, (a, b) in theirs.items()}
            )
            lines.append([name, _auroc(of_method), *rest, paper_number])
        n_in, n_out = of_pair[0]["n_in"], of_pair[0]["n_out"]
        title = f"{pair[0]} → {pair[1]}: {n_in} and {n_out} images, %"
        head = ["method", "AUROC", "AUPR", "AUPR, in as positive", "FPR95", "paper's AUROC/AUPR"]
        parts.append(f"{title}\n\n{markdown(head, lines)}")
    return "\n\n".join(parts)


def calibration_table(rows: Iterable[Row]) -> str:
    """rAULC with its interval (or the spread over seeds), and the error rate among the most
    certain.
    """
    found = [row for row in rows if row["row"] == "calibration"]
    parts = []
    for data in dict.fromkeys(row["in"] for row in found):
        of_data = [row for row in found if row["in"] == data]
        lines = []
        for name in dict.fromkeys(row["method"] for row in of_data):
            of_method = [row for row in of_data if row["method"] == name]
            theirs = {row: f"{number:.3f}" for row, number in RAULC.get(data, {}).items()}
            risks = [
                _percent(row["risk_at_95"] for row in of_method),
                _percent(row["risk_at_90"] for row in of_method),
                _percent(row["risk_at_80"] for row in of_method),
            ]
            lines.append([name, _raulc(of_method), *risks, _beside(name, data, theirs)])
        n, share = of_data[0]["n"], _percent(row["accuracy"] for row in of_data)
        head = ["method", "rAULC", "error at coverage 95 %, %", "90 %", "80 %", "paper's rAULC"]
        parts.append(f"{data}: {n} images, {share} % right\n\n{markdown(head, lines)}")
    return "\n\n".join(parts)


def active_table(rows: Iterable[Row]) -> str:
    """Accuracy and negative log-likelihood, means over cycles and seeds (the start is not among the
    cycles).

    With several seeds, the standard deviation of their means over cycles stands behind each mean.
    """
    found = [row for row in rows if row["row"] == "cycle"]
    parts = []
    for data in dict.fromkeys(row["data"] for row in found):
        of_data = [row for row in found if row["data"] == data]
        lines = []
        for name in dict.fromkeys(row["method"] for row in of_data):
            of_method = [row for row in of_data if row["method"] == name]
            theirs = {row: f"{a:.2f}/{b:.3f}" for row, (a, b) in ACTIVE.get(data, {}).items()}
            labels = (
                f"{min(r['labeled'] for r in of_method)} to {max(r['labeled'] for r in of_method)}"
            )
            numbers = [
                _by_seed(of_method, lambda row: 100 * row["accuracy"], 2),
                _by_seed(of_method, lambda row: row["nll"], 3),
                _by_seed(of_method, lambda row: row["nll_softmax_twice"], 3),
            ]
            lines.append([name, labels, *numbers, _beside(name, data, theirs)])
        head = ["method", "labels", "accuracy, %", "NLL", "NLL, softmax twice", "paper's ACC/NLL"]
        parts.append(f"{data}\n\n{markdown(head, lines)}")
    return "\n\n".join(parts)


def runtime_table(rows: Iterable[Row]) -> str:
    """Time in units of Entropy's."""
    found = [row for row in rows if row["row"] == "runtime"]
    theirs = {row: f"{seconds / RUNTIME['Entropy']:.1f}" for row, seconds in RUNTIME.items()}
    lines = [
        [
            r["method"],
            f"{r['ratio']:.1f}",
            f"{r['seconds']:.2f}",
            _beside(r["method"], "cifar10", theirs),
        ]
        for r in found
    ]
    head = ["method", "time, Entropy = 1", "seconds", "paper's, Entropy = 1 (ResNet-18, CIFAR-10)"]
    return f"{found[0]['n']} images\n\n{markdown(head, lines)}" if found else ""


def paper_table(name: str, rows: Sequence[Row]) -> str:
    """A table that `qualms reproduce` makes, by its name there."""
    kind = {"table2": calibration_table, "table3": active_table, "runtime": runtime_table}.get(name)
    return kind(rows) if kind else ood_table(rows, "vit" if name == "vit" else "table1")


def glance_table(content: Content, resamples: int = 1000) -> str:
    """Every method of a report: AUROC/AUPR of each unknown group in percent, rAULC, and cost in
    forward passes.
    """
    head = [
        "method",
        *(f"{group.name}, AUROC/AUPR" for group in content.unknown),
        "rAULC",
        "forward passes",
    ]
    lines = []
    for judged in at_a_glance(content, resamples):
        pairs = [
            f"{100 * a.value:.1f}/{100 * p:.1f}"
            for a, p in zip(judged.auroc, judged.aupr, strict=True)
        ]
        cost = (
            f"{judged.cost:.1f}"
            if isinstance(judged.cost, (int, float))
            else str(judged.cost or "")
        )
        lines.append(
            [
                judged.method,
                *pairs,
                "" if judged.raulc is None else f"{judged.raulc.value:.3f}",
                cost,
            ]
        )
    return markdown(head, lines)


def list_networks(rows: Iterable[Row]) -> str:
    """How good the networks are."""
    found = [row for row in rows if row["row"] == "accuracy"]
    lines = [
        f"- {r['network']}: {100 * r['accuracy']:.2f} % of {r['n']} {r['data']} test images right"
        for r in found
    ]
    return "Networks:\n\n" + "\n".join(dict.fromkeys(lines)) if lines else ""


def list_left_out(rows: Iterable[Row]) -> str:
    """What could not be computed, and why: once for each reason."""
    lines = [
        f"- {row.get('method') or row.get('out')}: {row['why']}"
        for row in rows
        if row["row"] == "left out"
    ]
    return "Left out:\n\n" + "\n".join(dict.fromkeys(lines)) if lines else ""


def _beside(name: str, dataset: str, theirs: dict[str, str]) -> str:
    """The paper's number for a method; if a user named it by a spec, with a word where the paper
    has other settings.
    """
    if name in theirs:
        return theirs[name]
    try:
        method = parse(name)
    except QualmsError:
        return ""
    row = paper_row(method)
    if row not in theirs:
        return ""
    return (
        theirs[row] if paper_methods(dataset)[row] == method else f"{theirs[row]}, other settings"
    )


def _paper_ood(pair: str, table: str) -> dict[str, Any]:
    if table == "vit":
        return VIT.get(pair, {})
    return {**OOD.get(pair, {}), **SWEEPS.get(pair, {})}


def _percent(shares: Iterable[float]) -> str:
    """The mean of the shares, in percent with two decimals."""
    return f"{100 * statistics.fmean(shares):.2f}"


def _auroc(rows: Sequence[OodRow]) -> str:
    if len(rows) == 1:
        return f"{100 * rows[0]['auroc']:.2f} [{100 * rows[0]['auroc_low']:.1f}, {100 * rows[0]['auroc_high']:.1f}]"
    areas = [row["auroc"] for row in rows]
    return f"{_percent(areas)} ± {100 * statistics.stdev(areas):.2f}"


def _by_seed(rows: Sequence[CycleRow], number: Callable[[CycleRow], float], digits: int) -> str:
    """The mean of the seeds' means, and their standard deviation."""
    seeds = dict.fromkeys(row["seed"] for row in rows)
    means = [statistics.fmean(number(row) for row in rows if row["seed"] == seed) for seed in seeds]
    spread = f" ± {statistics.stdev(means):.{digits}f}" if len(means) > 1 else ""
    return f"{statistics.fmean(means):.{digits}f}{spread}"


def _raulc(rows: Sequence[CalibrationRow]) -> str:
    there = [(value, row) for row in rows if (value := row["raulc"]) is not None]
    if not there:
        return "none"
    if len(there) == 1:
        value, row = there[0]
        return f"{value:.3f} [{row['raulc_low']:.3f}, {row['raulc_high']:.3f}]"
    values = [value for value, _ in there]
    return f"{statistics.fmean(values):.3f} ± {statistics.stdev(values):.3f}"
