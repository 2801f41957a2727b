"""docs/results.md and the README's table of scores, from the rows that the benchmarks left. Nothing
is measured here.

    python benchmarks/results_page.py        (or `make results`)

`paper_tables.py` leaves the rows of the paper's tables, `epistemic.py` and `ungrad.py` those of the
last two sections, `costs.py` the README's costs for 1000 classes.
Tables are between `<!-- name -->` and `<!-- end -->`; the text around them is written by hand.
"""

import json
import math
import statistics
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from evidence import PAPERS, Ranked, by_pair, needs_data, ranking
from pages import fill, table
from paper_tables import datasets

from qualms.report.tables import list_left_out, list_networks, paper_table
from qualms.tasks.paper_numbers import OOD, RAULC
from qualms.tasks.paper_tables import TABLES
from qualms.tasks.presets import CPU

HERE = Path(__file__).parent
RESULTS = HERE / "results"
DOCS = HERE.parent / "docs"
README = HERE.parent / "README.md"
TITLES = {
    "table1": "Out-of-distribution detection (table 1)",
    "table2": "Calibration (table 2)",
    "table3": "Active learning (table 3)",
    "table4": "The parts of REGrad\\* (table 4)",
    "table5": "λ and σ (table 5)",
    "runtime": "What each method costs (table 9)",
    "vit": "A vision transformer (table 10)",
}
NAMES = {"mnist": "MNIST", "cifar10": "CIFAR-10", "svhn": "SVHN", "cifar100": "CIFAR-100"}
# The scores of the README's table: the tables' names, the specs, and when to pick them.
PICKS = {
    "REGrad*": ("regrad+layers+smooth", "you want the paper's method: the default"),
    "REGrad": (
        "regrad",
        "the default is too slow and classes are few; the same without smoothing and layer weights",
    ),
    "heat": ("heat", "you have a convolutional network and a few forward passes"),
    "coherence": ("coherence", "as above, for a second opinion"),
    "Entropy": ("entropy", "one forward pass is all you can afford"),
    "gen": ("gen", "as above; also for transformers"),
    "energy": ("energy", "as above; worse at flagging mistakes"),
    "Perturb x": ("perturb-x", "you want a score without gradients, and can afford many passes"),
    "knn": ("knn", "you have training data; worse at flagging mistakes"),
    "LA": ("laplace", "you have training data and want the paper's row"),
}
MANY_CLASSES = "imagenet-efficientnet-lite0"  # whose costs are listed with those of a ResNet-18
LOWEST = 0.7  # AUROC that the picture shows
STEP = 1.03  # between neighbors of one forward pass
COSTS = (2, 10, 60, math.inf)  # the most that a group of them has
COLORS = {
    "the paper's": "#0072B2",
    "ours": "#D55E00",
    "others": "#555555",
    "sees training data": "#009E73",
}
OURS = ("heat", "coherence", "fisher", "isotropic")
Row = dict[str, Any]


def rows_of(name: str) -> list[Row]:
    """What a benchmark left."""
    path = RESULTS / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def rows_of_table(name: str) -> list[Row]:
    """All datasets of one of the paper's tables."""
    return [row for dataset in datasets(name) for row in rows_of(f"tables/{name}-{dataset}")]


def section(name: str, rows: list[Any]) -> str:
    """A table of the page, what its networks are and what is left out."""
    missing = [NAMES[d] for d in datasets(name) if not rows_of(f"tables/{name}-{d}")]
    parts = [
        f"## {TITLES[name]}",
        f"`python benchmarks/paper_tables.py {name}`",
        paper_table(name, rows),
        list_networks(rows),
        list_left_out(rows),
    ]
    parts += [f"Not run yet: {', '.join(missing)}."] if missing else []
    return "\n\n".join(part for part in parts if part)


def ranking_table(ranked: list[Ranked], others: list[str], pairs: list[str]) -> str:
    """Every method over all pairs."""
    body = []
    for r in ranked:
        best = [_share(r.best), "" if r.best_without_data is None else _share(r.best_without_data)]
        mean, low, high = (100 * value for value in r.ahead)
        ahead = f"{mean:+.1f} [{low:+.1f}, {high:+.1f}]" if r.method != "Entropy" else ""
        area = f"{100 * r.auroc:.1f} [{100 * r.low:.1f}, {100 * r.high:.1f}]"
        lift, cost = (
            ("" if r.raulc is None else f"{r.raulc:.3f}"),
            ("" if r.cost is None else f"{r.cost:.1f}"),
        )
        name = f"{_name(r.method)}{' †' if needs_data(r.method) else ''}"
        body.append([name, area, ahead, f"{100 * r.aupr:.1f}", *best, lift, cost])
    head = ["method", "AUROC, mean of pairs [95 %]", "ahead of Entropy [95 %]", "AUPR"]
    head += ["among the best 3", "of those without data", "rAULC", "cost"]
    note = f"Over {len(pairs)} pairs: {', '.join(pairs)}. † sees training data."
    if others:
        note += f" Not measured on all of them, and so not listed: {', '.join(others)}."
    return f"{table(head, body)}\n\n{note}"


