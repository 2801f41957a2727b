"""The plan of the exact engine: what the first samples show of the model, and what the work costs.

Planning runs one sample by plain autograd and traced, then two samples traced: the axis that doubles
counts the samples, and the gradient of the first sample must be the same in all three. From the
traces the plan counts work and memory, which decide how many samples run at once and how.
"""

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from qualms.gradients.batch import NotBatchable, batch_tensors, num_samples
from qualms.gradients.directions import BLOCK_BYTES, DOUBLE
from qualms.gradients.fallback import Fallback, attempt
from qualms.gradients.last_layer import LastProduct, count_multiplications
from qualms.gradients.measure import Pullback, measure
from qualms.gradients.memory import saved_bytes
from qualms.gradients.model_input import ModelInput, in_channels_last, wants_channels_last
from qualms.gradients.precision import at_least_float32, close_logits, same_norms, sum_of_squares
from qualms.gradients.request import GradientRequest
from qualms.gradients.settings import Kind
from qualms.gradients.single_sample import FirstSample, ModelProfile, random_direction
from qualms.gradients.tracing.factors import GradFactor
from qualms.gradients.tracing.outer_product import Outer
from qualms.gradients.tracing.param_use import TracePair, UseOrder, Weights, largest_result, roots
from qualms.gradients.tracing.recorder import Recorder, collapses_rows
from qualms.gradients.tracing.traced_forward import require_uses_that_vary, trace_forward

CACHED_BYTES = 2**22  # of the largest result of a pass: a larger one leaves the processor's cache
MIN_ROWS = 4  # with fewer at once a pass costs more for each than it would save
PLANNING_ROWS = 16  # among which planning looks for two that differ
# For a block of directions, and its copies on the way to the model's precision.
BLOCK_AND_COPIES = 4 * BLOCK_BYTES


@dataclass(frozen=True)
class Workload:
    """What is computed for each sample.

    Attributes:
        rows_per_sample: how many rows a sample has.
        kind: of the values.
        directions: how many gradients there are.
        via_last_layer: whether those of all classes come from those of the last layer's features.
    """

    rows_per_sample: int
    kind: Kind
    directions: int
    via_last_layer: bool = False


