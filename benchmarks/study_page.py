"""The tables of docs/heat.md, from the rows of `study.py`."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pages
from pages import table

PAGE = Path(__file__).parent.parent / "docs" / "heat.md"
BEHIND_A_NORM = ("MNIST ViT", "SVHN ViT", "Text transformer")
WITH_DATA = ("knn", "vim", "mahalanobis", "react", "fdbd", "quam")
Row = dict[str, Any]


def fill(scores: list[Row], smoothing: list[Row], growth: list[Row]) -> None:
    """Write the tables."""
    free = [row for row in scores if row["network"] not in BEHIND_A_NORM]
    normed = [row for row in scores if row["network"] in BEHIND_A_NORM]
    parts = {
        "free": summary(free),
        "against": against(free),
        "free by network": by_network(free),
        "normed": summary(normed),
        "normed by network": by_network(normed),
        "smoothing": noise(smoothing),
        "networks": networks(scores, growth),
    }
    pages.fill(PAGE, parts)


def summary(rows: list[Row]) -> str:
    """A line for each method that runs on all of the networks, best AUROC first, then those that do
    not.
    """
    every = networks_of(rows)
    lines = []
    for method in dict.fromkeys(row["method"] for row in rows):
        own = [row for row in rows if row["method"] == method and "pairs" in row]
        pairs = [pair for row in own for pair in row["pairs"].values()]
        if not pairs:
            continue
        won = sum(
            leads(method, row["network"], other, rows) for row in own for other in row["pairs"]
        )
        whole = len(own) == len(every)
        cells = [f"`{method}`" if whole else f"`{method}` ({len(own)} of {len(every)} networks)"]
        cells += [
            both(p for p in pairs if side in (None, p["side"])) for side in (None, "near", "far")
        ]
        cells += [f"{100 * mean(row['raulc'] for row in own):.1f}", f"{won} of {len(pairs)}"]
        lines.append((not whole, -mean(pair["auroc"] for pair in pairs), cells))
    header = ["score", "AUROC/AUPR", "near", "far", "rAULC", "best of all"]
    return table(header, [cells for *_, cells in sorted(lines)])


def leads(method: str, network: str, other: str, rows: list[Row]) -> bool:
    """Whether a method has the highest AUROC of all on one pair."""
    found = {
        r["method"]: r["pairs"][other]["auroc"]
        for r in rows
        if r["network"] == network and "pairs" in r
    }
    return found[method] == max(found.values())


def against(rows: list[Row], ours: str = "heat") -> str:
    """By how much our score is ahead of each other one that needs no data, with intervals over
    networks.
    """
    whole = {
        (r["network"], other): p["auroc"]
        for r in rows
        if r["method"] == ours
        for other, p in r["pairs"].items()
    }
    every, lines = networks_of(rows), []
    for method in dict.fromkeys(
        row["method"] for row in rows if row["method"] not in (ours, *WITH_DATA)
    ):
        own = {row["network"]: row for row in rows if row["method"] == method and "pairs" in row}
        ahead = [
            [100 * (whole[n, o] - p["auroc"]) for o, p in own[n]["pairs"].items()]
            for n in every
            if n in own
        ]
        low, high = over_networks(ahead)
        pairs = [difference for some in ahead for difference in some]
        cells = [f"`{method}`", f"{mean(pairs):+.1f} [{low:+.1f}, {high:+.1f}]"]
        lines.append(
            [*cells, f"{sum(d > 0 for d in pairs)} of {len(pairs)}", f"{len(own)} of {len(every)}"]
        )
    return table(
        [f"`{ours}` against", "AUROC, mean of pairs [95 %]", "pairs it wins", "networks"], lines
    )


def over_networks(groups: list[list[float]], resamples: int = 10_000) -> tuple[float, float]:
    """A 95 % interval of the mean over all pairs, if other networks had been drawn: pairs of one
    are alike.
    """
    sums, counts = (np.array([f(group) for group in groups], dtype=float) for f in (sum, len))
    drawn = np.random.default_rng(0).integers(len(groups), size=(resamples, len(groups)))
    low, high = np.percentile(sums[drawn].sum(1) / counts[drawn].sum(1), [2.5, 97.5])
    return float(low), float(high)


def by_network(rows: list[Row]) -> str:
    """Mean AUROC over the pairs of each network."""
    columns = networks_of(rows)
    body = []
    for method in dict.fromkeys(row["method"] for row in rows):
        of = {row["network"]: row for row in rows if row["method"] == method}
        cells = [
            f"{100 * mean(p['auroc'] for p in of[c]['pairs'].values()):.1f}"
            if "pairs" in of.get(c, {})
            else "-"
            for c in columns
        ]
        body.append([f"`{method}`", *cells])
    return table(["score", *columns], body)


def noise(rows: list[Row]) -> str:
    """Levels of noise: AUROC, rAULC, and how far the noise moves predictions."""
    body = []
    for row in (r for r in rows if "pairs" in r):
        kl = [f"{row[key]:.3f}" if key in row else "" for key in ("kl_own", "kl_noise")]
        ranks = f"{100 * mean(p['auroc'] for p in row['pairs'].values()):.1f}"
        body.append(
            [
                row["network"],
                f"`{row['method']}`",
                str(row["n"]),
                ranks,
                f"{100 * row['raulc']:.1f}",
                *kl,
            ]
        )
    return table(
        ["network", "score", "inputs a side", "AUROC", "rAULC", "KL, own inputs", "KL, noise"], body
    )


def networks(rows: list[Row], growth: list[Row]) -> str:
    """What each network gets right, what it is tried on, and what the rule for normalizations sees."""
    body = []
    for name in networks_of(rows):
        row = next(r for r in rows if r["network"] == name and "pairs" in r)
        sides = {
            side: [o for o, p in row["pairs"].items() if p["side"] == side]
            for side in ("near", "far")
        }
        least = min(p["n"] for p in row["pairs"].values())
        cells = [
            name,
            f"{100 * row['accuracy']:.1f}",
            *(", ".join(found) for found in sides.values()),
        ]
        cells += [str(row["n"]) if least == row["n"] else f"{row['n']}, {least} of the smallest"]
        body.append(
            [
                *cells,
                *(
                    f"{r['growth']:.2f} | {100 * r['spread']:.0f}"
                    for r in growth
                    if r["network"] == name
                ),
            ]
        )
    return table(
        ["network", "% right", "near", "far", "inputs a side", "growth of ‖h‖", "its spread, %"],
        body,
    )


def networks_of(rows: list[Row]) -> list[str]:
    """In their order."""
    return list(dict.fromkeys(row["network"] for row in rows if "pairs" in row))


def both(pairs: Iterable[Row]) -> str:
    """Mean AUROC and AUPR of some pairs."""
    found = list(pairs)
    return (
        "/".join(f"{100 * mean(p[key] for p in found):.1f}" for key in ("auroc", "aupr"))
        if found
        else "-"
    )


def mean(values: Iterable[float]) -> float:
    """Of numbers."""
    found = list(values)
    return sum(found) / len(found)
