"""Fills the tables and plots of docs/performance.md from the rows that `speed.py` and `ranking.py`
left.

    python benchmarks/speed_page.py

Nothing is measured here. Tables stand between `<!-- name -->` and `<!-- end -->`; the text around
them is by hand.
"""

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from pages import fill, table
from peers import CANNOT, PEERS

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "performance.md"
PLOTS = HERE.parent / "docs" / "plots"
Row = dict[str, Any]
FEW = "exact, tolerance 0.025"
COLORS = {"exact": "#0072B2", "sketch": "#D55E00", "the paper's loop": "#000000", "vmap(jacrev)": "#009E73",
           "BackPACK": "#CC79A7", FEW: "#56B4E9", "the loop in batches": "#999999"}  # fmt: skip


def rows(name: str) -> list[Row]:
    """What a benchmark left."""
    path = HERE / "results" / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def one(found: list[Row], **fields: Any) -> Row:
    """The row that has these fields."""
    return next(row for row in found if all(row[key] == value for key, value in fields.items()))


def aims(speed: list[Row], ranks: list[Row]) -> str:
    """Each aim, what was measured, and whether that is enough."""
    body: list[list[str]] = []

    def add(aim: str, value: float, met: bool, form: str = ".1f", note: str = "") -> None:
        body.append([aim, f"{value:{form}}{note}", "yes" if met else "**no**"])

    for network, least in (("MNIST CNN", 0.999), ("CIFAR-10 ResNet-20", 0.99), ("SVHN CNN", 0.99)):
        if not any(
            r["part"] == "smoothing" and r["network"] == network and r["way"] == "N = 8"
            for r in ranks
        ):
            body.append([f"{network}: smoothing with N = 8", "not measured: needs QUALMS_DATA", ""])
            continue
        row = one(ranks, part="smoothing", network=network, way="N = 8")
        add(f"{network}: rank correlation of N = 8 with N = 100 at least {least}", row["spearman"],
            row["spearman"] >= least, ".4f")  # fmt: skip
        off = abs(row["auroc"] - row["auroc_judge"])
        add(
            f"{network}: AUROC of N = 8 within 0.3 points of N = 100",
            off,
            off <= 0.3,
            ".2f",
            " points",
        )
    for network in ("MNIST CNN", "ResNet-18"):
        here = one(speed, part="draws", network=network, way="exact, N = 8")["passes"]
        loop = one(speed, part="draws", network=network, way="the paper's loop, N = 100")["passes"]
        add(f"{network}: REGrad* (exact, N = 8) 25 times faster than the paper's loop with N = 100, draw by draw",
            loop / here, loop / here >= 25, ".0f", " times")  # fmt: skip
        batches = one(speed, part="draws", network=network, way="the loop in batches, N = 100")[
            "passes"
        ]
        add(f"{network}: the same against a loop that runs an input's 101 copies as one batch", batches / here,
            batches / here >= 1, ".1f", " times")  # fmt: skip
    for network, classes, way, most in (
        ("ResNet-18", 10, "exact, second call", 35),
        ("MNIST CNN", 10, "exact, second call", 60),
        ("ResNet-18", 1000, "sketch, second call", 80),
    ):
        passes = one(speed, part="one image", network=network, classes=classes, way=way)["passes"]
        add(
            f"{network}, {classes} classes, one image, {way}: at most {most} forward passes",
            passes,
            passes <= most,
        )
    for part, network, classes in (
        ("few classes", "ResNet-56", 100),
        ("classes", "ResNet-18", 1000),
    ):
        passes = one(speed, part=part, network=network, classes=classes, way=FEW)["passes"]
        add(f"{network}, {classes} classes, {FEW}: at most 60 forward passes", passes, passes <= 60)
    for way, most in (("exact", 700), ("sketch", 120)):
        passes = one(speed, part="recurrent", way=way)["passes"]
        add(f"a character model with two LSTMs, 465 classes, {way}: at most {most} forward passes", passes,
            passes <= most, ".0f")  # fmt: skip
    few = [r for r in ranks if r["part"] == "tolerance" and r["way"] == FEW.removeprefix("exact, ")]
    for row in few:
        add(f"{row['network']}, {row['way']}: rank correlation with exact at least 0.999 (worst of 3 seeds)",
            row["worst"], row["worst"] >= 0.999, ".4f")  # fmt: skip
    if not few:
        body.append(
            ["CIFAR-100 ResNet-56: ranking by few classes", "not measured: needs QUALMS_DATA", ""]
        )
    for network, classes, most in (("ResNet-18", 10, 6), ("ResNet-18", 1000, 9)):
        passes = one(speed, part="heat", network=network, classes=classes, way="heat")["passes"]
        add(
            f"{network}, {classes} classes, heat: at most {most} forward passes",
            passes,
            passes <= most,
        )
    for row in (r for r in ranks if r["part"] == "heat"):
        add(f"{row['network']}: rank correlation of heat by 16 contrasts with all of them at least 0.97",
            row["spearman"], row["spearman"] >= 0.97, ".4f")  # fmt: skip
        off = abs(row["auroc"] - row["auroc_judge"])
        add(f"{row['network']}: AUROC of the same within 1 point", off, off <= 1, ".2f", " points")
    many = {
        way: one(speed, part="classes", classes=1000, way=way)["passes"]
        for way in ("exact", "sketch")
    }
    add("ResNet-18, 1000 classes: sketch 25 times faster than exact", many["exact"] / many["sketch"],
        many["exact"] / many["sketch"] >= 25, ".0f", " times")  # fmt: skip
    ten = one(speed, part="classes", classes=10, way="sketch")["passes"]
    add("sketch: 1000 classes cost what 10 cost (in forward passes)", many["sketch"] / ten,
        many["sketch"] / ten < 1.3, ".2f", " times")  # fmt: skip
    for network in ("CIFAR-10 ResNet-20", "CIFAR-100 ResNet-56"):
        if not any(r["part"] == "sketch" and r["network"] == network for r in ranks):
            body.append(
                [f"{network}: ranking of the sketch", "not measured: needs QUALMS_DATA", ""]
            )
            continue
        row = one(ranks, part="sketch", network=network, way="k = 16, quadrature")
        add(f"{network}: rank correlation of the default sketch with exact at least 0.99 (worst of 3 seeds)",
            row["worst"], row["worst"] >= 0.99, ".4f")  # fmt: skip
    words = one(speed, part="words", way="sketch")
    all_gradients = (
        words["inputs"] * words["classes"] * 3_943_000 * 4 / 2**20
    )  # MiB, with that many parameters
    add(f"30,000 words: a sketch of {words['inputs']} inputs in a thousandth of what all gradients would take",
        words["peak_mib"], words["peak_mib"] < all_gradients / 1000, ".0f",
        f" MiB, against {all_gradients / 2**20:.0f} TiB")  # fmt: skip
    return table(["aim", "measured", "met"], body)


