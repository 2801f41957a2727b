"""The numbers of a report, computed from its content by the measures of `qualms.metrics`."""

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

MAX_POINTS = 300  # the maximum number of points of a curve that is drawn
# An axis is logarithmic if the middle 90 % of the scores span this factor.
LOG_AXIS_RATIO = 30
# A logarithmic axis starts no lower than this share of its end, unless a quarter of a group's
# scores are below that.
SMALLEST_RATIO = 1e-9
# The largest share of a group that lies beyond either end of an axis.
OUTLIERS = 0.01
MAX_LAYERS = 12  # the maximum number of layers that are shown; further ones are counted
# The measures of active learning that are drawn: keys of its rows.
LearningMeasure = Literal["accuracy", "nll"]


@dataclass(frozen=True)
class Estimate:
    """A measure with its 95 % bootstrap interval over the choice of inputs.

    Args:
        value: The measure over all inputs.
        low: The lower end of the interval; NaN if the measure is undefined on too many resamples.
        high: The upper end of the interval; NaN if `low` is.
    """

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class MethodSummary:
    """The measures of one method.

    Args:
        method: The name of the method.
        mean_auroc: The mean AUROC over the unknown groups; None without such groups.
        auroc: The AUROC of each unknown group against the known images.
        aupr: The AUPR of each unknown group.
        raulc: rAULC (relative area under the lift curve) on the known images; None if it is
            undefined.
        cost: The cost in forward passes, as a number or in words; None if it is not known.
    """

    method: str
    mean_auroc: Estimate | None
    auroc: list[Estimate]
    aupr: list[float]
    raulc: Estimate | None
    cost: int | float | str | None

    @property
    def main(self) -> Estimate | None:
        """The measure that ranks methods: mean AUROC, or rAULC if there are no unknown groups."""
        return self.raulc if self.mean_auroc is None else self.mean_auroc


# Cached, since a table and a page of the same content both call it.
@lru_cache(maxsize=1)
def summarize_methods(content: Content, resamples: int = 1000) -> list[MethodSummary]:
    """Summarize every method, in descending order of `MethodSummary.main`.

    The last result is cached, since a command may print a table and write a page of it.

    Args:
        content: The content of the report.
        resamples: The number of bootstrap resamples that each interval is computed from.
    """
    summaries = []
    for method in content.methods:
        summaries.append(_summarize_method(content, method, resamples))
    return sorted(summaries, key=_sort_key)


def _sort_key(summary: MethodSummary) -> float:
    """Return minus the value of `summary.main`, so that sorting puts the highest value first."""
    # All methods lack it then, so they keep their order.
    if summary.main is None:
        return 0.0
    return -summary.main.value


def _summarize_method(content: Content, method: str, resamples: int) -> MethodSummary:
    """Compute the measures of one method, with their intervals.

    Args:
        content: The content of the report.
        method: The name of the method.
        resamples: The number of bootstrap resamples that each interval is computed from.

    Returns:
        The summary. With one unknown group, its AUROC is also the mean AUROC.
    """
    known_scores = content.known.scores[method]
    correct = content.known.correct
    unknown_scores = [group.scores[method] for group in content.unknown]
    auroc_estimates = []
    auprs = []
    for group_scores in unknown_scores:
        auroc_estimates.append(
            _estimate_with_interval(auroc, known_scores, group_scores, resamples=resamples)
        )
        auprs.append(aupr(known_scores, group_scores))
    mean_auroc_estimate = None
    if len(unknown_scores) == 1:
        mean_auroc_estimate = auroc_estimates[0]
    elif unknown_scores:
        mean_auroc_estimate = _estimate_with_interval(
            _mean_auroc, known_scores, *unknown_scores, resamples=resamples
        )
    raulc_estimate = None
    # rAULC is only defined if some predictions are right and some are wrong.
    if correct is not None and 0 < correct.mean() < 1:
        raulc_estimate = _estimate_with_interval(
            raulc, known_scores, correct, paired=True, resamples=resamples
        )
    return MethodSummary(
        method=method,
        mean_auroc=mean_auroc_estimate,
        auroc=auroc_estimates,
        aupr=auprs,
        raulc=raulc_estimate,
        cost=content.costs.get(method),
    )


def _mean_auroc(known: np.ndarray, *others: np.ndarray) -> float:
    """Compute the mean AUROC of several groups of images against the known images.

    Args:
        known: The scores of the known images, of shape [n].
        others: The scores of each other group.
    """
    return statistics.fmean(auroc(known, other) for other in others)


