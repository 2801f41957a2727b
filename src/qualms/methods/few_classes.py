"""Scores that are sums over many classes, from as few classes of each input as a tolerance allows."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from qualms.gradients.directions import Directions
from qualms.gradients.exact.drawn_classes import FIRST, DrawnClasses, Sizes, class_lengths, class_sizes, estimate
from qualms.gradients.inputs import take
from qualms.gradients.job import Job
from qualms.gradients.layers import total_norms
from qualms.gradients.learnt import Learnt
from qualms.gradients.table import LayerTable, layer_table

if TYPE_CHECKING:
    from qualms.methods.gradient_score import GradientScore

FOR_LAYERS = 12  # classes that tell what each layer adds
Estimate = tuple[Float[Tensor, " b"], Float[Tensor, " b"]]  # scores and their standard errors


def scores_by_few_classes(
    job: Job,
    methods: "Sequence[GradientScore]",
    logits: Float[Tensor, "b c"],
    learnt: Learnt,
    *,
    head: Float[Tensor, "c d"] | None,
    regrouped: Float[Tensor, "b c"] | None,
    lam: float | None,
) -> "dict[GradientScore, Estimate]":
    """Σ_c w_c ‖g_c‖ⁿ by each method, with a standard error of at most the job's tolerance, as a share of the score.

    An input begins with as many classes as its logits say it needs. If the error that is then found is too large for
    one of the methods, twice as many are measured; and all rather than more than half, which leaves no error. So how
    an input is scored depends on itself and the seed alone.

    Args:
        job: the batch.
        methods: scores that are sums over classes, with the same smoothing.
        logits: of the batch.
        learnt: what is kept of the model from batch to batch.
        head: the weight of the linear layer that gives the logits, if there is one.
        regrouped: the logits in other company, if known (see `exact`).
        lam: the smallest λ of the methods; None if one of them takes all layers alike.
    """
    found = {m: (logits.new_zeros(len(logits)), logits.new_zeros(len(logits))) for m in methods}
    waiting = torch.ones(len(logits), dtype=torch.bool, device=logits.device)
    number, tolerance = FIRST, job.settings.tolerance or 0.0
    while bool(waiting.any()):
        some = _drawn(methods, head, number, logits.shape[1], job.settings.seed)
        ready = _ready(methods, some, logits, waiting, tolerance)
        index = ready.nonzero().flatten()
        if len(index):
            chosen = index.tolist()
            numbers = [job.numbers[i] for i in chosen]
            directions = some or Directions(("classes",))
            part = replace(job, batch=take(job.batch, chosen), numbers=numbers, directions=directions)
            own = None if regrouped is None else regrouped[index]
            table = layer_table([part], learnt, regrouped=own, lam=lam)
            small = torch.ones_like(index, dtype=torch.bool)
            for m in methods:
                value, error = _score(m, table, some, job)
                found[m][0][index], found[m][1][index] = value, error
                small &= error <= tolerance * value.abs()
            waiting[index if some is None else index[small]] = False
        number *= 2
    return found


def layer_sums_by_few_classes(
    job: Job, method: "GradientScore", learnt: Learnt, head: Float[Tensor, "c d"] | None
) -> tuple[list[str], Float[Tensor, "b l"]]:
    """Σ_c w_c ‖g_cl‖ⁿ of every layer l, from some of the classes: enough for a bar chart.

    Args:
        job: the batch.
        method: a sum over classes.
        learnt: what is kept of the model from batch to batch.
        head: the weight of the linear layer that gives the logits, if there is one.
    """
    some = DrawnClasses(("drawn",), _sizes([method], head), FOR_LAYERS, job.settings.seed)
    table = layer_table([replace(job, directions=some)], learnt)
    classes, chances = some.draw(table.logits)
    weights = method.weights_at(table.logits).gather(-1, classes) / chances.clamp_min(torch.finfo(torch.double).tiny)
    return table.layers, torch.einsum("bm,bml->bl", weights, table.values.double() ** method.power)


def classes_needed(
    methods: "Sequence[GradientScore]",
    logits: Float[Tensor, "b c"],
    tolerance: float,
    head: Float[Tensor, "c d"] | None = None,
) -> float:
    """How many classes an input begins with, on average: what a pass over these inputs will cost at least."""
    waiting = torch.ones(len(logits), dtype=torch.bool, device=logits.device)
    number, total = FIRST, 0
    while bool(waiting.any()):
        some = _drawn(methods, head, number, logits.shape[1], seed=0)
        ready = _ready(methods, some, logits, waiting, tolerance)
        total += int(ready.sum()) * (logits.shape[1] if some is None else number)
        waiting = waiting & ~ready
        number *= 2
    return total / len(logits)


def _ready(
    methods: "Sequence[GradientScore]",
    some: DrawnClasses | None,
    logits: Float[Tensor, "b c"],
    waiting: Bool[Tensor, " b"],
    tolerance: float,
) -> Bool[Tensor, " b"]:
    """Which of the waiting inputs so many classes are expected to be enough for."""
    if some is None:
        return waiting
    power = max(m.power for m in methods)
    return waiting & (some.expected_error(logits, power) <= tolerance)


def _drawn(
    methods: "Sequence[GradientScore]", head: Float[Tensor, "c d"] | None, number: int, classes: int, seed: int
) -> DrawnClasses | None:
    """So many of the classes; None for all of them, rather than more than half.

    Args:
        methods: whose sums over classes are estimated together.
        head: the weight of the linear classifier, if there is one.
        number: of classes that are measured.
        classes: of the model.
        seed: of the draw.
    """
    return None if 2 * number > classes else DrawnClasses(("drawn",), _sizes(methods, head), number, seed)


def _sizes(methods: "Sequence[GradientScore]", head: Float[Tensor, "c d"] | None) -> Sizes:
    """The sizes of classes by which they are drawn: the mean of what they are to each method."""

    def sizes(probs: Tensor) -> Tensor:
        lengths = class_lengths(probs, head)
        return torch.stack([class_sizes(m.weights(probs), lengths, m.power) for m in methods]).mean(0)

    return sizes


def _score(method: "GradientScore", table: LayerTable, some: DrawnClasses | None, job: Job) -> Estimate:
    """The scores of one table, of all classes or of some, and their errors with what early layers may add."""
    norms = total_norms(table.values.double(), method.layers, job.settings.norm)
    weights = method.weights_at(table.logits)
    if some is None:
        value = (weights * norms**method.power).sum(-1)
        error = torch.zeros_like(value)
    else:
        classes, chances = some.draw(table.logits)
        value, error = estimate(weights.gather(-1, classes) * norms**method.power, chances, method.power)
    return value, torch.hypot(error, method.power * table.left_out * value)