def peers(speed: list[Row]) -> str:
    """Ways to the same numbers, or to comparable ones."""
    body = []
    for row in (r for r in speed if r["part"] == "peers"):
        exact = one(speed, part="peers", network=row["network"], way="exact")["passes"]
        note = "*" if (row["way"], row["network"]) in CANNOT else ""
        same = (
            "yes"
            if row["way"] not in PEERS or PEERS[row["way"]].same
            else f"no: {PEERS[row['way']].computes}"
        )
        body.append([row["network"], row["way"] + note, same, str(row["inputs"]), f"{row['passes']:.1f}",
                     f"{row['passes'] / exact:.2f}", f"{row['peak_mib']:.0f}"])  # fmt: skip
    header = [
        "network",
        "way",
        "same quantity",
        "inputs",
        "forward passes an input",
        "of exact",
        "peak MiB",
    ]
    faster = _faster(speed)
    reasons = [f"- {peer}, {network}: {reason}" for (peer, network), reason in CANNOT.items()]
    return "\n\n".join(
        (
            table(header, body),
            "Where another way to the same numbers is faster than `exact`: "
            + ("; ".join(faster) or "nowhere")
            + ".",
            "What a peer cannot do:",
            "\n".join(reasons),
        )
    )


def _faster(speed: list[Row]) -> list[str]:
    found = []
    for row in (r for r in speed if r["way"] in PEERS and PEERS[r["way"]].same):
        exact = one(speed, part=row["part"], network=row["network"], way="exact", **_size(row))[
            "passes"
        ]
        if row["passes"] < exact:
            found.append(
                f"{row['way']} on {row['network']}, {row['inputs']} inputs ({exact / row['passes']:.1f} times)"
            )
    return found


