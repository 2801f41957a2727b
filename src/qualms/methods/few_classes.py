"""Scores that are sums over many classes, estimated from as few classes as a tolerance allows.

Each input begins with as many classes as its logits suggest. If the error is then too large,
further classes are drawn and added to those before. If more than half of the classes would be
needed, all are measured, which leaves no error. Which classes are measured for an input depends on
that input and the seed alone.

Further classes are drawn only where the error looks large, so sums come out a little too low. They
are much too low if a few classes have gradients many times longer than expected, and the sample has
none of these classes.
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
from qualms.methods.method import Estimate
from qualms.random import generator

if TYPE_CHECKING:
    from qualms.methods.gradient_score import GradientScore

FIRST = 8  # the least number of classes that an input begins with
# Classes are added in multiples of it, so that inputs run together.
STEP = 6
# The number of classes that `layer_sums_by_few_classes` measures.
FOR_LAYERS = 12
TINY = torch.finfo(torch.double).tiny


@dataclass(frozen=True)
class ClassSums:
    """Estimates Σ_c w_c ‖g_c‖ⁿ of a batch by several methods, with errors within the tolerance.

    `head`, the last linear layer's weight, helps to guess which classes count most.

    Attributes:
        request: the batch, with the settings of the gradients.
        methods: scores that are sums over classes, with the same smoothing.
        cache: what the engines have learned about the model.
        head: the weight of the linear layer that computes the logits, if there is one.
        lam: the smallest λ of the methods; None if one of them weights layers equally.
        known_logits: logits of a plain forward pass, which the exact engine compares its own with;
            None to skip the comparison.
    """

    request: GradientRequest
    methods: "Sequence[GradientScore]"
    cache: PlanCache
    head: Float[Tensor, "c d"] | None
    lam: float | None
    known_logits: Float[Tensor, "b c"] | None = None

    @property
    def tolerance(self) -> float:
        """The standard error that a score may have, relative to its value."""
        return self.request.settings.tolerance or 0.0

    @property
    def power(self) -> int:
        """The highest power n of a norm among the methods."""
        return max(m.power for m in self.methods)

    @property
    def spread(self) -> float:
        """The usual relative deviation of ‖g_c‖ from what the classifier's weight rows predict.

        It is smaller if early layers count less in all methods.
        """
        is_late = self.lam is not None and self.lam > 0
        return LATE_SPREAD if is_late else WHOLE_SPREAD

    @property
    def powers(self) -> Float[Tensor, "m 1"]:
        """The power n of the norms in each of the m methods, as a column."""
        return torch.tensor([[float(m.power)] for m in self.methods], dtype=torch.double)

    def first_numbers(self, logits: Float[Tensor, "b c"]) -> Int[Tensor, " b"]:
        """Compute how many classes each input begins with; all of them if half would not be enough.

        It is the least number tried whose expected error is within the tolerance.
        """
        sizes = self.sizes(logits)
        classes = logits.shape[1]
        numbers = torch.full((len(logits),), classes, device=logits.device)
        is_open = torch.ones_like(numbers, dtype=torch.bool)  # inputs without a number yet
        number = FIRST
        while 2 * number <= classes and bool(is_open.any()):
            chances = inclusion_chances(sizes, number)
            expected = expected_error(sizes, chances, number, self.power * self.spread)
            is_enough = is_open & (expected <= self.tolerance)
            numbers[is_enough] = number
            is_open = is_open & ~is_enough
            number = _next_number(number)
        return numbers

    def estimate(self, logits: Float[Tensor, "b c"]) -> "dict[GradientScore, Estimate]":
        """Estimate the scores of all methods, with standard errors.

        Args:
            logits: the logits of a plain forward pass.
        """
        sums = self._attempt(logits)
        # Fewer early layers are skipped by now: begin anew.
        while sums is None:
            sums = self._attempt(logits)
        values, errors = sums
        estimates: dict[GradientScore, Estimate] = {}
        for i, method in enumerate(self.methods):
            estimates[method] = Estimate(values[i], errors[i])
        return estimates

    def _attempt(
        self,
        logits: Float[Tensor, "b c"],
    ) -> tuple[Float[Tensor, "m b"], Float[Tensor, "m b"]] | None:
        """Measure classes until the errors of all inputs are within the tolerance.

        Returns:
            The sums of the m methods and their errors. None if fewer early layers were skipped in a
            later turn than in the first: all terms must be sums over the same layers.
        """
        values, errors = logits.new_zeros(2, len(self.methods), len(logits))
        tally = Tally.empty(len(self.methods), self.sizes(logits))
        numbers = self.first_numbers(logits)
        turn = 0
        num_skipped: int | None = None
        while bool(numbers.any()):
            # How many classes each input measures next.
            following = torch.zeros_like(numbers)
            for number in numbers[numbers > 0].unique().tolist():
                index = (numbers == number).nonzero().flatten()
                table = self._measure(index, number, turn, tally)
                if num_skipped is None:
                    num_skipped = table.num_left_out
                if table.num_left_out != num_skipped:
                    return None
                values[:, index], errors[:, index], following[index] = self._check(
                    index, tally, table.left_out
                )
            numbers = following
            turn += 1
        return values, errors

    def sizes(self, logits: Float[Tensor, "b c"]) -> Float[Tensor, "b c"]:
        """Guess |w_c| ‖g_c‖ⁿ of each class up to a factor; classes are drawn by these sizes."""
        return _mean_sizes(self.methods, self.head)(logits.double().softmax(-1))

    def _measure(
        self,
        index: Int[Tensor, " n"],
        number: int,
        turn: int,
        tally: Tally,
    ) -> LayerTable:
        """Measure further classes of some inputs, and add their terms to the tally.

        Args:
            index: the indices of the n inputs in the batch.
            number: how many classes to measure for each of these inputs.
            turn: how many turns these inputs had before; it decides the random draw.
            tally: the terms of all inputs so far; changed in place.

        Returns:
            The gradient norms of the measured classes.
        """
        seed = self.request.settings.seed
        if number == tally.sizes.shape[1]:
            table = self._table(index, Directions(("classes",)))
            all_classes = torch.arange(number, device=index.device).expand(len(index), -1)
            tally.replace(index, self._terms(table, all_classes))
            return table
        if turn == 0:
            # The engine's own logits decide the draw. If inputs influence each other it runs them
            # alone, and these logits differ from those of the plain pass.
            sample = SampledClasses(("drawn",), _mean_sizes(self.methods, self.head), number, seed)
            table = self._table(index, sample)
            classes, chances = sample.draw(table.logits)
            tally.sizes[index] = self.sizes(table.logits)
        else:
            classes, chances = tally.draw(index, number, generator(seed, STREAM, turn))
            table = self._table(index, ChosenClasses(("drawn",), classes))
        spreads = self.powers.to(chances) * self.spread
        tally.add(index, classes, chances, self._terms(table, classes), spreads)
        return table

    def _table(self, index: Int[Tensor, " n"], directions: Directions) -> LayerTable:
        """Compute the gradient norms of some inputs along given directions.

        Args:
            index: the indices of the inputs in the batch.
            directions: the directions, which replace those of the request.
        """
        samples = index.tolist()
        request = replace(
            self.request,
            batch=take_samples(self.request.batch, samples),
            numbers=[self.request.numbers[i] for i in samples],
            directions=directions,
        )
        known_logits = None if self.known_logits is None else self.known_logits[index]
        return layer_table([request], self.cache, regrouped=known_logits, lam=self.lam)

    def _terms(self, table: LayerTable, classes: Int[Tensor, "n d"]) -> Float[Tensor, "m n d"]:
        """Compute w_c ‖g_c‖ⁿ of the classes of a table, for each of the m methods.

        Args:
            table: gradient norms of n inputs along d directions, one for each class.
            classes: the classes of these directions.
        """
        terms: list[Tensor] = []
        for m in self.methods:
            norms = total_norms(table.values.double(), m.layers, self.request.settings.norm)
            weights = m.weights_at(table.logits).gather(-1, classes)
            terms.append(weights * norms**m.power)
        return torch.stack(terms)

    def _check(
        self,
        index: Int[Tensor, " n"],
        tally: Tally,
        left_out: float,
    ) -> tuple[Float[Tensor, "m n"], Float[Tensor, "m n"], Int[Tensor, " n"]]:
        """Compare the errors of some inputs with the tolerance.

        Args:
            index: the indices of the n inputs in the batch.
            tally: the terms of all inputs so far.
            left_out: the largest share of a score that the skipped early layers contribute.

        Returns:
            The sums of the m methods, their errors, and how many further classes to measure for
            each input, 0 for none.
        """
        classes = tally.sizes.shape[1]
        value, error = tally.total(index)
        size = value.abs()  # the tolerance is relative to it
        # Error that further classes do not lower.
        fixed = self.powers.to(size) * left_out * size
        whole = torch.hypot(error, fixed)
        # What the squared sampling error may be. It falls like 1 / (number of classes), so the
        # method that needs most classes decides how many are missing: at least one, at most twice
        # as many as were measured.
        room = ((self.tolerance * size).square() - fixed.square()).clamp_min(TINY)
        measured = tally.num_drawn[index]
        missing = (error.square() / room).amax(0) * measured - measured
        missing = missing.clamp(1).minimum(2.0 * measured)
        further = (missing / STEP).ceil().long() * STEP
        # Measure all classes rather than more than half of them.
        further[2 * (measured + further + tally.is_certain[index].sum(-1)) > classes] = classes
        is_done = tally.is_complete[index] | (whole <= self.tolerance * size).all(0)
        return value, whole, torch.where(is_done, 0, further)


def _next_number(number: int) -> int:
    """Return the next number of classes to try: 8, 10, 12, 15, 18, 22, …"""
    return number + max(2, number // 4)


def layer_sums_by_few_classes(
    request: GradientRequest,
    method: "GradientScore",
    cache: PlanCache,
    head: Float[Tensor, "c d"] | None,
) -> tuple[list[str], Float[Tensor, "b l"]]:
    """Estimate Σ_c w_c ‖g_cl‖ⁿ of every layer l from a few classes: enough for a bar chart.

    Args:
        request: the batch, with the settings of the gradients.
        method: a score that is a sum over classes.
        cache: what the engines have learned about the model.
        head: the weight of the linear layer that computes the logits, if there is one.

    Returns:
        The names of the layers, and their sums.
    """
    sizes = _mean_sizes([method], head)
    sample = SampledClasses(("drawn",), sizes, FOR_LAYERS, request.settings.seed)
    table = layer_table([replace(request, directions=sample)], cache)
    classes, chances = sample.draw(table.logits)
    weights = method.weights_at(table.logits).gather(-1, classes) / chances.clamp_min(TINY)
    return table.layers, torch.einsum("bm,bml->bl", weights, table.values.double() ** method.power)


def _mean_sizes(methods: "Sequence[GradientScore]", head: Float[Tensor, "c d"] | None) -> Sizes:
    """Create the function that computes from probabilities the sizes by which classes are drawn.

    The size of a class guesses |w_c| ‖g_c‖ⁿ up to a factor. It is the mean of one guess for each
    method.

    Args:
        methods: the scores.
        head: the weight of the linear layer that computes the logits, if there is one.
    """

    def sizes(probs: Tensor) -> Tensor:
        """Compute the sizes [b, c] from the probabilities [b, c]."""
        lengths = class_lengths(probs, head)
        per_method = [class_sizes(m.weights(probs), lengths, m.power) for m in methods]
        return torch.stack(per_method).mean(0)

    return sizes
