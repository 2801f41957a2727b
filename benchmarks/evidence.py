"""What the rows of the paper's tables say together: means over pairs of datasets, and which methods
are among the best.

A pair is a dataset that a network knows and another one; its numbers are means over the networks'
seeds. Intervals and probabilities are over pairs, drawn with replacement: what would other pairs
have said? Pairs of one network are alike, so they are rather too narrow.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from qualms.methods.method import TRAINING_DATA
from qualms.methods.registry import BY_NAME
from qualms.tasks.paper_numbers import paper_methods

RESAMPLES = 10_000
BEST = 3
UNIT = "Entropy"  # what the others are compared with; the first method where it is missing
Row = dict[str, Any]
PAPERS = paper_methods("mnist")


def needs_data(method: str) -> bool:
    """Whether a method of the tables, by its name there, sees training data."""
    return TRAINING_DATA in (PAPERS[method].needs if method in PAPERS else BY_NAME[method].needs)


@dataclass(frozen=True)
class Ranked:
    """A method over all pairs: means, intervals, and the chances of being among the best three."""

    method: str
    auroc: float
    low: float
    high: float
    ahead: tuple[
        float, float, float
    ]  # of the entropy on the same pairs: the mean difference and its interval
    aupr: float
    best: float  # the probability of being among the best three of all methods
    best_without_data: float | None  # of those that see no training data; None for those that do
    raulc: float | None
    cost: float | None  # in forward passes


def by_pair(rows: Sequence[Row], key: str) -> dict[str, dict[str, float]]:
    """{method: {pair: mean over seeds}} of a measure of OOD rows."""
    found: dict[str, dict[str, list[float]]] = {}
    for row in (row for row in rows if row["row"] == "ood"):
        found.setdefault(row["method"], {}).setdefault(f"{row['in']} → {row['out']}", []).append(
            row[key]
        )
    return {
        method: {pair: float(np.mean(v)) for pair, v in pairs.items()}
        for method, pairs in found.items()
    }


def ranking(
    ood: Sequence[Row], calibration: Sequence[Row], runtime: Sequence[Row]
) -> tuple[list[Ranked], list[str]]:
    """Every method that was measured on all pairs, the best mean first; and the names of the
    others.
    """
    areas, precisions = by_pair(ood, "auroc"), by_pair(ood, "aupr_out")
    pairs = list(dict.fromkeys(pair for found in areas.values() for pair in found))
    methods = [method for method, found in areas.items() if len(found) == len(pairs)]
    table = np.array([[areas[method][pair] for pair in pairs] for method in methods])
    drawn = np.random.default_rng(0).integers(len(pairs), size=(RESAMPLES, len(pairs)))
    means = table[:, drawn].mean(2)  # [methods, resamples]
    without = np.array([not needs_data(method) for method in methods])
    chances, among_those = among_best(means), among_best(means[without])
    limited = dict(zip(np.array(methods)[without].tolist(), among_those.tolist(), strict=True))
    low, high = np.percentile(means, [2.5, 97.5], axis=1)
    judge = methods.index(UNIT) if UNIT in methods else 0
    ahead = np.stack(
        [(table - table[judge]).mean(1), *np.percentile(means - means[judge], [2.5, 97.5], axis=1)]
    )
    lifts, costs = (
        _mean_lift(calibration),
        {r["method"]: r["ratio"] for r in runtime if r["row"] == "runtime"},
    )
    found = [
        Ranked(
            method,
            float(table[i].mean()),
            float(low[i]),
            float(high[i]),
            (float(ahead[0, i]), float(ahead[1, i]), float(ahead[2, i])),
            float(np.mean([precisions[method][pair] for pair in pairs])),
            float(chances[i]),
            limited.get(method),
            lifts.get(method),
            costs.get(method),
        )
        for i, method in enumerate(methods)
    ]
    return sorted(found, key=lambda r: -r.auroc), [
        method for method in areas if method not in methods
    ]


def among_best(means: np.ndarray) -> np.ndarray:
    """For each method (row), the share of resamples (columns) in which fewer than three methods are
    above it.
    """
    above = np.array([(means > own).sum(0) for own in means])
    return (above < BEST).mean(1)


def _mean_lift(rows: Sequence[Row]) -> dict[str, float]:
    """Mean rAULC over datasets, each a mean over seeds, of the methods that have one everywhere."""
    found: dict[str, dict[str, list[float]]] = {}
    for row in (row for row in rows if row["row"] == "calibration" and row["raulc"] is not None):
        found.setdefault(row["method"], {}).setdefault(row["in"], []).append(row["raulc"])
    datasets = {data for lifts in found.values() for data in lifts}
    return {
        method: float(np.mean([np.mean(values) for values in lifts.values()]))
        for method, lifts in found.items()
        if set(lifts) == datasets
    }