def readme_table(ranked: list[Ranked], ood: list[Row], many_classes: dict[str, str]) -> str:
    """The scores that users choose between: AUROC by the dataset that the network knows, and what
    they cost.

    Args:
        ranked: the methods, with what they cost for 10 classes.
        ood: the rows of table 1.
        many_classes: what they cost for 1000 classes, by spec.
    """
    areas, known = (
        by_pair(ood, "auroc"),
        list(dict.fromkeys(row["in"] for row in ood if row["row"] == "ood")),
    )
    every = {r.method: r for r in ranked}
    cells: dict[str, list[float]] = {}
    for method in PICKS:
        own = [
            [a for pair, a in areas[method].items() if pair.startswith(f"{data} →")]
            for data in known
        ]
        cells[method] = [round(100 * statistics.fmean(found), 1) for found in own] + [
            round(100 * every[method].auroc, 1)
        ]
    best = [max(column) for column in zip(*cells.values(), strict=True)]
    body = []
    for method, (spec, when) in PICKS.items():
        values = [
            f"**{v:.1f}**" if v == top else f"{v:.1f}"
            for v, top in zip(cells[method], best, strict=True)
        ]
        cost = every[method].cost
        costs = ["" if cost is None else f"{cost:.0f}", many_classes.get(spec, "")]
        body.append([f"`{spec}`", *values, *costs, when])
    head = [
        "score",
        *(NAMES[d] for d in known),
        "mean of pairs",
        "cost, 10 classes",
        "cost, 1000 classes",
    ]
    return table([*head, "pick it when"], body)


def thousand_class_costs() -> dict[str, str]:
    """Forward passes an image on EfficientNet-Lite0 by spec: measured, or else as counted."""
    found = {}
    for row in rows_of("costs"):
        passes = row.get("passes", row.get("counted"))
        if row["network"] == MANY_CLASSES and passes is not None:
            found[row["method"]] = f"{passes:.0f}"
    return found


def epistemic_table(rows: list[Row]) -> str:
    """Every score and the three checks, means over seeds."""
    body = []
    for method in dict.fromkeys(row["method"] for row in rows):

        def mean(key: str, scale: float = 100, form: str = ".0f", method: str = method) -> str:
            values = [
                row[key] for row in rows if row["method"] == method and row.get(key) is not None
            ]
            return f"{scale * statistics.fmean(values):{form}}" if values else ""

        numbers = [mean("falls_with_size"), mean("rises_with_noise"), mean("rank", 1, ".2f")]
        numbers += [mean("partial", 1, ".2f"), mean("partial_to_noise", 1, ".2f")]
        numbers += [
            mean("unknown_over_ambiguous"),
            mean("ambiguous_over_clear"),
            mean("unknown_over_clear"),
        ]
        body.append([_name(method), *numbers])
    head = [
        "score",
        "falls with more data, %",
        "rises with label noise, %",
        "rank correlation with the ensemble",
    ]
    head += [
        "given its entropy",
        "given theirs",
        "unknown above ambiguous, %",
        "ambiguous above clear, %",
    ]
    head += ["unknown above clear, %"]
    return table(head, body) if rows else "Not run yet."


def ungrad_table(rows: list[Row]) -> str:
    """Each variant of UNGrad on each network: AUROC of both other datasets and rAULC, the paper's
    row first.
    """
    networks_of = {
        name: [row for row in rows if row["network"] == name]
        for name in dict.fromkeys(r["network"] for r in rows)
    }
    first, body = ["the paper's UNGrad"], []
    for own in networks_of.values():
        pairs = [OOD.get(f"{row['in']}→{row['out']}", {}).get("UNGrad") for row in own]
        areas = ["-" if pair is None else f"{pair[0]:.0f}" for pair in pairs]
        first.append(" / ".join([*areas, f"{RAULC[own[0]['in']]['UNGrad']:.2f}"]))
    for variant in rows[0]["auroc"] if rows else []:
        cells = [variant]
        for own in networks_of.values():
            areas = [f"{100 * row['auroc'][variant]:.0f}" for row in own]
            lift = (
                "-" if variant == "L1 norm" else f"{own[0]['raulc'][variant]:.2f}"
            )  # two mistakes among its images
            cells.append(" / ".join([*areas, lift]))
        body.append(cells)
    head = [
        f"{name}: {' / '.join([*(row['out'] for row in own), 'rAULC'])}"
        for name, own in networks_of.items()
    ]
    return table(["variant", *head], [first, *body]) if rows else "Not run yet."


