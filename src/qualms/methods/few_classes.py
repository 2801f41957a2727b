"""Scores that are sums over many classes, estimated from as few classes as a tolerance allows.

In the first round, each input has as many classes measured as its logits suggest. Inputs whose
error is then too large have further classes drawn and measured in the next round, and so on. If
more than half of the classes would be needed, all are measured, which leaves no error. Which
classes are measured for an input depends on that input and the seed alone.

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

FIRST = 8  # the smallest number of classes in the first round
# Later rounds have a multiple of so many classes: inputs with the same number run together.
STEP = 6
# The number of classes from which the sums of single layers are estimated.
FOR_LAYERS = 12
TINY = torch.finfo(torch.double).tiny


@dataclass(frozen=True)
class ClassSums:
    """Estimates Σ_c w_c ‖g_c‖ⁿ of each input by several methods, with errors within the tolerance.

    g_c is the gradient of log p_c for class c, w_c its weight in the score, and n the power of the
    method.

    Attributes:
        request: the batch, with the settings of the gradients.
        methods: m scores that are sums over classes, with the same smoothing.
        cache: what the engines have learned about the model.
        head: the weight of the linear layer that computes the logits, which helps to guess which
            classes count most; None if there is no such layer.
    """

    request: GradientRequest
    methods: "Sequence[GradientScore]"
    cache: PlanCache
    head: Float[Tensor, "c d"] | None

    @property
    def tolerance(self) -> float:
        """The standard error that a score may have, relative to its value."""
        return self.request.settings.tolerance or 0.0

    @property
    def power(self) -> int:
        """The highest power of the gradient norms among the methods: 1 or 2."""
        return max(m.power for m in self.methods)

    @property
    def spread(self) -> float:
        """The usual relative deviation of ‖g_c‖ from what the classifier's weight rows predict.

        It is smaller if early layers count less in all methods.
        """
        lam = self.request.smallest_lambda
        has_layer_weights = lam is not None and lam > 0
        return LATE_SPREAD if has_layer_weights else WHOLE_SPREAD

    @property
    def powers(self) -> Float[Tensor, "m 1"]:
        """The power of the gradient norms in each of the m methods, as a column to broadcast."""
        return torch.tensor([[float(m.power)] for m in self.methods], dtype=torch.double)

    def choose_first_numbers(self, logits: Float[Tensor, "b c"]) -> Int[Tensor, " b"]:
        """Choose how many classes of each input to measure in the first round.

        It is the smallest number tried whose expected error is within the tolerance; all classes,
        if half of them would not be enough.

        Args:
            logits: the logits of a plain forward pass.
        """
        sizes = self.guess_sizes(logits)
        num_classes = logits.shape[1]
        numbers = torch.full((len(logits),), num_classes, device=logits.device)
        is_undecided = torch.ones_like(numbers, dtype=torch.bool)
        number = FIRST
        while 2 * number <= num_classes and bool(is_undecided.any()):
            chances = inclusion_chances(sizes, number)
            expected = expected_error(sizes, chances, number, self.power * self.spread)
            is_enough = is_undecided & (expected <= self.tolerance)
            numbers[is_enough] = number
            is_undecided = is_undecided & ~is_enough
            # 8, 10, 12, 15, 18, 22, …
            number += max(2, number // 4)
        return numbers

    def estimate(self, logits: Float[Tensor, "b c"]) -> "dict[GradientScore, Estimate]":
        """Estimate the scores of all methods, with standard errors.

        Args:
            logits: the logits of a plain forward pass.
        """
        sums = self._measure_rounds(logits)
        # None if the engine began to skip fewer early layers on the way: measure all rounds again.
        while sums is None:
            sums = self._measure_rounds(logits)
        values, errors = sums
        estimates: dict[GradientScore, Estimate] = {}
        for i, method in enumerate(self.methods):
            estimates[method] = Estimate(values[i], errors[i])
        return estimates

    def _measure_rounds(
        self,
        logits: Float[Tensor, "b c"],
    ) -> tuple[Float[Tensor, "m b"], Float[Tensor, "m b"]] | None:
        """Measure classes, round by round, until the errors of all inputs are within the tolerance.

        Args:
            logits: the logits of a plain forward pass.

        Returns:
            The sums by m methods and their errors. None if the engine began to skip fewer early
            layers on the way: all terms must be sums over the same layers.
        """
        values, errors = logits.new_zeros(2, len(self.methods), len(logits))
        tally = Tally.empty(len(self.methods), self.guess_sizes(logits))
        # How many classes of each input to measure in this round.
        numbers = self.choose_first_numbers(logits)
        round_index = 0
        num_skipped: int | None = None  # the number of early layers that are skipped
        while bool(numbers.any()):
            next_numbers = torch.zeros_like(numbers)
            # Inputs with the same number of classes run together.
            for number in numbers[numbers > 0].unique().tolist():
                index = (numbers == number).nonzero().flatten()
                table = self._measure(index, number, round_index, tally)
                if num_skipped is None:
                    num_skipped = table.num_left_out
                if table.num_left_out != num_skipped:
                    return None
                checked = self._check(index, tally, table.left_out)
                values[:, index], errors[:, index], next_numbers[index] = checked
            numbers = next_numbers
            round_index += 1
        return values, errors

    def guess_sizes(self, logits: Float[Tensor, "b c"]) -> Float[Tensor, "b c"]:
        """Guess |w_c| ‖g_c‖ⁿ of each class up to a factor; classes are drawn in proportion to it."""
        return _create_size_function(self.methods, self.head)(logits.double().softmax(-1))

    def _measure(
        self,
        index: Int[Tensor, " n"],
        number: int,
        round_index: int,
        tally: Tally,
    ) -> LayerTable:
        """Measure further classes of some inputs, and add their terms w_c ‖g_c‖ⁿ to the tally.

        The classes are all classes, or a random sample that is drawn here.

        Args:
            index: the indices of the n inputs in the batch.
            number: how many classes to measure for each of these inputs.
            round_index: how many rounds these inputs had before; with the seed it decides the draw.
            tally: the terms of all inputs so far; changed in place.

        Returns:
            The gradient norms of the measured classes.
        """
        seed = self.request.settings.seed
        num_classes = tally.sizes.shape[1]
        if number == num_classes:
            table = self._measure_norms(index, Directions(("classes",)))
            all_classes = torch.arange(number, device=index.device).expand(len(index), -1)
            tally.replace(index, self._compute_terms(table, all_classes))
            return table
        if round_index == 0:
            # The engine's own logits decide the draw. If inputs influence each other it runs each
            # input alone, and these logits differ from those of the plain forward pass.
            sizes = _create_size_function(self.methods, self.head)
            sample = SampledClasses(
                ("drawn",),
                sizes=sizes,
                num_drawn=number,
                seed=seed,
            )
            table = self._measure_norms(index, sample)
            # Draws the engine's classes again: the same logits give the same draw.
            classes, chances = sample.draw(table.logits)
            tally.sizes[index] = self.guess_sizes(table.logits)
        else:
            classes, chances = tally.draw(index, number, generator(seed, STREAM, round_index))
            table = self._measure_norms(index, ChosenClasses(("drawn",), classes))
        # The spread of norms, times n, is about that of their n-th powers.
        spreads = self.powers.to(chances) * self.spread
        tally.add(index, classes, chances, self._compute_terms(table, classes), spreads)
        return table

    def _measure_norms(
        self,
        index: Int[Tensor, " n"],
        directions: Directions,
    ) -> LayerTable:
        """Compute the gradient norms of some inputs along given directions.

        Args:
            index: the indices of the n inputs in the batch.
            directions: the directions, which replace those of the request.
        """
        request = replace(self.request.take(index.tolist()), directions=directions)
        return layer_table([request], self.cache)

    def _compute_terms(
        self,
        table: LayerTable,
        classes: Int[Tensor, "n d"],
    ) -> Float[Tensor, "m n d"]:
        """Compute the term w_c ‖g_c‖ᵏ of each class c in the sums of the m methods.

        w_c is the weight of the class in the method, and k the method's power.

        Args:
            table: gradient norms of n inputs along d directions, one for each measured class.
            classes: the measured classes.
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
        """Compute sums and errors of some inputs, and how many further classes these still need.

        Args:
            index: the indices of the n inputs in the batch.
            tally: the terms of all inputs so far.
            left_out: the largest share of a score that the skipped early layers contribute.

        Returns:
            The sums by m methods, their errors, and how many further classes to measure for each
            input; 0 if all classes are measured, or if its errors are within the tolerance.
        """
        num_classes = tally.sizes.shape[1]
        values, sampling_errors = tally.total(index)
        magnitudes = values.abs()  # the tolerance is relative to them
        # The error by skipped layers, which further classes do not lower.
        layer_errors = self.powers.to(magnitudes) * left_out * magnitudes
        errors = torch.hypot(sampling_errors, layer_errors)
        # What the squared sampling error may be. It falls like 1 / (number of classes), so the
        # method that needs most classes decides how many are missing: at least one, at most twice
        # as many as were measured.
        allowed = (self.tolerance * magnitudes).square() - layer_errors.square()
        num_measured = tally.num_drawn[index]
        needed_ratio = (sampling_errors.square() / allowed.clamp_min(TINY)).amax(0)
        missing = needed_ratio * num_measured - num_measured
        missing = missing.clamp(1).minimum(2.0 * num_measured)
        further = (missing / STEP).ceil().long() * STEP
        # Measure all classes rather than more than half of them.
        num_certain = tally.is_certain[index].sum(-1)
        further[2 * (num_measured + further + num_certain) > num_classes] = num_classes
        is_done = tally.is_complete[index] | (errors <= self.tolerance * magnitudes).all(0)
        return values, errors, torch.where(is_done, 0, further)