def _estimate_with_interval(
    measure: Callable[..., float], *samples: np.ndarray, paired: bool = False, resamples: int
) -> Estimate:
    """Compute a measure and its 95 % bootstrap interval.

    The ends of the interval are NaN if the measure is undefined on too many resamples.

    Args:
        measure: Computes the measure from the arrays in `samples`.
        samples: Arrays of scores or outcomes, each of shape [n]; unpaired ones may differ in n.
        paired: Whether element i of all samples belongs to the same input.
        resamples: The number of bootstrap resamples.
    """
    value = measure(*samples)
    try:
        low, high = interval(measure, *samples, paired=paired, resamples=resamples)
    # The measure is undefined on too many resamples.
    except QualmsError:
        return Estimate(value, float("nan"), float("nan"))
    return Estimate(value, low, high)


@dataclass(frozen=True)
class Verdict:
    """The result of a comparison of methods.

    Args:
        best: The method with the highest `MethodSummary.main`, if its interval lies above chance.
        highest: The method with the highest `MethodSummary.main`, which may be at chance; None if
            no method has a value.
        tied: The methods whose intervals overlap with that of the best.
    """

    best: MethodSummary | None
    highest: MethodSummary | None
    tied: list[str]


def compare_methods(content: Content, summaries: Sequence[MethodSummary]) -> Verdict:
    """Find the best method, and the methods that are tied with it.

    Methods that are only for comparison with the paper (`not_for_use`) are left out. A method is
    tied with the best one if the upper end of its interval is at least the lower end of the best
    one's. The method with the highest value is not called best if its interval includes chance.

    Args:
        content: The content of the report.
        summaries: The summaries of all methods, sorted as `summarize_methods` returns them.
    """
    names_not_for_use = not_for_use(content)
    ranked = []
    for summary in summaries:
        if summary.main is not None and summary.method not in names_not_for_use:
            ranked.append((summary, summary.main))
    if not ranked:
        return Verdict(
            best=None,
            highest=None,
            tied=[],
        )
    highest_summary, highest_estimate = ranked[0]
    chance = 0.5 if content.unknown else 0.0
    # `not ... >`, so that a lower end of NaN does not count as above chance.
    if not highest_estimate.low > chance:
        return Verdict(
            best=None,
            highest=highest_summary,
            tied=[],
        )
    tied = []
    for summary, estimate in ranked[1:]:
        if estimate.high >= highest_estimate.low:
            tied.append(summary.method)
    return Verdict(
        best=highest_summary,
        highest=highest_summary,
        tied=tied,
    )


@dataclass(frozen=True)
class Axis:
    """The range of scores that a drawing shows; scores beyond its ends are counted separately.

    Args:
        low: The score at the left end.
        high: The score at the right end.
        logarithmic: Whether equal distances are equal ratios of scores.
    """

    low: float
    high: float
    logarithmic: bool


def score_axis(groups: Sequence[np.ndarray]) -> Axis:
    """Choose an axis for the scores of several groups.

    The axis leaves out at most 1 % of each group at either end. It is logarithmic if scores are
    positive and span orders of magnitude.

    Args:
        groups: For each group the scores of its n images, of shape [n].
    """
    lows = []
    highs = []
    # `lower` and `higher` take a score itself, not a mean of two that would leave out one more.
    for scores in groups:
        lows.append(float(np.quantile(scores, OUTLIERS, method="lower")))
        highs.append(float(np.quantile(scores, 1 - OUTLIERS, method="higher")))
    low, high = min(lows), max(highs)
    # All scores are equal: the axis needs a length anyway.
    if low == high:
        margin = abs(low) / 2 or 0.5
        return Axis(low - margin, high + margin, logarithmic=False)
    if not _spans_magnitudes(np.concatenate(groups).astype(np.float64)):
        return Axis(low, high, logarithmic=False)
    positive = [scores[scores > 0] for scores in groups]
    pooled = np.concatenate(positive).astype(np.float64)
    # The lowest half percent, such as underflows, does not stretch the axis.
    low_end = max(low, float(np.quantile(pooled, 0.005)), SMALLEST_RATIO * high)
    # At least three quarters of the positive scores of each group lie on the axis.
    for scores in positive:
        if len(scores):
            low_end = min(low_end, float(np.quantile(scores, 0.25)))
    return Axis(low_end, high, logarithmic=True)


def _spans_magnitudes(scores: np.ndarray) -> bool:
    """Whether no score is negative, most are positive, and these span orders of magnitude."""
    positive = scores[scores > 0]
    if scores.min() < 0 or 2 * len(positive) <= len(scores):
        return False
    low, high = np.quantile(positive, [0.05, 0.95])
    return bool(high > LOG_AXIS_RATIO * low)