@dataclass(frozen=True)
class Plan(ModelProfile):
    """What planning found out about a model, for samples of one shape.

    Attributes:
        trace_pair: the traces of one sample and of two, which show the sample axis of every tensor;
            None if there was only one sample, or no room for two.
        mixes_samples: whether something is computed from several samples at once.
        weights: the parameters as leaves of our own.
        use_order: the order in which the forward pass uses the parameters.
        row_bytes: what autograd keeps for one row.
        factors: of the gradients of one row, without their graph.
        itemsize: bytes of one number.
        last_product: the last linear layer, if the model ends in one.
        is_reused: whether the plan was made for another batch.
    """

    trace_pair: TracePair | None
    mixes_samples: bool
    weights: Weights
    use_order: UseOrder
    row_bytes: int
    factors: list[GradFactor]
    itemsize: int
    last_product: LastProduct | None
    is_reused: bool = False

    def serves(self, request: GradientRequest) -> bool:
        """Whether what one row has shown is enough for the rows of a request."""
        rows = request.num_samples * request.rows_per_sample
        return self.trace_pair is not None or rows == 1 or self.is_too_large(2, request.budget)

    def needs_single_row_check(self, recorder: Recorder) -> bool:
        """Whether only rows on their own show that they do not influence each other.

        Where the model reads values, or computes something from all samples, it may treat several
        samples alike in any batch.
        """
        return self.mixes_samples or not recorder.use_order.fixed

    # Counted work.

    def pass_cost(
        self,
        directions: int,
        names: frozenset[str] | None = None,
    ) -> float:
        """Multiplications of one backward pass, norms included, as a share of a forward pass.

        Args:
            directions: how many passes share what is computed once.
            names: the parameters whose gradients are wanted; None for all. A pass goes no further
                than they do.
        """
        forward, backward = 0, 0
        for factor in self.factors:
            of_factor = _forward_multiplications(factor)
            forward += of_factor
            if names is None or not names.isdisjoint(roots(factor.target, self.weights)):
                backward += of_factor + count_multiplications(factor, 1, directions)
        return backward / max(1, forward)

    def passes_for_all_classes(self, request: GradientRequest) -> int:
        """How many backward passes the gradients of all classes of one row take."""
        one_row = replace(request, smoothing=None, gram=False)
        if self.last_product is not None and self._prefers_last_layer(one_row, ("classes",)):
            return self.last_product.weight.shape[1] + 2
        return self.classes

    def workload(self, request: GradientRequest) -> Workload:
        """What a request takes for each sample, by the cheaper way."""
        rows = request.rows_per_sample
        if self._prefers_last_layer(request, request.directions.names):
            return Workload(rows, request.kind, self.classes, via_last_layer=True)
        return Workload(rows, request.kind, request.directions.size(self.classes))

    def _prefers_last_layer(
        self,
        request: GradientRequest,
        directions: tuple[str, ...],
    ) -> bool:
        """Whether all classes come cheaper from the last layer's features, and fit."""
        last, rows = self.last_product, request.rows_per_sample
        if last is None or request.kind != "l2" or "classes" not in directions:
            return False
        if not last.pays(rows):
            return False
        work = Workload(rows, "l2", self.classes, via_last_layer=True)
        at_once = self._samples_within(request.budget, work) * rows
        classes, width = last.weight.shape
        return at_once * classes >= MIN_ROWS * (width + 2)

    # Counted memory.

    def samples_at_once(self, budget: int, work: Workload) -> int:
        """How many samples fit a budget; 0 if the rows of one have to come in parts.

        Args:
            budget: in bytes.
            work: what is computed for each of them.
        """
        affordable = self._samples_within(budget, work)
        if self.trace_pair is None:
            affordable = min(affordable, 1)
        if self.weights.device.type == "cpu":
            rows = work.rows_per_sample
            in_cache = CACHED_BYTES // max(1, self.largest_result * rows)
            affordable = min(affordable, max(in_cache, -(-MIN_ROWS // rows)))
        if affordable == 0 and (work.rows_per_sample == 1 or self.trace_pair is not None):
            affordable = int(self._sample_bytes(work, is_alone=True) <= budget)
        return affordable

    def rows_at_once(self, budget: int) -> int:
        """How many rows of one sample fit a budget where its gradients are written out."""
        if self.trace_pair is None:
            return 1
        one = 2 * (self.row_bytes + self.largest_result) + 6 * DOUBLE * self.classes
        return max(1, (budget - 2 * self.gradient_bytes) // one)

    def is_too_large(self, rows: int, budget: int) -> bool:
        """Whether a pass over so many rows, each a sample, does not fit."""
        return rows * self._sample_bytes(Workload(1, "l2", self.classes)) > budget

    @property
    def min_bytes(self) -> int:
        """Bytes that one row and one of its gradients take."""
        return 2 * self.row_bytes + 2 * self.gradient_bytes

    @property
    def gradient_bytes(self) -> int:
        """Bytes of a whole gradient, written out."""
        return sum(self.itemsize * leaf.numel() for leaf in self.weights.leaves.values())

    def _samples_within(self, budget: int, work: Workload) -> int:
        return max(0, budget - BLOCK_AND_COPIES) // self._sample_bytes(work)

    def _sample_bytes(self, work: Workload, is_alone: bool = False) -> int:
        """Bytes that the work on one sample takes.

        Args:
            work: what is computed for it.
            is_alone: whether it is the only one of its chunk, which can do without copies of large
                windows.
        """
        rows, number = work.rows_per_sample, work.directions
        is_gram = work.kind == "gram"
        graphs = number + 2 if is_gram else 2
        total = rows * (self.row_bytes * graphs + 2 * self.largest_result)
        largest = 0
        for factor in self.factors:
            largest = max(largest, factor.gradient.numel)
            if isinstance(factor.gradient, Outer):
                total += self.itemsize * factor.gradient.count_stored(rows, number, is_alone)
        total += self.itemsize * largest * (number if is_gram else 2)
        # One direction, its probabilities, and what they take.
        total += 6 * DOUBLE * rows * self.classes
        results = 2 * DOUBLE * number * len(self.weights.leaves)
        total += results * (number if is_gram else 1)
        if work.via_last_layer and self.last_product is not None:
            total += self.itemsize * self.last_product.numbers_held(rows)
        return total


def _forward_multiplications(factor: GradFactor) -> int:
    """Multiplications of the operation on one row."""
    if not isinstance(factor.gradient, Outer):
        return factor.gradient.work
    t, o, f, g = factor.gradient.sizes
    return t * o * f * g


def make_plan(request: GradientRequest) -> Plan | Fallback:
    """Trace the first samples of a request.

    Args:
        request: what the plan is for.

    Returns:
        The plan; a `Fallback` if the traces do not agree with plain autograd.

    Raises:
        QualmsError: if the first sample has no gradient, or the model is random.
    """
    some = request.rows(slice(0, max(2, PLANNING_ROWS // request.rows_per_sample)))
    first = FirstSample.of(request.model, some, request.selected, _norm)
    if not first.gradient:
        require_uses_that_vary(request.model, some)
        return Fallback("the first input uses none of the selected parameters")
    # Plain autograd has managed, so whatever fails from here on is due to the tracing.
    planning = _Planning(request.model, some, request.selected, first)
    return attempt("trace the first samples", partial(planning.run, request.budget))


def _norm(gradient: Tensor) -> Tensor:
    return sum_of_squares(at_least_float32(gradient).reshape(1, -1)).sqrt()


@dataclass(frozen=True)
class _Planning:
    """Traces of the first samples.

    Attributes:
        model: inside `preserve_state`.
        some: the first rows.
        selected: the parameters that count.
        first: the first row by plain autograd.
    """

    model: nn.Module
    some: ModelInput
    selected: dict[str, Tensor]
    first: FirstSample

    def run(self, budget: int) -> Plan:
        """Trace one row, then two where there are two and they fit the budget."""
        rows = num_samples(self.some.batch)
        plan, one = self._trace_one(several=rows > 1)
        if rows == 1:
            return plan
        second = self._second_row()
        if second is None:
            raise NotBatchable("all inputs are the same")
        if plan.is_too_large(2, budget):
            return plan
        pair = plan.reformat(self.some.take([0, second]))
        _, two = trace_forward(self.model, pair, plan.weights, None)
        mixes_samples = collapses_rows(one.shapes, two.shapes)
        traces = TracePair(one.param_uses, two.param_uses).compact()
        del one, two  # and their graphs
        self._require_same_gradient(plan, pair, traces)
        return replace(plan, trace_pair=traces, mixes_samples=mixes_samples)

    def _trace_one(self, several: bool) -> tuple[Plan, Recorder]:
        """A plan from the first row, whose traced gradient must be plain autograd's.

        Args:
            several: whether there are further rows. For one image alone convolutions are as fast in
                the plain memory format, and batch normalization wants that one.
        """
        if several and wants_channels_last(self.first.rows):
            # `view` of what a convolution returns needs the plain memory format.
            run = partial(self._trace_first_row, channels_last=True)
            traced = attempt("trace images in channels-last format", run)
            if not isinstance(traced, Fallback):
                return self._plan_from(traced, channels_last=True), traced.recorder
        traced = self._trace_first_row(channels_last=False)
        return self._plan_from(traced, channels_last=False), traced.recorder

    def _trace_first_row(self, channels_last: bool) -> "_FirstTrace":
        row = self.first.rows
        weights = Weights.of(self.selected, self.model.parameters(), channels_last)
        constants = {t.untyped_storage().data_ptr() for t in weights.stand_in.values()}
        with saved_bytes(constants) as total:
            formatted = in_channels_last(row) if channels_last else row
            logits, recorder = trace_forward(self.model, formatted, weights, None)
        return _FirstTrace(weights, logits, recorder, total[0])

    def _plan_from(self, traced: "_FirstTrace", channels_last: bool) -> Plan:
        logits, recorder, first = traced.logits, traced.recorder, self.first
        direction = random_direction(logits)
        pullback = Pullback(logits, recorder.factors, traced.weights, 1)
        found = measure(pullback, direction, "l2")
        same_logits = close_logits(logits.detach(), first.logits, first.precision)
        if not same_logits or not self._is_expected(found):
            raise NotBatchable("the recorded gradient is not plain autograd's")
        last = LastProduct.of(pullback)
        return Plan(
            classes=logits.shape[1],
            largest_result=largest_result(recorder.param_uses),
            channels_last=channels_last,
            precision=first.precision,
            trace_pair=None,
            mixes_samples=False,
            weights=traced.weights,
            use_order=recorder.use_order,
            row_bytes=traced.saved_bytes,
            factors=[factor.without_graph() for factor in recorder.factors],
            itemsize=logits.element_size(),
            last_product=last and last.without_graph(),
        )

    def _is_expected(self, norms: dict[str, Tensor]) -> bool:
        """Whether these are the norms of the first row's gradient by plain autograd."""
        expected = {name: float(norm) for name, norm in self.first.gradient.items()}
        return same_norms(norms, expected, self.first.precision)

    def _second_row(self) -> int | None:
        """A row that differs from the first; None if there is none."""
        for i in range(1, num_samples(self.some.batch)):
            if self.some.embedding_noise is not None:
                return i
            if any(not torch.equal(t[0], t[i]) for t in batch_tensors(self.some.batch)):
                return i
        return None

    def _require_same_gradient(
        self,
        plan: Plan,
        pair: ModelInput,
        traces: TracePair,
    ) -> None:
        """The first of two rows must have the gradient that it has on its own.

        Args:
            plan: from the first row.
            pair: both rows.
            traces: of one row and of two.
        """
        logits, both = trace_forward(self.model, pair, plan.weights, traces)
        direction = random_direction(logits)
        of_first = torch.cat([direction, torch.zeros_like(direction)], dim=1)
        found = measure(Pullback(logits, both.factors, plan.weights, 2), of_first, "l2")
        if not self._is_expected({name: value[:1] for name, value in found.items()}):
            raise NotBatchable("an input's gradient depends on what else is in the batch")


@dataclass(frozen=True)
class _FirstTrace:
    """The traced forward pass of the first row."""

    weights: Weights
    logits: Tensor
    recorder: Recorder
    saved_bytes: int