def layer_sums_by_few_classes(
    request: GradientRequest,
    method: "GradientScore",
    cache: PlanCache,
    head: Float[Tensor, "c d"] | None,
) -> tuple[list[str], Float[Tensor, "b l"]]:
    """Estimate Σ_c w_c ‖g_cl‖ⁿ of every layer l roughly, from `FOR_LAYERS` drawn classes c.

    g_cl is the part of the gradient of log p_c that belongs to layer l, w_c the weight of the class
    in the score, and n the power of the score.

    Args:
        request: the batch, with the settings of the gradients.
        method: a score that is a sum over classes.
        cache: what the engines have learned about the model.
        head: the weight of the linear layer that computes the logits; None if there is none.

    Returns:
        The names of the layers, and their sums.
    """
    sizes = _create_size_function([method], head)
    seed = request.settings.seed
    sample = SampledClasses(
        ("drawn",),
        sizes=sizes,
        num_drawn=FOR_LAYERS,
        seed=seed,
    )
    table = layer_table([replace(request, directions=sample)], cache)
    # Draws the engine's classes again: the same logits give the same draw.
    classes, chances = sample.draw(table.logits)
    # Divided by its chance of being drawn, each class also stands for classes that were not drawn.
    weights = method.weights_at(table.logits).gather(-1, classes) / chances.clamp_min(TINY)
    return table.layers, torch.einsum("bm,bml->bl", weights, table.values.double() ** method.power)


def _create_size_function(
    methods: "Sequence[GradientScore]", head: Float[Tensor, "c d"] | None
) -> Sizes:
    """Create a function from probabilities to the sizes of classes, by which classes are drawn.

    The size of class c guesses, up to a factor, its term |w_c| ‖g_c‖ⁿ in a score, with w_c the
    weight of the class, g_c the gradient of log p_c, and n the power of the score. It is the mean
    of one guess for each score.

    Args:
        methods: the scores.
        head: the weight of the linear layer that computes the logits; None if there is none.
    """

    def compute_sizes(probs: Tensor) -> Tensor:
        """Compute the sizes [b, c] from the probabilities [b, c]."""
        lengths = class_lengths(probs, head)
        per_method = [class_sizes(m.weights(probs), lengths, m.power) for m in methods]
        return torch.stack(per_method).mean(0)

    return compute_sizes