def thin_curve(
    x: np.ndarray, y: np.ndarray, max_points: int = MAX_POINTS
) -> tuple[Float[np.ndarray, " k"], Float[np.ndarray, " k"]]:
    """Thin a curve for a small file: keep at most `max_points` points, about equally far apart.

    Both ends are kept.

    Args:
        x: The first coordinates, of shape [n].
        y: The second coordinates, of shape [n].
        max_points: The maximum number of points to keep.

    Returns:
        The coordinates of the points that are kept.
    """
    if len(x) <= max_points:
        return x, y
    step_lengths = np.zeros(len(x) - 1)
    for values in (x, y):
        # Each axis is scaled to 1; a constant axis (range 0) adds nothing.
        step_lengths += np.abs(np.diff(values)) / (np.ptp(values) or 1)
    # The length of the curve up to each point.
    path_lengths = np.concatenate([[0.0], np.cumsum(step_lengths)])
    # At each of `max_points` equal distances along the curve, the next point.
    indices = np.searchsorted(path_lengths, np.linspace(0, path_lengths[-1], max_points))
    kept_indices = np.unique(indices.clip(0, len(x) - 1))
    # Both ends of the curve are kept.
    kept_indices[0] = 0
    kept_indices[-1] = len(x) - 1
    return x[kept_indices], y[kept_indices]


@dataclass(frozen=True)
class LayerShares:
    """The mean share of each layer in the scores of each group.

    Args:
        groups: The names of the groups.
        names: The names of the layers with the largest shares, in the order of the forward pass.
        shares: The mean share of each named layer in each group's scores, [groups, layers].
        others: The number of layers that are left out.
    """

    groups: list[str]
    names: list[str]
    shares: Float[np.ndarray, "g l"]
    others: int


def layer_shares(
    content: Content, layers: LayerContributions, max_layers: int = MAX_LAYERS
) -> LayerShares:
    """Average the layers' shares of the score over the images of each group.

    Args:
        content: The content of the report, which has the groups in order.
        layers: The contributions of layers to the scores of single images.
        max_layers: The maximum number of layers to return: those with the largest shares.
    """
    contributions = layers.contributions.astype(np.float64)
    totals = contributions.sum(1, keepdims=True)
    shares = np.zeros_like(contributions)
    # Where all contributions are 0, the shares stay 0.
    np.divide(contributions, totals, out=shares, where=totals > 0)
    group_names = np.array(layers.groups)
    groups = []
    for group in content.groups:
        if group.name in layers.groups:
            groups.append(group.name)
    means = np.stack([shares[group_names == name].mean(0) for name in groups])
    # The layers with the largest share in any group, in the order of the forward pass.
    kept_layers = np.sort(np.argsort(-means.max(0), kind="stable")[:max_layers])
    names = [layers.names[i] for i in kept_layers]
    return LayerShares(
        groups=groups,
        names=names,
        shares=means[:, kept_layers],
        others=len(layers.names) - len(kept_layers),
    )


@dataclass(frozen=True)
class LearningCurve:
    """A measure of active learning over the number of labels.

    Args:
        method: The method that picks the images.
        labeled: The numbers of labels, in ascending order.
        mean: The mean of the measure over the seeds, at each number of labels.
        low: The smallest value over the seeds.
        high: The largest value over the seeds.
    """

    method: str
    labeled: list[int]
    mean: list[float]
    low: list[float]
    high: list[float]


def learning_curves(
    cycles: Iterable[Row], measure: LearningMeasure
) -> dict[str, list[LearningCurve]]:
    """Return a dict from each dataset's name to the learning curves of the methods on it.

    Args:
        cycles: The rows of active learning; rows of other kinds are ignored.
        measure: The measure that is drawn.
    """
    rows = [row for row in cycles if row["row"] == "cycle"]
    curves: dict[str, list[LearningCurve]] = {}
    for dataset in dict.fromkeys(row["data"] for row in rows):
        rows_by_method: dict[str, list[CycleRow]] = {}
        # All methods share the cycle 0, which precedes the first pick.
        rows_before_first_pick = []
        for row in rows:
            if row["data"] != dataset:
                continue
            if row["cycle"]:
                rows_by_method.setdefault(row["method"], []).append(row)
            else:
                rows_before_first_pick.append(row)
        curves[dataset] = []
        for method, method_rows in rows_by_method.items():
            curves[dataset].append(
                _learning_curve(method, [*rows_before_first_pick, *method_rows], measure)
            )
    return curves


def _learning_curve(
    method: str, rows: Sequence[CycleRow], measure: LearningMeasure
) -> LearningCurve:
    """Return the learning curve of a method, averaged over the seeds.

    Args:
        method: The name of the method.
        rows: The rows of the method's cycles, for all seeds, and the rows before the first pick.
        measure: The measure that is drawn.
    """
    values_by_count: dict[int, list[float]] = {}
    for row in rows:
        values_by_count.setdefault(row["labeled"], []).append(row[measure])
    labeled = sorted(values_by_count)
    # For each number of labels, the values of all seeds.
    values_of_seeds = [values_by_count[count] for count in labeled]
    return LearningCurve(
        method=method,
        labeled=labeled,
        mean=list(map(statistics.fmean, values_of_seeds)),
        low=list(map(min, values_of_seeds)),
        high=list(map(max, values_of_seeds)),
    )
