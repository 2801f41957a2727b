"""Scores that are sums over many classes, from as few classes of each input as a tolerance allows.

Each input begins with as many classes as its logits say it needs. If the error that is then found
is too large, further classes are drawn and added to those before; and all are measured rather than
more than half, which leaves no error. Which classes are measured for an input depends on itself and
the seed alone. As more are drawn only where the error looks large, sums come out a little too low;
much too low where a few classes have gradients many times longer than their sizes say, and none of
them is in the sample.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qualms.gradients.batch import take_samples
from qualms.gradients.directions import Directions
from qualms.gradients.engines.class_sampling import (
    LATE_SPREAD,
    STREAM,
    WHOLE_SPREAD,
    ChosenClasses,
    SampledClasses,
    Sizes,
    Tally,
    class_lengths,
    class_sizes,
    expected_error,
    inclusion_chances,
)
from qualms.gradients.layer_table import LayerTable, layer_table
from qualms.gradients.layers import total_norms
from qualms.gradients.plan_cache import PlanCache
from qualms.gradients.request import GradientRequest
from qualms.random import generator

if TYPE_CHECKING:
    from qualms.methods.gradient_score import GradientScore

FIRST = 8  # classes that an input begins with at least
STEP = 6  # classes are added in multiples of it, so that inputs run together
FOR_LAYERS = 12  # classes that tell what each layer adds
TINY = torch.finfo(torch.double).tiny
Estimate = tuple[Float[Tensor, " b"], Float[Tensor, " b"]]  # scores and their standard errors


@dataclass(frozen=True)
class ClassSums:
    """Σ_c w_c ‖g_c‖ⁿ of a batch by several methods, with a standard error of at most the tolerance
    of each score.

    Args:
        request: the batch.
        methods: scores that are sums over classes, with the same smoothing.
        cache: what is kept of the model from batch to batch.
        head: the weight of the linear layer that gives the logits, if there is one.
        lam: the smallest λ of the methods; None if one of them takes all layers alike.
        regrouped: the logits in other company, if known (see `exact`).
    """

    request: GradientRequest
    methods: "Sequence[GradientScore]"
    cache: PlanCache
    head: Float[Tensor, "c d"] | None
    lam: float | None
    regrouped: Float[Tensor, "b c"] | None = None

    @property
    def tolerance(self) -> float:
        """The standard error that a score may have, as a share of its value."""
        return self.request.settings.tolerance or 0.0

    @property
    def power(self) -> int:
        """The highest power of a norm."""
        return max(m.power for m in self.methods)

    @property
    def spread(self) -> float:
        """Of ‖g_c‖ over what the classifier's rows say of it, usually."""
        return LATE_SPREAD if self.lam is not None and self.lam > 0 else WHOLE_SPREAD

    @property
    def powers(self) -> Float[Tensor, "m 1"]:
        """That of each method."""
        return torch.tensor([[float(m.power)] for m in self.methods], dtype=torch.double)

    def first_numbers(self, logits: Float[Tensor, "b c"]) -> Int[Tensor, " b"]:
        """How many classes each input begins with: all rather than more than half."""
        sizes, classes = self.sizes(logits), logits.shape[1]
        numbers = torch.full((len(logits),), classes, device=logits.device)
        number, left = FIRST, torch.ones_like(numbers, dtype=torch.bool)
        while 2 * number <= classes and bool(left.any()):
            chances = inclusion_chances(sizes, number)
            expected = expected_error(sizes, chances, number, self.power * self.spread)
            enough = left & (expected <= self.tolerance)
            numbers[enough] = number
            left = left & ~enough
            number = _more(number)
        return numbers

    def estimate(self, logits: Float[Tensor, "b c"]) -> "dict[GradientScore, Estimate]":
        """The scores and their errors."""
        found = self._attempt(logits)
        while found is None:
            found = self._attempt(logits)
        return {m: (values, errors) for m, values, errors in zip(self.methods, *found, strict=True)}

    def _attempt(
        self, logits: Float[Tensor, "b c"]
    ) -> tuple[Float[Tensor, "m b"], Float[Tensor, "m b"]] | None:
        """The same; None if fewer early layers are left out at the end than at the start: terms
        must be of one kind.
        """
        values, errors = logits.new_zeros(2, len(self.methods), len(logits))
        tally = Tally.empty(len(self.methods), self.sizes(logits))
        numbers, turn = self.first_numbers(logits), 0
        early: int | None = None
        while bool(numbers.any()):
            following = torch.zeros_like(numbers)
            for number in numbers[numbers > 0].unique().tolist():
                index = (numbers == number).nonzero().flatten()
                table = self._measure(index, number, turn, tally)
                early = table.num_left_out if early is None else early
                if table.num_left_out != early:
                    return None
                values[:, index], errors[:, index], following[index] = self._judge(
                    index, tally, table.left_out
                )
            numbers, turn = following, turn + 1
        return values, errors

    def sizes(self, logits: Float[Tensor, "b c"]) -> Float[Tensor, "b c"]:
        """The sizes of the classes of each input."""
        return _sizes(self.methods, self.head)(logits.double().softmax(-1))

    def _measure(
        self, index: Int[Tensor, " n"], number: int, turn: int, tally: Tally
    ) -> LayerTable:
        """Measure so many classes of some inputs, in addition to those before.

        Args:
            index: of the inputs.
            number: of classes.
            turn: how often classes of these inputs were measured before.
            tally: where their terms are added.

        Returns:
            Their norms.
        """
        if number == tally.sizes.shape[1]:
            table = self._table(index, Directions(("classes",)))
            every = torch.arange(number, device=index.device).expand(len(index), -1)
            tally.replace(index, self._terms(table, every))
            return table
        if (
            turn == 0
            # by the logits of the inputs as the engine runs them: alone, if they influence each other
        ):
            sizes = _sizes(self.methods, self.head)
            drawn = SampledClasses(("drawn",), sizes, number, self.request.settings.seed)
            table = self._table(index, drawn)
            classes, chances = drawn.draw(table.logits)
            tally.sizes[index] = self.sizes(table.logits)
        else:
            classes, chances = tally.draw(
                index, number, generator(self.request.settings.seed, STREAM, turn)
            )
            table = self._table(index, ChosenClasses(("drawn",), classes))
        tally.add(
            index,
            classes,
            chances,
            self._terms(table, classes),
            self.powers.to(chances) * self.spread,
        )
        return table

    def _table(self, index: Int[Tensor, " n"], directions: Directions) -> LayerTable:
        """The norms of some inputs along other directions than those of the job."""
        chosen = index.tolist()
        numbers = [self.request.numbers[i] for i in chosen]
        request = replace(
            self.request,
            batch=take_samples(self.request.batch, chosen),
            numbers=numbers,
            directions=directions,
        )
        regrouped = None if self.regrouped is None else self.regrouped[index]
        return layer_table([request], self.cache, regrouped=regrouped, lam=self.lam)

    def _terms(self, table: LayerTable, classes: Int[Tensor, "n d"]) -> Float[Tensor, "m n d"]:
        """w_c ‖g_c‖ⁿ of the classes of a table, by each of m methods."""
        found = []
        for m in self.methods:
            norms = total_norms(table.values.double(), m.layers, self.request.settings.norm)
            found.append(m.weights_at(table.logits).gather(-1, classes) * norms**m.power)
        return torch.stack(found)

    def _judge(
        self, index: Int[Tensor, " n"], tally: Tally, left_out: float
    ) -> tuple[Float[Tensor, "m n"], Float[Tensor, "m n"], Int[Tensor, " n"]]:
        """The sums of some inputs, their errors, and how many further classes to measure; 0 for
        none.
        """
        classes, tolerance = tally.sizes.shape[1], self.tolerance
        value, error = tally.total(index)
        size = value.abs()
        fixed = self.powers.to(size) * left_out * size  # which further classes do not lower
        whole = torch.hypot(error, fixed)
        room = ((tolerance * size).square() - fixed.square()).clamp_min(TINY)
        have = tally.number[index]
        wanted = ((error.square() / room).amax(0) * have - have).clamp(1).minimum(2.0 * have)
        further = (wanted / STEP).ceil().long() * STEP
        further[2 * (have + further + tally.certain[index].sum(-1)) > classes] = classes
        done = tally.whole[index] | (whole <= tolerance * size).all(0)
        return value, whole, torch.where(done, 0, further)


