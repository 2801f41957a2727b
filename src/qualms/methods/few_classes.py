"""Scores that are sums over many classes, from as few classes of each input as a tolerance allows."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from qualms.gradients.directions import Directions
from qualms.gradients.exact.drawn_classes import FIRST, DrawnClasses, class_sizes, estimate
from qualms.gradients.inputs import take
from qualms.gradients.job import Job
from qualms.gradients.layers import total_norms
from qualms.gradients.learnt import Learnt
from qualms.gradients.table import LayerTable, layer_table

if TYPE_CHECKING:
    from qualms.methods.gradient_score import GradientScore

Estimate = tuple[Float[Tensor, " b"], Float[Tensor, " b"]]  # scores and their standard errors


def scores_by_few_classes(
    job: Job,
    methods: "Sequence[GradientScore]",
    logits: Float[Tensor, "b c"],
    learnt: Learnt,
    *,
    regrouped: Float[Tensor, "b c"] | None,
    lam: float | None,
) -> "dict[GradientScore, Estimate]":
    """Σ_c w_c ‖g_c‖ by each method, with a standard error of at most the job's tolerance, as a share of the score.

    An input begins with as many classes as its logits say it needs. If the error that is then found is too large for
    one of the methods, twice as many are measured; and all rather than more than half, which leaves no error. So how
    an input is scored depends on itself and the seed alone.
    """

    found = {m: (logits.new_zeros(len(logits)), logits.new_zeros(len(logits))) for m in methods}
    waiting = torch.ones(len(logits), dtype=torch.bool, device=logits.device)
    number, tolerance = FIRST, job.settings.tolerance
    while bool(waiting.any()):
        some = _drawn(methods, number, logits.shape[1], job.settings.seed)
        ready = waiting if some is None else waiting & (some.expected_error(logits) <= tolerance)
        index = ready.nonzero().flatten()
        if len(index):
            part = replace(job, batch=take(job.batch, index.tolist()), numbers=[job.numbers[i] for i in index.tolist()])
            part = replace(part, directions=some or Directions(("classes",)))
            own = None if regrouped is None else regrouped[index]
            table = layer_table([part], learnt, regrouped=own, lam=lam)
            small = torch.ones_like(index, dtype=torch.bool)
            for m in methods:
                value, error = _score(m, table, some, job)
                found[m][0][index], found[m][1][index] = value, error
                small &= error <= tolerance * value.abs()
            waiting[index[small]] = False
        number *= 2
    return found


def classes_needed(methods: "Sequence[GradientScore]", logits: Float[Tensor, "b c"], tolerance: float) -> float:
    """How many classes an input begins with, on average: what a pass over these inputs will cost at least."""
    waiting = torch.ones(len(logits), dtype=torch.bool, device=logits.device)
    number, total = FIRST, 0
    while bool(waiting.any()):
        some = _drawn(methods, number, logits.shape[1], seed=0)
        ready = waiting if some is None else waiting & (some.expected_error(logits) <= tolerance)
        total += int(ready.sum()) * (logits.shape[1] if some is None else number)
        waiting = waiting & ~ready
        number *= 2
    return total / len(logits)


def _drawn(methods: "Sequence[GradientScore]", number: int, classes: int, seed: int) -> DrawnClasses | None:
    """So many of the classes; None for all of them, rather than more than half."""

    def sizes(probs: Tensor) -> Tensor:
        return torch.stack([class_sizes(m.weights(probs), probs) for m in methods]).mean(0)

    return None if 2 * number > classes else DrawnClasses(("drawn",), sizes, number, seed)


def _score(method: "GradientScore", table: LayerTable, some: DrawnClasses | None, job: Job) -> Estimate:
    """The scores of one table, of all classes or of some."""
    norms = total_norms(table.values.double(), method.layers, job.settings.norm)
    weights = method.weights_at(table.logits)
    if some is None:
        value = (weights * norms).sum(-1)
        return value, torch.zeros_like(value)
    classes, chances = some.draw(table.logits)
    return estimate(weights.gather(-1, classes) * norms, chances)
