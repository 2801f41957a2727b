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
from qualms.report.roles import not_for_use
from qualms.tasks.rows import CycleRow, Row

POINTS = 300  # of a curve that is drawn
WIDE = 30  # a score whose middle 90 % span this factor is drawn on a logarithmic axis
# and over no more than this part of the largest score, unless it would hide a quarter of a group
DECADES = 1e-9
BEYOND = 0.01  # at most this share of a group lies beyond either end of the axis
LAYERS = 12  # that are shown; the others are summed up
LearningMeasure = Literal["accuracy", "nll"]  # what active learning is followed by


@dataclass(frozen=True)
class WithInterval:
    """A measure, and its 95 % interval over the choice of inputs."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Judged:
    """One method: a number for each unknown group, and how its certainty goes with being right
    (None: not known).
    """

    method: str
    mean_auroc: WithInterval | None
    auroc: list[WithInterval]
    aupr: list[float]
    raulc: WithInterval | None
    cost: int | float | str | None

    @property
    def main(self) -> WithInterval | None:
        """What methods are compared by: mean AUROC, or rAULC where there are no unknown groups."""
        return self.raulc if self.mean_auroc is None else self.mean_auroc


@lru_cache(maxsize=1)  # a table and a page of the same content share it
def at_a_glance(content: Content, resamples: int = 1000) -> list[Judged]:
    """Every method, the best mean AUROC first; without unknown groups the best rAULC first."""
    found = [_judged(content, method, resamples) for method in content.methods]
    return sorted(found, key=lambda judged: 0.0 if judged.main is None else -judged.main.value)


def _judged(content: Content, method: str, resamples: int) -> Judged:
    known, correct = content.known.scores[method], content.known.correct
    others = [group.scores[method] for group in content.unknown]
    lift = None
    if correct is not None and 0 < correct.mean() < 1:  # else there is no rAULC
        lift = _measured(raulc, known, correct, paired=True, resamples=resamples)
    areas = [_measured(auroc, known, other, resamples=resamples) for other in others]
    mean = _measured(_mean_auroc, known, *others, resamples=resamples) if len(others) > 1 else None
    return Judged(
        method,
        mean or (areas[0] if areas else None),
        areas,
        [aupr(known, other) for other in others],
        lift,
        content.costs.get(method),
    )


def _mean_auroc(known: np.ndarray, *others: np.ndarray) -> float:
    return statistics.fmean(auroc(known, other) for other in others)


def _measured(
    measure: Callable[..., float], *samples: np.ndarray, paired: bool = False, resamples: int
) -> WithInterval:
    try:
        low, high = interval(measure, *samples, paired=paired, resamples=resamples)
    except (
        QualmsError
    ):  # the measure has a value, but too few resamples have one: no interval is known
        low, high = float("nan"), float("nan")
    return WithInterval(measure(*samples), low, high)


@dataclass(frozen=True)
class Verdict:
    """The method that is ahead of chance and of the others, if one is, and those whose intervals
    reach into its own.
    """

    best: Judged | None
    highest: Judged | None  # also where it may be chance
    tied: list[str]


def verdict(content: Content, judged: Sequence[Judged]) -> Verdict:
    """Who is ahead among the methods that are for use."""
    unused = not_for_use(content)
    there = [(j, j.main) for j in judged if j.main is not None and j.method not in unused]
    if not there:
        return Verdict(None, None, [])
    highest, best = there[0]
    if not best.low > (0.5 if content.unknown else 0.0):  # also where no interval is known
        return Verdict(None, highest, [])
    tied = [j.method for j, main in there[1:] if main.high >= best.low]
    return Verdict(highest, highest, tied)


@dataclass(frozen=True)
class Axis:
    """The scores that a drawing spans; those beyond its ends are counted beside it."""

    low: float
    high: float
    logarithmic: bool


def axis(groups: Sequence[np.ndarray]) -> Axis:
    """Over the scores of all groups but for their extremes; logarithmic where they are positive and
    span magnitudes.
    """
    pooled = np.concatenate(groups).astype(np.float64)
    low = min(float(np.quantile(scores, BEYOND, method="lower")) for scores in groups)
    high = max(float(np.quantile(scores, 1 - BEYOND, method="higher")) for scores in groups)
    if low == high:
        room = abs(low) / 2 or 0.5
        return Axis(low - room, high + room, False)
    positive = pooled[pooled > 0]
    if pooled.min() >= 0 and 2 * len(positive) > len(pooled):
        few, many = np.quantile(positive, [0.05, 0.95])
        if many > WIDE * few:
            most = min(
                float(np.quantile(scores[scores > 0], 0.25))
                for scores in groups
                if (scores > 0).any()
            )
            least = max(low, float(np.quantile(positive, 0.005)), DECADES * high)
            return Axis(min(least, most), high, True)
    return Axis(low, high, False)


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
    """The mean share of each layer in the scores of each group: the largest layers in order, and
    what is left.
    """

    groups: list[str]
    names: list[str]
    shares: Float[np.ndarray, "g l"]
    others: int  # layers that are not among the names


def layer_shares(content: Content, layers: LayerContributions, most: int = LAYERS) -> LayerShares:
    """Of the layers that matter most to some group, in the order of the forward pass."""
    contributions = layers.contributions.astype(np.float64)
    total = contributions.sum(1, keepdims=True)
    each = np.divide(contributions, total, out=np.zeros_like(contributions), where=total > 0)
    groups = [group.name for group in content.groups if group.name in layers.groups]
    of = np.array(layers.groups)
    means = np.stack([each[of == name].mean(0) for name in groups])
    kept = np.sort(np.argsort(-means.max(0), kind="stable")[:most])
    return LayerShares(
        groups, [layers.names[i] for i in kept], means[:, kept], len(layers.names) - len(kept)
    )


@dataclass(frozen=True)
class Curve:
    """A measure over the number of labels: mean, least and most over the seeds."""

    method: str
    labeled: list[int]
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
            _curve(
                method,
                [*start, *(row for row in of_data if row["cycle"] and row["method"] == method)],
                measure,
            )
            for method in methods
        ]
    return found


def _curve(method: str, rows: Sequence[CycleRow], measure: LearningMeasure) -> Curve:
    labeled = sorted({row["labeled"] for row in rows})
    values = [[row[measure] for row in rows if row["labeled"] == n] for n in labeled]
    return Curve(
        method,
        labeled,
        [statistics.fmean(v) for v in values],
        [*map(min, values)],
        [*map(max, values)],
    )
