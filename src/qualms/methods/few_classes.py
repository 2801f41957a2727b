"""Scores that are sums over many classes, from as few classes of each input as a tolerance allows.

Each input begins with as many classes as its logits say it needs. If the error that is then found is too large, twice
as many are measured; and all rather than more than half, which leaves no error. Where all layers count alike, the norms
of a late block tell first which classes to measure (two-phase sampling, Neyman, J. ASA 1938): many classes through the
block, and few of them through the whole network. How an input is scored depends on itself and the seed alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qualms.gradients.choice import ProxyBlock, proxy_block
from qualms.gradients.directions import Directions
from qualms.gradients.exact.drawn_classes import (
    FIRST,
    LATE_SPREAD,
    PROXY_SPREAD,
    STREAM,
    WHOLE_SPREAD,
    ChosenClasses,
    DrawnClasses,
    Sizes,
    class_lengths,
    class_sizes,
    estimate,
    expected_error,
    inclusion_chances,
    walk,
)
from qualms.gradients.inputs import take
from qualms.gradients.job import Job
from qualms.gradients.layers import total_norms
from qualms.gradients.learnt import Learnt
from qualms.gradients.table import LayerTable, layer_table
from qualms.random import generator

if TYPE_CHECKING:
    from qualms.methods.gradient_score import GradientScore

FOR_LAYERS = 12  # classes that tell what each layer adds
WITHOUT_PROXY = 16  # classes: where so few are enough, a first phase does not pay
FIRST_PHASE = 64  # classes that it has at least
FIRST_PHASE_PART = 0.7  # of the tolerance, that its error may take
Estimate = tuple[Float[Tensor, " b"], Float[Tensor, " b"]]  # scores and their standard errors


@dataclass(frozen=True)
class ClassSums:
    """Σ_c w_c ‖g_c‖ⁿ of a batch by several methods, with a standard error of at most the tolerance of each score.

    Args:
        job: the batch.
        methods: scores that are sums over classes, with the same smoothing.
        learnt: what is kept of the model from batch to batch.
        head: the weight of the linear layer that gives the logits, if there is one.
        lam: the smallest λ of the methods; None if one of them takes all layers alike.
        regrouped: the logits in other company, if known (see `exact`).
    """

    job: Job
    methods: "Sequence[GradientScore]"
    learnt: Learnt
    head: Float[Tensor, "c d"] | None
    lam: float | None
    regrouped: Float[Tensor, "b c"] | None = None

    @property
    def tolerance(self) -> float:
        """The standard error that a score may have, as a share of its value."""
        return self.job.settings.tolerance or 0.0

    @property
    def power(self) -> int:
        """The highest power of a norm."""
        return max(m.power for m in self.methods)

    @property
    def spread(self) -> float:
        """Of ‖g_c‖ over what the classifier's rows say of it, usually."""
        return WHOLE_SPREAD if self.lam is None else LATE_SPREAD

    def estimate(self, logits: Float[Tensor, "b c"]) -> "dict[GradientScore, Estimate]":
        """The scores and their errors."""
        found = {m: (logits.new_zeros(len(logits)), logits.new_zeros(len(logits))) for m in self.methods}
        waiting = torch.ones(len(logits), dtype=torch.bool, device=logits.device)
        proxy = self.proxy(logits)
        if proxy is not None:
            for number, ready in self.first_phases(logits):
                first = _FirstPhase.of(self, ready.nonzero().flatten(), number, proxy)
                waiting[first.estimate(found)] = False
        number, least = FIRST, torch.zeros_like(waiting, dtype=torch.long)
        while bool(waiting.any()):
            some = self._drawn(number, logits.shape[1])
            index = self._ready(some, logits, waiting & (least <= number)).nonzero().flatten()
            if len(index):
                done = self._estimate_directly(index, some, found)
                waiting[index[done]] = False
                least[index] = 2 * number
            number = _more(number)
        return found

    def proxy(self, logits: Float[Tensor, "b c"]) -> ProxyBlock | None:
        """The block whose norms tell which classes to measure; None where that does not pay."""
        if self.lam is not None or logits.shape[1] < 2 * FIRST_PHASE:
            return None
        return proxy_block(self.job, self.learnt)

    def first_phases(self, logits: Float[Tensor, "b c"]) -> list[tuple[int, Bool[Tensor, " b"]]]:
        """How many classes a first phase has, and for which inputs; the others are measured directly."""
        left = ~self._ready(self._drawn(WITHOUT_PROXY, logits.shape[1]), logits)
        found, number = [], FIRST_PHASE
        while 2 * number <= logits.shape[1] and bool(left.any()):
            ready = self._ready(self._drawn(number, logits.shape[1]), logits, left, FIRST_PHASE_PART)
            if bool(ready.any()):
                found.append((number, ready))
            left = left & ~ready
            number *= 2
        return found

    def classes_needed(self, logits: Float[Tensor, "b c"]) -> tuple[float, float]:
        """How many classes an input begins with, on average, and for how many a proxy block is measured before."""
        waiting, total, before = torch.ones(len(logits), dtype=torch.bool, device=logits.device), 0, 0
        if self.proxy(logits) is not None:
            for number, ready in self.first_phases(logits):
                before += number * int(ready.sum())
                total += WITHOUT_PROXY * int(ready.sum())
                waiting = waiting & ~ready
        number = FIRST
        while bool(waiting.any()):
            some = self._drawn(number, logits.shape[1])
            ready = self._ready(some, logits, waiting)
            total += int(ready.sum()) * (logits.shape[1] if some is None else number)
            waiting = waiting & ~ready
            number = _more(number)
        return total / len(logits), before / len(logits)

    def part(self, index: Int[Tensor, " n"], directions: Directions, params: frozenset[str] | None = None) -> Job:
        """The job for some of the inputs, along other directions, and by some of the parameters."""
        chosen = index.tolist()
        settings = self.job.settings
        if params is not None:
            settings = replace(settings, params=params.__contains__)
        numbers = [self.job.numbers[i] for i in chosen]
        return replace(
            self.job, batch=take(self.job.batch, chosen), numbers=numbers, settings=settings, directions=directions
        )

    def table(self, job: Job, index: Int[Tensor, " n"], lam: float | None = None) -> LayerTable:
        """The norms of such a job."""
        regrouped = None if self.regrouped is None else self.regrouped[index]
        return layer_table([job], self.learnt, regrouped=regrouped, lam=lam)

    def _estimate_directly(
        self, index: Int[Tensor, " n"], some: DrawnClasses | None, found: "dict[GradientScore, Estimate]"
    ) -> Bool[Tensor, " n"]:
        """Fills in the scores of some inputs, from some of the classes or all, and tells which are good enough."""
        table = self.table(self.part(index, some or Directions(("classes",))), index, self.lam)
        small = torch.ones_like(index, dtype=torch.bool)
        for m in self.methods:
            norms = total_norms(table.values.double(), m.layers, self.job.settings.norm)
            terms = m.weights_at(table.logits)
            if some is None:
                value = (terms * norms**m.power).sum(-1)
                error = torch.zeros_like(value)
            else:
                classes, chances = some.draw(table.logits)
                value, error = estimate(terms.gather(-1, classes) * norms**m.power, chances, m.power * self.spread)
            error = torch.hypot(error, m.power * table.left_out * value)
            found[m][0][index], found[m][1][index] = value, error
            small &= error <= self.tolerance * value.abs()
        return small if some is not None else torch.ones_like(small)

    def _drawn(self, number: int, classes: int) -> DrawnClasses | None:
        """So many of the classes; None for all of them, rather than more than half."""
        sizes = _sizes(self.methods, self.head)
        return None if 2 * number > classes else DrawnClasses(("drawn",), sizes, number, self.job.settings.seed)

    def _ready(
        self,
        some: DrawnClasses | None,
        logits: Float[Tensor, "b c"],
        waiting: Bool[Tensor, " b"] | None = None,
        part: float = 1.0,
    ) -> Bool[Tensor, " b"]:
        """Which inputs so many classes are expected to be enough for.

        Args:
            some: the classes; None for all of them.
            logits: of the inputs.
            waiting: the inputs in question; all if not said.
            part: of the tolerance, that the error may take.
        """
        if waiting is None:
            waiting = torch.ones(len(logits), dtype=torch.bool, device=logits.device)
        if some is None:
            return waiting
        return waiting & (some.expected_error(logits, self.power, self.spread) <= part * self.tolerance)