def _size(row: Row) -> Row:
    return {"inputs": row["inputs"]} if row["part"] == "batch" else {}


def growth(speed: list[Row]) -> str:
    """The rows behind the plots."""
    body = [
        [row["part"], row["network"], str(row["classes"]), row["way"], str(row["inputs"]), f"{row['passes']:.1f}",
         f"{row['peak_mib']:.0f}"]
        for row in speed if row["part"] != "peers"
    ]  # fmt: skip
    return table(
        ["part", "network", "classes", "way", "inputs", "forward passes an input", "peak MiB"], body
    )


def ranking(ranks: list[Row], part: str) -> str:
    """Rank correlation and AUROC on real inputs."""
    body = [
        [row["network"], row["way"], str(row["inputs"]), f"{row['spearman']:.4f}", f"{row['auroc']:.2f}",
         f"{row['auroc_judge']:.2f}"]
        for row in ranks if row["part"] == part
    ]  # fmt: skip
    return table(
        ["network", "way", "inputs", "Spearman", "AUROC %", "AUROC % of what it is compared with"],
        body,
    )


def plots(speed: list[Row]) -> None:
    """Growth in the batch, the classes, the depth and the draws."""
    PLOTS.mkdir(exist_ok=True)
    plt.rcParams.update({"svg.hashsalt": "qualms", "font.size": 10, "axes.spines.top": False,
                         "axes.spines.right": False})  # fmt: skip
    for part, key, label in (
        ("batch", "inputs", "inputs in the batch"),
        ("classes", "classes", "classes"),
    ):
        figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
        lines = dict.fromkeys((r["network"], r["way"]) for r in speed if r["part"] == part)
        for network, way in lines:
            points = [
                (r[key], r["passes"])
                for r in speed
                if (r["part"], r["network"], r["way"]) == (part, network, way)
            ]
            style = "-o" if network == "MNIST CNN" or part == "classes" else "--s"
            axes.plot(
                *zip(*points, strict=True), style, color=COLORS[way], label=f"{way}, {network}"
            )
        axes.set(xscale="log", yscale="log", xlabel=label, ylabel="forward passes an input")
        _save(figure, axes, part)
    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for way in ("exact", "sketch", "the paper's loop"):
        found = [r for r in speed if r["part"] == "depth" and r["way"] == way]
        axes.plot(
            [r["network"] for r in found],
            [r["passes"] for r in found],
            "-o",
            color=COLORS[way],
            label=way,
        )
    axes.set(yscale="log", ylabel="forward passes an input")
    _save(figure, axes, "depth")
    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for network, style in (("MNIST CNN", "-o"), ("ResNet-18", "--s")):
        found = [r for r in speed if (r["part"], r["network"]) == ("draws", network)]
        for way in ("exact", "sketch", "the paper's loop", "the loop in batches"):
            points = [
                (int(r["way"].split("= ")[1]), r["passes"])
                for r in found
                if r["way"].startswith(way)
            ]
            axes.plot(
                *zip(*points, strict=True), style, color=COLORS[way], label=f"{way}, {network}"
            )
    axes.set(
        xscale="log", yscale="log", xlabel="perturbed inputs N", ylabel="forward passes an input"
    )
    _save(figure, axes, "draws")


def _save(figure: Any, axes: Any, name: str) -> None:
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(PLOTS / f"{name}.svg", metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    """Write the page."""
    speed, ranks = rows("speed"), rows("ranking")
    parts = {
        "aims": aims(speed, ranks),
        "peers": peers(speed),
        "growth": growth(speed),
        "smoothing": ranking(ranks, "smoothing"),
        "sketch": ranking(ranks, "sketch"),
        "tolerance": ranking(ranks, "tolerance"),
    }
    fill(PAGE, parts)
    plots(speed)


if __name__ == "__main__":
    main()
