"""The plan of the exact engine: traces of the first samples, and what the work costs.

Planning runs one sample by plain autograd, the same sample traced, then two samples traced: an axis
that doubles counts the samples, and the gradient of the first sample must be the same in all three
runs. From the traces the plan counts multiplications and memory, which decide how many samples run
at once and by which method.
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

# Bytes of the largest result of a pass that stays in the processor's cache.
CACHED_BYTES = 2**22
# With fewer rows a pass costs more for each row than the processor's cache saves.
MIN_ROWS = 4
# The number of rows among which planning looks for two that differ.
PLANNING_ROWS = 16
# Bytes of a block of directions and of its copies while it is cast to the model's precision.
BLOCK_AND_COPIES = 4 * BLOCK_BYTES


@dataclass(frozen=True)
class Workload:
    """What is computed for each sample, from which its memory follows.

    Attributes:
        rows_per_sample: the number of rows of a sample: itself and its perturbed copies.
        kind: what is measured: L2 norms, L1 norms or inner products.
        directions: the number of directions in logit space, each with a gradient.
        via_last_layer: whether the gradients of all classes are combined from the gradients of the
            last layer's features (`last_layer.py`).
    """

    rows_per_sample: int
    kind: Kind
    directions: int
    via_last_layer: bool = False


@dataclass(frozen=True)
class Plan(ModelProfile):
    """Traces and costs of a model, for samples of one shape.

    Attributes:
        trace_pair: the traces of one sample and of two, which show the sample axis of every tensor;
            None if there was only one sample, or no room for two.
        mixes_samples: whether some result is computed from several samples at once.
        weights: leaf tensors that replace the parameters in traced passes.
        use_order: the order in which the forward pass uses the parameters.
        row_bytes: the bytes that autograd saves for one row.
        factors: the gradient factors of one row (what each use of a parameter contributes to its
            gradient), of which only the sizes are kept, not the graph.
        itemsize: the bytes of one logit.
        last_product: the last linear layer; None if the model does not end in one.
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
        """Whether the plan can be reused for a request with samples of the same shapes.

        Without a trace of two rows, a plan cannot separate rows. It then serves several rows only
        if they have to run one at a time anyway, because two do not fit the budget.
        """
        rows = request.num_samples * request.rows_per_sample
        return self.trace_pair is not None or rows == 1 or self.is_too_large(2, request.budget)

    def needs_single_row_check(self, recorder: Recorder) -> bool:
        """Whether each row must also be run alone, to show that rows do not influence each other.

        True if control flow depends on tensor values, or something is computed across samples: the
        logits from two different batches may then agree although rows influence each other.
        """
        return self.mixes_samples or not recorder.use_order.fixed

    # The work, in multiplications.

    def pass_cost(
        self,
        directions: int,
        names: frozenset[str] | None = None,
    ) -> float:
        """Estimate the cost of one backward pass with its norms, as a multiple of a forward pass.

        What is compared is the number of multiplications for one row.

        Args:
            directions: the number of backward passes; work on activations is done once for all.
            names: the names of the parameters whose gradients are wanted; None for all. Layers
                without any of these parameters are not counted.
        """
        forward, backward = 0, 0
        for factor in self.factors:
            multiplications = _forward_multiplications(factor)
            forward += multiplications
            # A target may be computed from several parameters, such as a normalized weight.
            is_wanted = names is None or bool(names & roots(factor.target, self.weights))
            if is_wanted:
                backward += multiplications + count_multiplications(factor, 1, directions)
        return backward / max(1, forward)

    def passes_for_all_classes(self, request: GradientRequest) -> int:
        """Return the number of backward passes for the gradients of all C classes of one row.

        It is C, or D + 2 where going through the last layer's D features is cheaper.
        """
        # Without perturbed copies, a sample is one row.
        one_row = replace(request, smoothing=None, gram=False)
        if self.last_product is not None and self._prefers_last_layer(one_row, ("classes",)):
            num_features = self.last_product.weight.shape[1]
            return num_features + 2
        return self.classes

    def workload(self, request: GradientRequest) -> Workload:
        """Describe the work on each sample of a request, done in the cheaper of two ways.

        One way takes a backward pass for each direction, the other goes via the last layer's
        features.
        """
        rows = request.rows_per_sample
        if self._prefers_last_layer(request, request.directions.names):
            return Workload(rows, request.kind, self.classes, via_last_layer=True)
        num_directions = request.directions.num_directions(self.classes)
        return Workload(rows, request.kind, num_directions)

    def _prefers_last_layer(
        self,
        request: GradientRequest,
        directions: tuple[str, ...],
    ) -> bool:
        """Whether it is better to compute the gradients of all classes via the last layer's features.

        It must take fewer multiplications. It also needs more memory, so enough rows must still run
        at once.

        Args:
            request: the request, with its rows per sample, kind of norm and budget.
            directions: the names of the sets of directions; the sets must include `classes`.
        """
        last, rows_per_sample = self.last_product, request.rows_per_sample
        if last is None or request.kind != "l2" or "classes" not in directions:
            return False
        if not last.is_cheaper(rows_per_sample):
            return False
        work = Workload(rows_per_sample, "l2", self.classes, via_last_layer=True)
        rows_at_once = self._samples_within(request.budget, work) * rows_per_sample
        num_classes, num_features = last.weight.shape
        # The more passes are saved (D + 2 instead of C), the fewer rows may run at once.
        return rows_at_once * num_classes >= MIN_ROWS * (num_features + 2)

    # The memory, in bytes.

    def samples_at_once(self, budget: int, work: Workload) -> int:
        """Return how many samples to run at once; 0 if a single sample does not fit the budget.

        On a CPU, the largest result of that many samples should stay in the processor's cache.

        Args:
            budget: the bytes that may be used.
            work: what is computed for each sample.
        """
        rows = work.rows_per_sample
        num_samples = self._samples_within(budget, work)
        # Without a trace of two rows, samples cannot be told apart.
        if self.trace_pair is None:
            num_samples = min(num_samples, 1)
        if self.weights.device.type == "cpu":
            samples_in_cache = CACHED_BYTES // max(1, self.largest_result * rows)
            min_samples = -(-MIN_ROWS // rows)  # rounded up
            num_samples = min(num_samples, max(samples_in_cache, min_samples))
        if num_samples == 0 and (rows == 1 or self.trace_pair is not None):
            # The only sample of a chunk takes less memory. Several rows need a trace of two.
            num_samples = int(self._sample_bytes(work, is_alone=True) <= budget)
        return num_samples

    def rows_at_once(self, budget: int) -> int:
        """Return how many rows of one sample fit a budget, together with two full gradients.

        At least 1; no more if only one row was traced: rows cannot be told apart then.

        Args:
            budget: the bytes that may be used.
        """
        if self.trace_pair is None:
            return 1
        # As in `_sample_bytes`: the graph and its cotangents, and what one direction takes.
        bytes_per_row = 2 * (self.row_bytes + self.largest_result) + 6 * DOUBLE * self.classes
        return max(1, (budget - 2 * self.gradient_bytes) // bytes_per_row)

    def is_too_large(self, rows: int, budget: int) -> bool:
        """Whether norms of all classes for `rows` samples of one row need more than the budget."""
        return rows * self._sample_bytes(Workload(1, "l2", self.classes)) > budget

    @property
    def min_bytes(self) -> int:
        """The bytes without which nothing can run: twice those of a row and of a full gradient."""
        return 2 * self.row_bytes + 2 * self.gradient_bytes

    @property
    def gradient_bytes(self) -> int:
        """The bytes of the gradient of all selected parameters along one direction."""
        return sum(self.itemsize * leaf.numel() for leaf in self.weights.leaves.values())

    def _samples_within(self, budget: int, work: Workload) -> int:
        """Return how many samples fit a budget beside one block of directions; 0 if none does."""
        return max(0, budget - BLOCK_AND_COPIES) // self._sample_bytes(work)

    def _sample_bytes(self, work: Workload, is_alone: bool = False) -> int:
        """Estimate the bytes that the work on one sample takes.

        Args:
            work: what is computed for the sample.
            is_alone: whether the sample is the only one of its chunk; large convolution windows
                are then not copied.
        """
        rows, directions = work.rows_per_sample, work.directions
        is_gram = work.kind == "gram"
        # `graphs` counts what autograd saves, and as much for the cotangents; those of all
        # directions are held together if inner products are computed. The largest result exists
        # with its gradient.
        graphs = directions + 2 if is_gram else 2
        total = rows * (self.row_bytes * graphs + 2 * self.largest_result)
        largest_gradient = 0
        for factor in self.factors:
            largest_gradient = max(largest_gradient, factor.gradient.numel)
            if isinstance(factor.gradient, Outer):
                total += self.itemsize * factor.gradient.count_stored(rows, directions, is_alone)
        # The largest gradient and a copy; for inner products that of every direction.
        total += self.itemsize * largest_gradient * (directions if is_gram else 2)
        # One direction, its probabilities, and temporaries of the same size.
        total += 6 * DOUBLE * rows * self.classes
        # The norms or inner products of all parameters, twice.
        results = directions * (directions if is_gram else 1)
        total += 2 * DOUBLE * results * len(self.weights.leaves)
        if work.via_last_layer and self.last_product is not None:
            total += self.itemsize * self.last_product.count_numbers_held(rows)
        return total


def _forward_multiplications(factor: GradFactor) -> int:
    """Count the multiplications of a factor's operation in the forward pass over one row."""
    if not isinstance(factor.gradient, Outer):
        return factor.gradient.work
    positions, out_features, in_features, groups = factor.gradient.sizes
    return positions * out_features * in_features * groups


def make_plan(request: GradientRequest) -> Plan | Fallback:
    """Make a plan by tracing the first samples of a request, and compare with plain autograd.

    Args:
        request: the request to plan for.

    Returns:
        The plan; a `Fallback` if the samples cannot be traced, or the traces do not agree with plain
        autograd.

    Raises:
        QualmsError: if the first sample has no gradient, or the model is random.
    """
    first_rows = request.make_rows(slice(0, max(2, PLANNING_ROWS // request.rows_per_sample)))
    first = FirstSample.of(request.model, first_rows, request.selected, _norm)
    if not first.gradient:
        # An error if later samples use none of the parameters either.
        require_uses_that_vary(request.model, first_rows)
        return Fallback("the first input uses none of the selected parameters")
    # Plain autograd has succeeded, so a failure from here on is due to the tracing.
    planning = _Planning(request.model, first_rows, request.selected, first)
    return attempt("trace the first samples", partial(planning.run, request.budget))


def _norm(gradient: Tensor) -> Tensor:
    """Compute ‖g‖ of a parameter's gradient g, as a tensor [1]."""
    flat = at_least_float32(gradient).reshape(1, -1)
    return sum_of_squares(flat).sqrt()


@dataclass(frozen=True)
class _Planning:
    """Makes a `Plan` from traces of the first samples.

    Attributes:
        model: the model, inside `preserve_state`.
        first_rows: the rows of the first samples.
        selected: the parameters whose gradients are wanted, by name.
        first: the first row's logits and gradient norms by plain autograd, which traces must match.
    """

    model: nn.Module
    first_rows: ModelInput
    selected: dict[str, Tensor]
    first: FirstSample

    def run(self, budget: int) -> Plan:
        """Trace one row, then two if there are two and they fit the budget, and make the plan.

        Args:
            budget: the bytes that the work on one chunk of samples may take.

        Returns:
            The plan; without a `trace_pair` if two rows were not traced.

        Raises:
            NotBatchable: if a traced gradient differs from plain autograd's, or all rows are equal.
        """
        rows = num_samples(self.first_rows.batch)
        plan, trace_of_one = self._trace_one(has_more_rows=rows > 1)
        if rows == 1:
            return plan
        second_row = self._second_row()
        if second_row is None:
            raise NotBatchable("all inputs are the same")
        if plan.is_too_large(2, budget):
            return plan
        two_rows = plan.reformat(self.first_rows.take([0, second_row]))
        _, trace_of_two = trace_forward(self.model, two_rows, plan.weights, None)
        # A model that reduces over the batch may mix samples.
        mixes_samples = collapses_rows(trace_of_one.shapes, trace_of_two.shapes)
        traces = TracePair(trace_of_one.param_uses, trace_of_two.param_uses).compact()
        # Frees their graphs before the next pass.
        del trace_of_one, trace_of_two
        self._require_same_gradient(plan, two_rows, traces)
        return replace(plan, trace_pair=traces, mixes_samples=mixes_samples)

    def _trace_one(self, has_more_rows: bool) -> tuple[Plan, Recorder]:
        """Make a plan from the first row, whose traced gradient must equal plain autograd's.

        Images are traced in the channels-last memory format if possible. For a single image,
        convolutions are as fast in the contiguous format, which batch normalization needs then.

        Args:
            has_more_rows: whether there are further rows.

        Returns:
            The plan, and the recorder of the trace.
        """
        if has_more_rows and wants_channels_last(self.first.rows):
            # This fails if the model calls `view` on the result of a convolution.
            run = partial(self._trace_first_row, channels_last=True)
            trace = attempt("trace images in channels-last format", run)
            if not isinstance(trace, Fallback):
                return self._plan_from(trace, channels_last=True), trace.recorder
        trace = self._trace_first_row(channels_last=False)
        return self._plan_from(trace, channels_last=False), trace.recorder

    def _trace_first_row(self, channels_last: bool) -> "_FirstTrace":
        """Trace the first row, with images and kernels in channels-last memory format if asked for."""
        row = self.first.rows
        weights = Weights.of(self.selected, self.model.parameters(), channels_last)
        # Parameters exist anyway, so they do not count as saved.
        constants = {t.untyped_storage().data_ptr() for t in weights.stand_in.values()}
        with saved_bytes(constants) as num_bytes:
            formatted = in_channels_last(row) if channels_last else row
            logits, recorder = trace_forward(self.model, formatted, weights, None)
        return _FirstTrace(weights, logits, recorder, saved_bytes=num_bytes[0])

    def _plan_from(self, trace: "_FirstTrace", channels_last: bool) -> Plan:
        """Make the plan from the trace of the first row, after comparing it with plain autograd.

        Args:
            trace: the traced pass over the first row.
            channels_last: whether it ran in the channels-last memory format.

        Raises:
            NotBatchable: if logits or gradient norms differ from those of plain autograd.
        """
        logits, recorder, first = trace.logits, trace.recorder, self.first
        direction = random_direction(logits)
        pullback = Pullback(logits, recorder.factors, trace.weights, samples=1)
        norms = measure(pullback, direction, "l2")
        same_logits = close_logits(logits.detach(), first.logits, first.precision)
        if not same_logits or not self._is_expected(norms):
            raise NotBatchable("the recorded gradient differs from plain autograd's")
        last_product = LastProduct.of(pullback)
        # The plan outlives the pass, so it may not hold its graph.
        if last_product is not None:
            last_product = last_product.without_graph()
        return Plan(
            classes=logits.shape[1],
            largest_result=largest_result(recorder.param_uses),
            channels_last=channels_last,
            precision=first.precision,
            trace_pair=None,
            mixes_samples=False,
            weights=trace.weights,
            use_order=recorder.use_order,
            row_bytes=trace.saved_bytes,
            factors=[factor.without_graph() for factor in recorder.factors],
            itemsize=logits.element_size(),
            last_product=last_product,
        )

    def _is_expected(self, norms: dict[str, Tensor]) -> bool:
        """Whether these are the norms of the first row's gradient by plain autograd."""
        expected = {name: float(norm) for name, norm in self.first.gradient.items()}
        return same_norms(norms, expected, self.first.precision)

    def _second_row(self) -> int | None:
        """Find the index of a row that differs from the first; None if all rows are the same.

        Two equal rows would not show whether one row's results are taken for the other's.
        """
        batch = self.first_rows.batch
        for i in range(1, num_samples(batch)):
            # Token ids are equal in all copies of a sample, but their embeddings get other noise.
            if self.first_rows.embedding_noise is not None:
                return i
            if any(not torch.equal(t[0], t[i]) for t in batch_tensors(batch)):
                return i
        return None

    def _require_same_gradient(
        self,
        plan: Plan,
        two_rows: ModelInput,
        traces: TracePair,
    ) -> None:
        """Raise an error unless the first of two rows has the same gradient as when it runs alone.

        Args:
            plan: the plan made from the first row.
            two_rows: the first row and another one.
            traces: the traces of one row and of two.

        Raises:
            NotBatchable: if the gradient differs.
        """
        logits, recorder = trace_forward(self.model, two_rows, plan.weights, traces)
        direction = random_direction(logits)
        # The second row's cotangent is zero.
        only_first = torch.cat([direction, torch.zeros_like(direction)], dim=1)
        pullback = Pullback(logits, recorder.factors, plan.weights, samples=2)
        norms = measure(pullback, only_first, "l2")
        if not self._is_expected({name: value[:1] for name, value in norms.items()}):
            raise NotBatchable("the gradient of a sample depends on the rest of the batch")


@dataclass(frozen=True)
class _FirstTrace:
    """The traced forward pass of the first row, and the bytes that autograd saved in it."""

    weights: Weights
    logits: Tensor
    recorder: Recorder
    saved_bytes: int
