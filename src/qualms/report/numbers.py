"""A report's content in, the numbers that it shows out. Measures are those of `qualms.metrics`."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from jaxtyping import Float

from qualms.errors import QualmsError
from qualms.metrics import aupr, auroc, interval, raulc
from qualms.report.content import Content, LayerContributions
from qualms.tasks.rows import CycleRow, Row

BINS = 41  # an odd number: equal scores stand in the middle of one
POINTS = 300  # of a curve that is drawn
WIDE = 30  # a score whose middle 90 % span this factor is drawn on a logarithmic axis
DECADES = 1e-6  # and over no more than this part of the largest score
COLUMNS = 120  # inputs of a group that the map of layers draws
LearningMeasure = Literal["accuracy", "nll"]  # what active learning is followed by


@dataclass(frozen=True)
class WithInterval:
    """A measure, and its 95 % interval over the choice of inputs."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Judged:
    """One method: a number for each unknown group, and how its certainty goes with being right (None: not known)."""

    method: str
    auroc: list[WithInterval]
    aupr: list[float]
    raulc: WithInterval | None
    cost: int | float | str | None

    @property
    def mean_auroc(self) -> float | None:
        """Over the unknown groups."""
        return statistics.fmean(m.value for m in self.auroc) if self.auroc else None


@lru_cache(maxsize=1)  # a table and a page of the same content share it
def at_a_glance(content: Content, resamples: int = 1000) -> list[Judged]:
    """Every method, the best mean AUROC first; without unknown groups the best rAULC first."""
    found = [_judged(content, method, resamples) for method in content.methods]

    def rank(judged: Judged) -> float:
        if judged.mean_auroc is not None:
            return -judged.mean_auroc
        return 0.0 if judged.raulc is None else -judged.raulc.value

    return sorted(found, key=rank)


def _judged(content: Content, method: str, resamples: int) -> Judged:
    known, correct = content.known.scores[method], content.known.correct
    others = [group.scores[method] for group in content.unknown]
    lift = None
    if correct is not None and 0 < correct.mean() < 1:  # else there is no rAULC
        lift = _measured(raulc, known, correct, paired=True, resamples=resamples)
    return Judged(
        method,
        [_measured(auroc, known, other, paired=False, resamples=resamples) for other in others],
        [aupr(known, other) for other in others],
        lift,
        content.costs.get(method),
    )


def _measured(
    measure: Callable[..., float], first: np.ndarray, second: np.ndarray, paired: bool, resamples: int
) -> WithInterval:
    try:
        low, high = interval(measure, first, second, paired=paired, resamples=resamples)
    except QualmsError:  # the measure has a value, but too few resamples have one: no interval is known
        low, high = float("nan"), float("nan")
    return WithInterval(measure(first, second), low, high)


@dataclass(frozen=True)
class Bins:
    """The edges of a histogram's bins; scores beyond the first or last edge are counted in the first or last bin."""

    edges: Float[np.ndarray, " b"]
    logarithmic: bool

    def shares(self, scores: np.ndarray) -> Float[np.ndarray, " c"]:
        """The share of these scores in each bin."""
        inside = np.clip(scores, self.edges[0], self.edges[-1])
        return np.histogram(inside, self.edges)[0] / len(scores)


def bins(groups: Sequence[np.ndarray], count: int = BINS) -> Bins:
    """Bins over the scores of all groups; logarithmic where scores are never negative and spread over magnitudes."""
    pooled = np.concatenate(groups).astype(np.float64)
    low, high = float(pooled.min()), float(pooled.max())
    if low == high:
        room = abs(low) / 2 or 0.5
        return Bins(np.linspace(low - room, low + room, count + 1), False)
    positive = pooled[pooled > 0]
    if low >= 0 and 2 * len(positive) > len(pooled):
        few, many = np.quantile(positive, [0.05, 0.95])
        if many > WIDE * few:
            least = max(float(np.quantile(positive, 0.005)), DECADES * high)
            return Bins(np.geomspace(least, high, count + 1), True)
    return Bins(np.linspace(low, high, count + 1), False)


def thinned(
    x: np.ndarray, y: np.ndarray, most: int = POINTS
) -> tuple[Float[np.ndarray, " k"], Float[np.ndarray, " k"]]:
    """At most this many points of a curve, for drawing: evenly along its length, with both ends."""
    if len(x) <= most:
        return x, y
    steps = [np.abs(np.diff(v)) / (np.ptp(v) or 1) for v in (x, y)]
    along = np.concatenate([[0.0], np.cumsum(steps[0] + steps[1])])
    kept = np.unique(np.searchsorted(along, np.linspace(0, along[-1], most)).clip(0, len(x) - 1))
    kept[0], kept[-1] = 0, len(x) - 1
    return x[kept], y[kept]


@dataclass(frozen=True)
class LayerShares:
    """Of one group: the share of each layer in each input's sum, and by method the inputs from certain to uncertain."""

    group: str
    shares: Float[np.ndarray, "n l"]
    orders: dict[str, list[int]]
    mean: Float[np.ndarray, " l"]  # over all the group's inputs, also those that are not drawn


def layer_shares(content: Content, layers: LayerContributions, most: int = COLUMNS) -> list[LayerShares]:
    """For each group that the layers tell of; beyond `most` inputs, every so manieth by the first method's score."""
    contributions = layers.contributions.astype(np.float64)
    total = contributions.sum(1, keepdims=True)
    shares = np.divide(contributions, total, out=np.zeros_like(contributions), where=total > 0)
    found = []
    for group in content.groups:
        rows = np.array([i for i, name in enumerate(layers.groups) if name == group.name], dtype=np.int64)
        if not len(rows):
            continue
        images = layers.indices[rows]
        by_score = np.argsort(group.scores[content.methods[0]][images], kind="stable")
        kept = by_score[np.unique(np.linspace(0, len(rows) - 1, min(most, len(rows))).round().astype(np.int64))]
        orders = {m: np.argsort(group.scores[m][images[kept]], kind="stable").tolist() for m in content.methods}
        found.append(LayerShares(group.name, shares[rows[kept]], orders, shares[rows].mean(0)))
    return found


@dataclass(frozen=True)
class Curve:
    """A measure over the number of labels: mean, least and most over the seeds."""

    method: str
    labelled: list[int]
    mean: list[float]
    low: list[float]
    high: list[float]


def learning_curves(cycles: Iterable[Row], measure: LearningMeasure) -> dict[str, list[Curve]]:
    """By dataset, a curve for each method; the start, which all methods share, begins each."""
    rows = [row for row in cycles if row["row"] == "cycle"]
    found: dict[str, list[Curve]] = {}
    for data in dict.fromkeys(row["data"] for row in rows):
        of_data = [row for row in rows if row["data"] == data]
        start = [row for row in of_data if row["cycle"] == 0]
        methods = dict.fromkeys(row["method"] for row in of_data if row["cycle"])
        found[data] = [
            _curve(method, [*start, *(row for row in of_data if row["cycle"] and row["method"] == method)], measure)
            for method in methods
        ]
    return found


def _curve(method: str, rows: Sequence[CycleRow], measure: LearningMeasure) -> Curve:
    labelled = sorted({row["labelled"] for row in rows})
    values = [[row[measure] for row in rows if row["labelled"] == n] for n in labelled]
    return Curve(method, labelled, [statistics.fmean(v) for v in values], [*map(min, values)], [*map(max, values)])