@dataclass(frozen=True)
class _FirstPhase:
    """Many classes of some inputs, with the norms of their gradients in a late block.

    Then Σ_c w_c ‖g_c‖ⁿ is estimated from a few of these classes, drawn with chances proportional to what each adds to
    the same sum of the block. The errors of the two phases are independent: their squares add up.
    """

    sums: ClassSums
    index: Int[Tensor, " n"]  # of the inputs
    classes: Int[Tensor, "n m"]
    chances: Float[Tensor, "n m"]
    shares: Float[Tensor, "n m"]  # of each class in the block's sum, the mean over methods
    errors: "dict[GradientScore, Float[Tensor, ' n']]"  # relative ones, of this phase

    @classmethod
    def of(cls, sums: ClassSums, index: Int[Tensor, " n"], number: int, proxy: ProxyBlock) -> "_FirstPhase":
        """Measure so many classes of the inputs at an index in a proxy block."""
        some = DrawnClasses(("drawn",), _sizes(sums.methods, sums.head), number, sums.job.settings.seed)
        table = sums.table(sums.part(index, some, proxy.names), index)
        classes, chances = some.draw(table.logits)
        norms = total_norms(table.values.double(), None, sums.job.settings.norm)
        tiny = torch.finfo(torch.double).tiny
        shares, errors = [], {}
        for m in sums.methods:
            terms = m.weights_at(table.logits).gather(-1, classes) * norms**m.power
            value, error = estimate(terms, chances, m.power * sums.spread)
            errors[m] = error / value.abs().clamp_min(tiny)
            shares.append((terms / chances.clamp_min(tiny)).abs() / value.abs().clamp_min(tiny)[:, None])
        return cls(sums, index, classes, chances, torch.stack(shares).mean(0), errors)

    def estimate(self, found: "dict[GradientScore, Estimate]") -> Int[Tensor, " k"]:
        """Fills in the scores of these inputs; returns those whose error is small enough."""
        largest = torch.stack(list(self.errors.values())).amax(0)
        waiting = torch.ones_like(self.index, dtype=torch.bool)
        least = torch.zeros_like(self.index)
        number, power, tolerance = FIRST, self.sums.power, self.sums.tolerance
        while bool(waiting.any()) and number <= self.classes.shape[1]:
            chances = inclusion_chances(self.shares, number)
            second = expected_error(self.shares, chances, number, power * PROXY_SPREAD)
            enough = (torch.hypot(largest, second) <= tolerance) & (least <= number)
            ready = (waiting & enough).nonzero().flatten()
            if len(ready):
                small = self._measure(ready, chances[ready], number, found)
                waiting[ready[small]] = False
                least[ready] = 2 * number
            number = _more(number)
        return self.index[~waiting]

    def _measure(
        self,
        ready: Int[Tensor, " k"],
        chances: Float[Tensor, "k m"],
        number: int,
        found: "dict[GradientScore, Estimate]",
    ) -> Bool[Tensor, " k"]:
        """Measure so many of the classes in all layers, and tell which errors are small enough.

        Args:
            ready: which of the inputs of this phase.
            chances: of their classes to be drawn again.
            number: of classes.
            found: where the scores are filled in.
        """
        sums, index = self.sums, self.index[ready]
        places = walk(chances, number, generator(sums.job.settings.seed, STREAM + number))
        again = chances.gather(-1, places)
        classes = self.classes[ready].gather(-1, places)
        before = self.chances[ready].gather(-1, places).clamp_min(torch.finfo(torch.double).tiny)
        table = sums.table(sums.part(index, ChosenClasses(("drawn",), classes)), index)
        small = torch.ones_like(index, dtype=torch.bool)
        for m in sums.methods:
            norms = total_norms(table.values.double(), m.layers, sums.job.settings.norm)
            terms = m.weights_at(table.logits).gather(-1, classes) * norms**m.power / before
            value, error = estimate(terms, again, m.power * PROXY_SPREAD)
            error = torch.hypot(error, self.errors[m][ready] * value)
            found[m][0][index], found[m][1][index] = value, error
            small &= error <= sums.tolerance * value.abs()
        return small


def _more(number: int) -> int:
    """The next number of classes to try: 8, 12, 16, 24, 32, …"""
    return number * 3 // 2 if number & (number - 1) == 0 else number * 4 // 3


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


def _sizes(methods: "Sequence[GradientScore]", head: Float[Tensor, "c d"] | None) -> Sizes:
    """The sizes of classes by which they are drawn: the mean of what they are to each method."""

    def sizes(probs: Tensor) -> Tensor:
        lengths = class_lengths(probs, head)
        return torch.stack([class_sizes(m.weights(probs), lengths, m.power) for m in methods]).mean(0)

    return sizes