def picture(ranked: list[Ranked]) -> None:
    """A dot for each method: mean AUROC against cost in forward passes, with intervals over pairs.

    Names are in a column next to methods of similar cost. Those of one forward pass are drawn side by
    side.
    """
    drawn = [r for r in ranked if r.cost is not None and r.auroc > LOWEST]
    plt.rcParams.update(
        {"svg.hashsalt": "qualms", "axes.spines.top": False, "axes.spines.right": False}
    )
    figure, axes = plt.subplots(figsize=(10, 6.5), layout="constrained")
    groups: dict[int, list[Ranked]] = {}
    for r in drawn:
        groups.setdefault(
            next(i for i, most in enumerate(COSTS) if float(r.cost or 0) <= most), []
        ).append(r)
    for group in groups.values():
        costs = [max(1.0, float(r.cost or 0)) for r in group]
        places = [STEP**i for i in range(len(group))] if max(costs) < COSTS[0] else costs
        names = 1.09 * max(places)
        for r, x, at in zip(
            group, places, spaced([100 * r.auroc for r in group], 1.05), strict=True
        ):
            y, color = 100 * r.auroc, COLORS[_kind(r.method)]
            bars = [[100 * (r.auroc - r.low)], [100 * (r.high - r.auroc)]]
            axes.errorbar(
                x, y, yerr=bars, fmt="o", color=color, markersize=5, elinewidth=0.5, alpha=0.85
            )
            axes.plot([x, names], [y, at], color=color, linewidth=0.3, alpha=0.6)
            axes.annotate(f" {r.method}", (names, at), va="center", fontsize=8, color=color)
    for kind, color in COLORS.items():
        axes.plot([], [], "o", color=color, label=kind)
    axes.set(
        xscale="log",
        xlim=(0.9, 500),
        xlabel="cost in forward passes",
        ylabel="mean AUROC over pairs of datasets, %",
    )
    axes.set_ylim(100 * LOWEST, 100)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    below = ", ".join(
        f"{r.method} {100 * r.auroc:.1f}"
        for r in ranked
        if r.cost is not None and r.auroc <= LOWEST
    )
    axes.set_title(f"below {100 * LOWEST:.0f} %: {below}" if below else "", fontsize=8, loc="left")
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(DOCS / "plots" / "scores.svg", metadata={"Date": None})
    plt.close(figure)


def spaced(values: list[float], gap: float) -> list[float]:
    """Falling values, moved apart where they are closer than a gap, around the same mean."""
    found: list[float] = []
    for value in values:
        found.append(min(value, found[-1] - gap) if found else value)
    return [value + statistics.fmean(values) - statistics.fmean(found) for value in found]


def _kind(method: str) -> str:
    if method in OURS:
        return "ours"
    return (
        "sees training data"
        if needs_data(method)
        else "the paper's"
        if method in PAPERS
        else "others"
    )


def _name(method: str) -> str:
    return method.replace("*", "\\*") if method in PAPERS else f"`{method}`"


def _share(value: float) -> str:
    return f"{100 * value:.0f} %"


def fill_readme() -> None:
    """Write the README's table."""
    ood = rows_of_table("table1")
    ranked, _ = ranking(ood, rows_of_table("table2"), rows_of_table("runtime"))
    fill(README, {"scores": readme_table(ranked, ood, thousand_class_costs())})


def main() -> None:
    """Write page, picture and the README's table."""
    found = {name: rows_of_table(name) for name in TABLES}
    ood = found["table1"]
    ranked, others = ranking(ood, found["table2"], found["runtime"])
    pairs = list(dict.fromkeys(f"{row['in']} → {row['out']}" for row in ood if row["row"] == "ood"))
    cuts = f"Preset `{CPU.name}`, with these differences from the paper: {CPU.cuts}.".replace(
        "*", "\\*"
    )
    sections = [section(name, rows) for name, rows in found.items() if rows]
    parts = {
        "ranking": ranking_table(ranked, others, pairs),
        "tables": "\n\n".join([cuts, *sections]),
        "epistemic": epistemic_table(rows_of("epistemic")),
        "ungrad": ungrad_table(rows_of("ungrad")),
    }
    fill(DOCS / "results.md", parts)
    fill_readme()
    if found["runtime"]:
        picture(ranked)


if __name__ == "__main__":
    main()
