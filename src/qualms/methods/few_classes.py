"""Scores that are sums over many classes, from as few classes of each input as a tolerance allows.

Each input begins with as many classes as its logits say it needs. If the error that is then found is too large, further
classes are drawn and added to those before; and all are measured rather than more than half, which leaves no error.
Where all layers count alike, the norms of a late block tell first which classes to measure (two-phase sampling, Neyman,
J. ASA 1938): many classes through the block, and few of them through the whole network. How an input is scored depends
on itself and the seed alone.
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
    BLOCK_SPREAD,
    LATE_SPREAD,
    PROXY_SPREAD,
    STREAM,
    WHOLE_SPREAD,
    ChosenClasses,
    DrawnClasses,
    Sizes,
    Tally,
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

FIRST = 8  # classes that an input begins with at least
FEWEST_MORE = 4  # classes that are added at least
FOR_LAYERS = 12  # classes that tell what each layer adds
WITHOUT_PROXY = 12  # classes: where so few are enough, a first phase does not pay
FIRST_PHASE = 64  # classes that it has at least
FIRST_PHASE_PART = 0.7  # of the tolerance, that its error may take
IN_SECOND_PHASE = 10  # classes that it takes, usually
SECOND = 1000  # sets its draws apart from those of all classes
TINY = torch.finfo(torch.double).tiny
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
    def powers(self) -> Float[Tensor, "m 1"]:
        """That of each method."""
        return torch.tensor([[float(m.power)] for m in self.methods], dtype=torch.double)

    def estimate(self, logits: Float[Tensor, "b c"]) -> "dict[GradientScore, Estimate]":
        """The scores and their errors."""
        found = {m: (logits.new_zeros(len(logits)), logits.new_zeros(len(logits))) for m in self.methods}
        waiting = torch.ones(len(logits), dtype=torch.bool, device=logits.device)
        proxy = self.proxy(logits)
        if proxy is not None:
            for number, ready in self.first_phases(logits):
                index = ready.nonzero().flatten()
                population = self._first_phase(index, number, proxy)
                waiting[population.estimate(found)] = False
        index = waiting.nonzero().flatten()
        if len(index):
            self._all_classes(index, logits[index]).estimate(found)
        return found

    def proxy(self, logits: Float[Tensor, "b c"]) -> ProxyBlock | None:
        """The block whose norms tell which classes to measure; None where that does not pay."""
        if self.lam is not None or logits.shape[1] < 2 * FIRST_PHASE:
            return None
        return proxy_block(self.job, self.learnt)

    def first_phases(self, logits: Float[Tensor, "b c"]) -> list[tuple[int, Bool[Tensor, " b"]]]:
        """How many classes a first phase has, and for which inputs; the others are measured directly."""
        sizes = self.sizes(logits)
        left = _expected(sizes, WITHOUT_PROXY, self.power * WHOLE_SPREAD) > self.tolerance
        found, number = [], FIRST_PHASE
        while 2 * number <= logits.shape[1] and bool(left.any()):
            expected = _expected(sizes, number, self.power * BLOCK_SPREAD)
            ready = left & (expected <= FIRST_PHASE_PART * self.tolerance)
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
                total += IN_SECOND_PHASE * int(ready.sum())
                waiting = waiting & ~ready
        index = waiting.nonzero().flatten()
        if len(index):
            total += int(self._all_classes(index, logits[index]).first_numbers().sum())
        return total / len(logits), before / len(logits)

    def sizes(self, logits: Float[Tensor, "b c"]) -> Float[Tensor, "b c"]:
        """The sizes of the classes of each input."""
        return _sizes(self.methods, self.head)(logits.double().softmax(-1))

    def table(
        self,
        index: Int[Tensor, " n"],
        directions: Directions,
        params: frozenset[str] | None = None,
        lam: float | None = None,
    ) -> LayerTable:
        """Norms for some of the inputs.

        Args:
            index: of the inputs.
            directions: of the gradients.
            params: the parameters that count; those of the job if not said.
            lam: λ by which early layers may be left out; None if they may not.
        """
        chosen = index.tolist()
        settings = self.job.settings
        if params is not None:
            settings = replace(settings, params=params.__contains__)
        numbers = [self.job.numbers[i] for i in chosen]
        batch = take(self.job.batch, chosen)
        job = replace(self.job, batch=batch, numbers=numbers, settings=settings, directions=directions)
        regrouped = None if self.regrouped is None else self.regrouped[index]
        return layer_table([job], self.learnt, regrouped=regrouped, lam=lam)

    def draw(self, number: int) -> DrawnClasses:
        """So many classes of each input, by what the logits say of them as an engine runs them."""
        return DrawnClasses(("drawn",), _sizes(self.methods, self.head), number, self.job.settings.seed)

    def terms(self, table: LayerTable, classes: Int[Tensor, "n d"], whole: bool = True) -> Float[Tensor, "m n d"]:
        """w_c ‖g_c‖ⁿ of the classes of a table, by each of m methods; of part of the network all layers count alike."""
        norm = self.job.settings.norm
        found = []
        for m in self.methods:
            norms = total_norms(table.values.double(), m.layers if whole else None, norm)
            found.append(m.weights_at(table.logits).gather(-1, classes) * norms**m.power)
        return torch.stack(found)

    def _all_classes(self, index: Int[Tensor, " n"], logits: Float[Tensor, "n c"]) -> "_Population":
        """All classes of some inputs, to be drawn by what the logits say of them."""
        return _Population(self, index, self.sizes(logits), WHOLE_SPREAD if self.lam is None else LATE_SPREAD)

    def _first_phase(self, index: Int[Tensor, " n"], number: int, proxy: ProxyBlock) -> "_Population":
        """So many classes of some inputs, to be drawn by what each adds to the sum over the proxy block alone."""
        some = self.draw(number)
        table = self.table(index, some, proxy.names)
        classes, chances = some.draw(table.logits)
        chances = chances.clamp_min(TINY)
        terms = self.terms(table, classes, whole=False)
        value, error = estimate(terms, chances, self.powers.to(chances) * BLOCK_SPREAD)
        whole = value.abs().clamp_min(TINY)
        shares = ((terms / chances).abs() / whole[..., None]).mean(0)
        return _Population(self, index, shares, PROXY_SPREAD, classes, chances, error / whole)


@dataclass(frozen=True)
class _Population:
    """Classes of some inputs, of which as few are measured as the tolerance allows.

    Args:
        sums: what is wanted.
        index: of the inputs.
        sizes: s_c, in proportion to which classes are drawn; they sum to 1.
        spread: of w_c ‖g_c‖ over s_c, usually.
        classes: those of a first phase; None for all of them.
        chances: with which they were drawn in it.
        before: the relative error of that phase, by method. The errors of both are independent: their squares add up.
    """

    sums: ClassSums
    index: Int[Tensor, " n"]
    sizes: Float[Tensor, "n c"]
    spread: float
    classes: Int[Tensor, "n c"] | None = None
    chances: Float[Tensor, "n c"] | None = None
    before: Float[Tensor, "m n"] | None = None

    def estimate(self, found: "dict[GradientScore, Estimate]") -> Int[Tensor, " k"]:
        """Fills in the scores of these inputs; returns the index of those whose error is small enough."""
        tally = Tally.empty(len(self.sums.methods), self.sizes)
        small = torch.zeros(len(self.index), dtype=torch.bool, device=self.index.device)
        numbers, turn = self.first_numbers(), 0
        while bool(numbers.any()):
            following = torch.zeros_like(numbers)
            for number in numbers[numbers > 0].unique().tolist():
                some = (numbers == number).nonzero().flatten()
                left_out = self._measure(some, number, turn, tally)
                value, error, further = self._judge(some, tally, left_out)
                for i, m in enumerate(self.sums.methods):
                    found[m][0][self.index[some]], found[m][1][self.index[some]] = value[i], error[i]
                small[some] = further == 0
                following[some] = further.clamp_min(0)
            numbers, turn = following, turn + 1
        return self.index[small]

    def first_numbers(self) -> Int[Tensor, " n"]:
        """How many classes each input begins with: all rather than more than half; 0 if all are not enough."""
        (inputs, classes), tolerance = self.sizes.shape, self.sums.tolerance
        before = self.sizes.new_zeros(inputs) if self.before is None else self.before.amax(0)
        found = torch.where(before <= tolerance, classes, 0) if self.before is not None else None
        numbers = torch.full_like(self.index, classes) if found is None else found
        number, left = FIRST, numbers > 0
        while 2 * number <= classes and bool(left.any()):
            expected = torch.hypot(before, _expected(self.sizes, number, self.sums.power * self.spread))
            enough = left & (expected <= tolerance)
            numbers[enough] = number
            left = left & ~enough
            number = _more(number)
        return numbers

    def _measure(self, some: Int[Tensor, " k"], number: int, turn: int, tally: Tally) -> float:
        """Measure so many classes of some of these inputs; returns what layers that were left out may add."""
        if number == self.sizes.shape[1]:
            return self._measure_all(some, tally)
        if self.classes is None and turn == 0:
            drawn = self.sums.draw(number)
            table = self.sums.table(self.index[some], drawn, lam=self.sums.lam)
            classes, chances = drawn.draw(table.logits)
            places, self.sizes[some] = classes, self.sums.sizes(table.logits)
        else:
            chances = inclusion_chances(torch.where(tally.certain[some], 0, self.sizes[some]), number)
            phase = 0 if self.classes is None else SECOND
            places = walk(chances, number, generator(self.sums.job.settings.seed, STREAM, phase + turn))
            chances = chances.gather(-1, places)
            classes = places if self.classes is None else self.classes[some].gather(-1, places)
            table = self.sums.table(self.index[some], ChosenClasses(("drawn",), classes), lam=self.sums.lam)
        terms = self._terms(some, table, classes, places)
        tally.add(some, places, terms, chances, self.sums.powers.to(chances) * self.spread)
        return table.left_out

    def _measure_all(self, some: Int[Tensor, " k"], tally: Tally) -> float:
        """The same with every class."""
        places = torch.arange(self.sizes.shape[1], device=some.device).expand(len(some), -1)
        classes = places if self.classes is None else self.classes[some]
        directions = Directions(("classes",)) if self.classes is None else ChosenClasses(("drawn",), classes)
        table = self.sums.table(self.index[some], directions, lam=self.sums.lam)
        tally.replace(some, self._terms(some, table, classes, places))
        return table.left_out

    def _terms(
        self, some: Int[Tensor, " k"], table: LayerTable, classes: Int[Tensor, "k d"], places: Int[Tensor, "k d"]
    ) -> Float[Tensor, "m k d"]:
        """What each class of a table stands for, if it is one of a first phase: itself and those not drawn in it.

        Args:
            some: of these inputs.
            table: their norms.
            classes: of the table.
            places: of these classes in the population.
        """
        terms = self.sums.terms(table, classes)
        return terms if self.chances is None else terms / self.chances[some].gather(-1, places)

    def _judge(
        self, some: Int[Tensor, " k"], tally: Tally, left_out: float
    ) -> tuple[Float[Tensor, "m k"], Float[Tensor, "m k"], Int[Tensor, " k"]]:
        """The sums, their errors, and how many further classes to measure: 0 for none, -1 if that would not help."""
        classes, tolerance = self.sizes.shape[1], self.sums.tolerance
        value, error = tally.total(some)
        size = value.abs()
        fixed = self.sums.powers.to(size) * left_out * size  # which further classes do not lower
        if self.before is not None:
            fixed = torch.hypot(fixed, self.before[:, some] * size)
        whole = torch.hypot(error, fixed)
        room = ((tolerance * size).square() - fixed.square()).clamp_min(TINY)
        have = tally.number[some]
        wanted = ((error.square() / room).amax(0) * have - have).clamp(FEWEST_MORE, 2 * FIRST)
        further = torch.tensor([_at_least(x) for x in wanted.tolist()], device=some.device)
        further[2 * (have + further) > classes] = classes
        done = tally.whole[some]
        helpless = done & (self.classes is not None)  # the first phase itself has too large an error
        further = torch.where(done, torch.where(helpless, -1, 0), further)
        return value, whole, torch.where((whole <= tolerance * size).all(0), 0, further)


def _expected(sizes: Float[Tensor, "n c"], number: int, spread: float) -> Float[Tensor, " n"]:
    """The relative standard error to expect of so many classes."""
    return expected_error(sizes, inclusion_chances(sizes, number), number, spread)


def _more(number: int) -> int:
    """The next number of classes to try: 4, 6, 8, 12, 16, 24, …"""
    return number * 3 // 2 if number & (number - 1) == 0 else number * 4 // 3


def _at_least(wanted: float) -> int:
    """The first of these numbers that is no smaller."""
    number = FEWEST_MORE
    while number < wanted:
        number = _more(number)
    return number


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