def _more(number: int) -> int:
    """The next number of classes to try: 8, 10, 12, 15, 18, 22, …"""
    return number + max(2, number // 4)


def layer_sums_by_few_classes(
    request: GradientRequest,
    method: "GradientScore",
    cache: PlanCache,
    head: Float[Tensor, "c d"] | None,
) -> tuple[list[str], Float[Tensor, "b l"]]:
    """Σ_c w_c ‖g_cl‖ⁿ of every layer l, from some of the classes: enough for a bar chart.

    Args:
        request: the batch.
        method: a sum over classes.
        cache: what is kept of the model from batch to batch.
        head: the weight of the linear layer that gives the logits, if there is one.
    """
    some = SampledClasses(("drawn",), _sizes([method], head), FOR_LAYERS, request.settings.seed)
    table = layer_table([replace(request, directions=some)], cache)
    classes, chances = some.draw(table.logits)
    weights = method.weights_at(table.logits).gather(-1, classes) / chances.clamp_min(
        torch.finfo(torch.double).tiny
    )
    return table.layers, torch.einsum("bm,bml->bl", weights, table.values.double() ** method.power)


def _sizes(methods: "Sequence[GradientScore]", head: Float[Tensor, "c d"] | None) -> Sizes:
    """The sizes of classes by which they are drawn: the mean of what they are to each method."""

    def sizes(probs: Tensor) -> Tensor:
        lengths = class_lengths(probs, head)
        return torch.stack([class_sizes(m.weights(probs), lengths, m.power) for m in methods]).mean(
            0
        )

    return sizes
