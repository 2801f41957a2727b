"""A look at the first rows before the work starts: where rows stand inside the model, what one
costs, what to trust.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from qualms.gradients.batch import NotBatchable, batch_tensors, num_samples
from qualms.gradients.directions import BLOCK_BYTES, DOUBLE
from qualms.gradients.engines.last_layer import LastProduct
from qualms.gradients.measure import Kind, measure
from qualms.gradients.memory import saved_bytes
from qualms.gradients.model_input import ModelInput, in_channels_last, wants_channels_last
from qualms.gradients.precision import at_least_float32, close_logits, same_norms, sum_of_squares
from qualms.gradients.single_sample import FirstSample, ModelProfile, random_direction
from qualms.gradients.tracing.factors import GradFactor
from qualms.gradients.tracing.outer_product import Outer
from qualms.gradients.tracing.param_use import TracePair, UseOrder, largest_result
from qualms.gradients.tracing.recorder import Recorder, collapses_rows
from qualms.gradients.tracing.traced_forward import require_uses_that_vary, trace_forward
from qualms.gradients.tracing.weights import Weights

CACHED_BYTES = 2**22
FEWEST = 4  # rows at once: with fewer, a pass costs more for each than it would save
AROUND = (
    4 * BLOCK_BYTES
)  # for a block of directions, and its copies on the way to the model's precision


@dataclass(frozen=True)
class Probe(ModelProfile):
    """What the first rows tell when they are watched."""

    trace_pair: TracePair | None  # None if there was only one row, or no room for two
    collapses: bool  # something is computed from several rows at once
    weights: Weights
    use_order: UseOrder  # of the parameters, in the first row's forward pass
    row_bytes: int  # kept by autograd for one row
    factors: list[GradFactor]
    itemsize: int
    last_product: LastProduct | None

    @classmethod
    def of(
        cls, model: nn.Module, on: ModelInput, selected: dict[str, Tensor], budget: int
    ) -> "Probe | Exception":
        """Runs the first one or two rows, by plain autograd and watched; the reason if the two do
        not agree.
        """
        first = FirstSample.of(
            model, on, selected, lambda g: sum_of_squares(at_least_float32(g).reshape(1, -1)).sqrt()
        )
        if not first.gradient:
            require_uses_that_vary(model, on)
            return NotBatchable("the first input uses none of the selected parameters")
        # Whatever goes wrong from here on is the recorder's fault, not the model's: plain autograd
        # has managed.
        try:
            return cls._watch(model, on, selected, first, budget)
        except Exception as error:
            return error

    @classmethod
    def _watch(
        cls,
        model: nn.Module,
        on: ModelInput,
        selected: dict[str, Tensor],
        first: FirstSample,
        budget: int,
    ) -> "Probe":
        expected = {name: float(norm) for name, norm in first.gradient.items()}
        # For one image alone convolutions are as fast in the plain format, and batch normalization
        # wants that one.
        channels_last = num_samples(on.batch) > 1 and wants_channels_last(first.rows)
        probe, one = cls._watch_one(model, first, selected, expected, channels_last)
        if num_samples(on.batch) == 1:
            return probe
        second = next((i for i in range(1, num_samples(on.batch)) if _differ(on, 0, i)), None)
        if second is None:
            raise NotBatchable("all inputs are the same")
        if probe.too_large(2, budget):
            return probe
        pair = probe.reformat(on.take([0, second]))
        _, two = trace_forward(model, pair, probe.weights, None)
        collapses = collapses_rows(one.shapes, two.shapes)
        trace_pair = TracePair(one.param_uses, two.param_uses).compact()
        del one, two
        z, both = trace_forward(model, pair, probe.weights, trace_pair)
        lone = torch.cat([random_direction(z), torch.zeros_like(random_direction(z))], dim=1)
        found = measure(z, lone, both.factors, probe.weights, 2, "l2")
        if not same_norms(
            {name: value[:1] for name, value in found.items()}, expected, probe.precision
        ):
            raise NotBatchable("an input's gradient depends on what else is in the batch")
        return replace(probe, trace_pair=trace_pair, collapses=collapses)

    @classmethod
    def _watch_one(
        cls,
        model: nn.Module,
        first: FirstSample,
        selected: dict[str, Tensor],
        expected: dict[str, float],
        channels_last: bool,
    ) -> "tuple[Probe, Recorder]":
        try:
            weights, z, one, kept = _first_row(model, first.rows, selected, channels_last)
        except Exception:
            # `view` on what a convolution returns needs the plain memory format.
            channels_last = False
            weights, z, one, kept = _first_row(model, first.rows, selected, channels_last)
        found = measure(z, random_direction(z), one.factors, weights, 1, "l2")
        same = close_logits(z.detach(), first.logits, first.precision)
        if not same or not same_norms(found, expected, first.precision):
            raise NotBatchable("the recorded gradient is not plain autograd's")
        last = LastProduct.of(z, one.factors, weights)
        probe = cls(
            classes=z.shape[1],
            largest_result=largest_result(one.param_uses),
            channels_last=channels_last,
            precision=first.precision,
            trace_pair=None,
            collapses=False,
            weights=weights,
            use_order=one.use_order,
            row_bytes=kept,
            factors=[piece.without_graph() for piece in one.factors],
            itemsize=z.element_size(),
            last_product=last and last.without_graph(),
        )
        return probe, one

    def serves(self, rows: int, budget: int) -> bool:
        """Whether what one row told is enough for so many."""
        return self.trace_pair is not None or rows == 1 or self.too_large(2, budget)

    def compares_alone(self, recorder: Recorder) -> bool:
        """Whether only rows alone tell if they influence each other: several may be treated alike
        in any company.
        """
        return self.collapses or not recorder.use_order.fixed

    def by_features(
        self, budget: int, rows_per_sample: int, kind: Kind, directions: Sequence[str]
    ) -> bool:
        """Whether the gradients of all classes come cheaper from those of the last layer's
        features, and fit.
        """
        last = self.last_product
        if (
            last is None
            or kind != "l2"
            or "classes" not in directions
            or not last.pays(rows_per_sample)
        ):
            return False
        rows = self._affordable(budget, rows_per_sample, kind, True) * rows_per_sample
        return rows * last.weight.shape[0] >= FEWEST * (last.weight.shape[1] + 2)

    def inputs_in(
        self,
        budget: int,
        rows_per_sample: int,
        kind: Kind,
        by_features: bool = False,
        directions: int | None = None,
    ) -> int:
        """How many inputs at once keep the work within a budget; 0 if the rows of one have to come
        in parts.

        Args:
            budget: in bytes.
            per_input: rows of an input.
            kind: of the values.
            by_features: the gradients of all classes come from those of the features.
            directions: how many there are; one for each class if not said.
        """
        affordable = self._affordable(budget, rows_per_sample, kind, by_features, directions)
        if self.trace_pair is None:
            affordable = min(affordable, 1)
        if (
            self.weights.device.type == "cpu"
        ):  # beyond this size a tensor leaves the cache, and passes get slower
            cached = CACHED_BYTES // max(1, self.largest_result * rows_per_sample)
            affordable = min(affordable, max(cached, -(-FEWEST // rows_per_sample)))
        if affordable == 0 and (rows_per_sample == 1 or self.trace_pair is not None):
            affordable = int(
                self._bytes(rows_per_sample, kind, by_features, directions, alone=True) <= budget
            )
        return affordable

    def rows_in(self, budget: int) -> int:
        """How many rows of one input at once, where its gradients are written out, keep the work
        within the budget.
        """
        one = 2 * (self.row_bytes + self.largest_result) + 6 * DOUBLE * self.classes
        return (
            max(1, (budget - 2 * self.gradient_bytes) // one) if self.trace_pair is not None else 1
        )

    def too_large(self, rows: int, budget: int) -> bool:
        """Whether a pass over so many rows, each an input, does not fit."""
        return rows * self._bytes(1, "l2", False) > budget

    @property
    def row_needs(self) -> int:
        """Bytes that one row and one of its gradients take."""
        return 2 * self.row_bytes + 2 * self.gradient_bytes

    @property
    def gradient_bytes(self) -> int:
        """Of a whole gradient, written out."""
        return sum(self.itemsize * leaf.numel() for leaf in self.weights.leaves.values())

    def _affordable(
        self,
        budget: int,
        rows_per_sample: int,
        kind: Kind,
        by_features: bool,
        directions: int | None = None,
    ) -> int:
        return max(0, budget - AROUND) // self._bytes(
            rows_per_sample, kind, by_features, directions
        )

    def _bytes(
        self,
        rows_per_sample: int,
        kind: Kind,
        by_features: bool,
        directions: int | None = None,
        alone: bool = False,
    ) -> int:
        """What the work on one input takes; `alone` in its chunk it can do without copies of large
        windows.
        """
        number = self.classes if directions is None else directions
        outers = [p.gradient for p in self.factors if isinstance(p.gradient, Outer)]
        numels = [p.gradient.numel for p in self.factors]
        passes = number + 1 if kind == "gram" else 1
        rows = rows_per_sample * (self.row_bytes * (1 + passes) + 2 * self.largest_result)
        shared = self.itemsize * sum(
            outer.count_stored(rows_per_sample, number, alone) for outer in outers
        )
        written = self.itemsize * max(numels, default=0) * (number if kind == "gram" else 2)
        one = (
            6 * DOUBLE * rows_per_sample * self.classes
        )  # one of them, its probabilities, and what they take
        results = DOUBLE * 2 * number * len(self.weights.leaves) * (number if kind == "gram" else 1)
        kept = (
            self.itemsize * self.last_product.held(rows_per_sample)
            if by_features and self.last_product
            else 0
        )
        return rows + shared + written + one + results + kept


def _first_row(
    model: nn.Module, first: ModelInput, selected: dict[str, Tensor], channels_last: bool
) -> tuple[Weights, Tensor, Recorder, int]:
    weights = Weights.of(selected, model.parameters(), channels_last)
    constants = {t.untyped_storage().data_ptr() for t in weights.stand_in.values()}
    with saved_bytes(constants) as total:
        z, recorder = trace_forward(
            model, in_channels_last(first) if channels_last else first, weights, None
        )
    return weights, z, recorder, total[0]


def _differ(on: ModelInput, i: int, j: int) -> bool:
    return on.embedding_noise is not None or any(
        not torch.equal(t[i], t[j]) for t in batch_tensors(on.batch)
    )
