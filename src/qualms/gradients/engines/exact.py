"""The exact engine: the gradients of all classes from one forward and C backward passes.

∇θ log p_c = Jᵀ(e_c - p), with J the Jacobian of the logits, e_c a unit vector and p the
probabilities. Back-propagating e_c - p for a whole batch gives, at every operation that uses a
parameter, the cotangents of all samples at once; the gradient factors that the recorder kept there
turn them into norms. The weight gradient summed over the batch is never formed.

Where the perturbed rows of a single sample do not fit at once, its gradients are written out and
added up over parts of the rows: a sum over rows can be accumulated, its norm cannot. As many
gradients as fit into memory are accumulated at the same time; for each such block of directions the
forward passes run again.

Every chunk of samples is verified (`verify.py`). A chunk that fails, because the model mixes
samples of a batch or hides operations from torch's function modes, runs by plain autograd, one
sample at a time.
"""

from dataclasses import dataclass, field, replace
from functools import partial

from jaxtyping import Float
from torch import Tensor

from qualms.gradients.batch import NotBatchable, num_samples, slices
from qualms.gradients.engines.autograd import (
    AutogradEngine,
    add_unused_parameters,
    plain_autograd,
)
from qualms.gradients.engines.base import ClassNorms, run_first
from qualms.gradients.fallback import Fallback, attempt
from qualms.gradients.last_layer import LastProduct, measure_via_last_layer
from qualms.gradients.measure import Pullback, full_gradients, measure, norm_of
from qualms.gradients.memory import in_mebibytes, require_room
from qualms.gradients.model_input import ModelInput
from qualms.gradients.plan import Plan, Workload, make_plan
from qualms.gradients.plan_cache import Key, PlanCache
from qualms.gradients.request import GradientRequest
from qualms.gradients.tracing.recorder import Recorder
from qualms.gradients.tracing.traced_forward import trace_forward
from qualms.gradients.verify import (
    CrossBatchCheck,
    logits_in_groups,
    measure_separate,
    require_same_across_batches,
    require_same_alone,
    require_separate_gradients,
)

# A dict from each parameter's name to its flat gradients (p entries) along k directions.
Gradients = dict[str, Float[Tensor, "k p"]]


class ExactEngine:
    """Computes every gradient exactly, many samples at once.

    Args:
        cache: the cached plans and measurements of the model.
    """

    def __init__(self, cache: PlanCache) -> None:
        self.cache = cache

    def plan(self, request: GradientRequest) -> Plan | Fallback:
        """Reuse the plan of an earlier batch of the same shapes, or make a new plan.

        Args:
            request: the samples, and which of their gradients to compute.

        Returns:
            A plan, or the reason why samples have to run one at a time.
        """
        key = _cache_key(request)
        cached = self.cache.get(key, Plan)
        if cached is not None and cached.serves(request):
            return cached
        plan = make_plan(request)
        if isinstance(plan, Plan):
            self.cache.keep(key, replace(plan, is_reused=True))
        return plan

    def run(self, plan: Plan, request: GradientRequest) -> ClassNorms:
        """Compute the norms, or inner products, of all samples, chunk by chunk.

        A plan made from an earlier batch may turn out not to fit these samples. It is then dropped,
        and the request starts again with a plan made from its own samples, or by plain autograd.

        Args:
            plan: what `plan` returned for this request.
            request: the samples, and which of their gradients to compute.
        """
        norms = self._run_chunks(plan, request)
        if isinstance(norms, Fallback):
            self.cache.forget(_cache_key(request))
            return run_first([self, AutogradEngine()], request, self.cache)
        return add_unused_parameters(norms, request, plan.use_order)

    def _run_chunks(
        self,
        plan: Plan,
        request: GradientRequest,
    ) -> ClassNorms | Fallback:
        """Split the samples into chunks that fit into memory, and run them one after the other.

        A chunk that fails its checks runs by plain autograd instead, with a warning.

        Args:
            plan: the plan of the request.
            request: the samples, and which of their gradients to compute.

        Returns:
            The norms of all samples; or a `Fallback` if a chunk fails its checks and the plan was
            made from an earlier batch, so that a new plan may help.
        """
        work = plan.workload(request)
        # 0 if the rows of one sample do not fit at once: a chunk is then one sample, run in parts.
        max_samples = plan.samples_at_once(request.budget, work)
        chunk_size = min(request.settings.batch_size or max_samples, max_samples) or 1
        chunks = _split_evenly(request.num_samples, chunk_size)
        check = CrossBatchCheck(request, chunks)
        norms_of_chunks: list[ClassNorms] = []
        for samples in chunks:
            chunk_request = request.with_directions_of(samples)
            chunk = _Chunk(plan, chunk_request, request.make_rows(samples), work)
            run = chunk.run_in_parts
            if max_samples > 0:
                run = partial(chunk.run, check, samples)
            norms = attempt("run a chunk of samples together", run)
            if isinstance(norms, Fallback):
                if plan.is_reused:
                    return norms
                self.cache.warn_slow(norms)
                # If the model itself is at fault, plain autograd raises the error.
                norms = plain_autograd(chunk.request, chunk.model_input, plan.row_bytes)
            norms_of_chunks.append(norms)
        return ClassNorms.concatenate(norms_of_chunks)


def _split_evenly(num_samples: int, max_size: int) -> list[slice]:
    """Split samples into consecutive chunks of nearly equal size, at most `max_size` each."""
    num_chunks = -(-num_samples // max_size)  # rounded up
    return slices(num_samples, -(-num_samples // num_chunks))


def _cache_key(request: GradientRequest) -> Key:
    """Return the key of a request's plan in the cache, with everything that a plan depends on."""
    return ("plan", request.shapes, tuple(request.selected))


@dataclass(frozen=True)
class _Chunk:
    """Samples that run in one pass, as many as fit into memory.

    Attributes:
        plan: the plan of the whole request.
        request: the whole request, except that its directions are those of this chunk's samples.
        model_input: the rows of this chunk's samples.
        work: what is computed for each sample.
    """

    plan: Plan
    request: GradientRequest
    model_input: ModelInput
    work: Workload

    def run(self, check: CrossBatchCheck, samples: slice) -> ClassNorms:
        """Trace the chunk in one forward pass, check its logits, and measure its gradients.

        Args:
            check: gives the logits of the same samples from other batches, to compare with.
            samples: the indices of the chunk's samples in the request.

        Raises:
            NotBatchable: if a check fails.
        """
        plan = self.plan
        model_input = plan.reformat(self.model_input)
        logits, recorder = trace_forward(
            self.request.model, model_input, plan.weights, plan.trace_pair
        )
        if plan.is_reused and recorder.first_use != plan.use_order.names:
            raise NotBatchable("these inputs use the model's parameters in a different order")
        # [b, r, c]: samples, rows of a sample, classes.
        by_sample = logits.unflatten(0, (-1, self.work.rows_per_sample))
        other_logits = check.logits_of(samples)
        # The other batches may have had only the first row of each sample.
        own_logits = by_sample.detach()[:, : other_logits.shape[1]]
        require_same_across_batches(
            own_logits.flatten(0, 1), other_logits.flatten(0, 1), plan.precision
        )
        require_same_alone(
            self.request.model,
            model_input,
            logits.detach(),
            every=plan.needs_single_row_check(recorder),
            precision=plan.precision,
        )
        return ClassNorms(
            values=self._measure(logits, recorder),
            # Row 0 is the sample itself.
            logits=by_sample[:, 0].detach(),
            without_rule=recorder.without_rule,
        )

    def _measure(self, logits: Tensor, recorder: Recorder) -> dict[str, Tensor]:
        """Measure the traced gradients, and check that each depends on its own sample alone.

        Args:
            logits: the logits [rows, c] of all rows, with their graph.
            recorder: the recorder of the traced pass, with the gradient factors.

        Returns:
            Norms [b, m] or inner products [b, m, m] by the parameter's name, for b samples and m
            directions.

        Raises:
            NotBatchable: if a gradient depends on other samples.
        """
        directions, kind = self.request.directions, self.request.kind
        precision = self.plan.precision
        by_sample = logits.unflatten(0, (-1, self.work.rows_per_sample))
        pullback = Pullback(logits, recorder.factors, self.plan.weights, samples=len(by_sample))
        # None also if the logits of this pass do not come from a linear layer.
        last_product = LastProduct.of(pullback) if self.work.via_last_layer else None
        if last_product is not None:
            require_separate_gradients(pullback, precision)
            return measure_via_last_layer(pullback, directions.names, last_product)
        cotangents = directions.cotangents_at(by_sample)
        if kind == "gram":
            require_separate_gradients(pullback, precision)
            return measure(pullback, cotangents, kind)
        return measure_separate(pullback, cotangents, kind, precision)

    def run_in_parts(self) -> ClassNorms:
        """Measure a chunk of one sample whose rows do not fit at once, part by part of the rows.

        Raises:
            NotBatchable: for inner products, which need the gradients of all directions at once.
        """
        if self.request.gram:
            budget = in_mebibytes(self.request.budget)
            raise NotBatchable(f"the gradients of all classes of one input do not fit in {budget}")
        return accumulate_chunks(self.request, self.model_input, self.plan)


# One sample whose rows do not fit at once.


def accumulate_chunks(
    request: GradientRequest,
    model_input: ModelInput,
    plan: Plan,
) -> ClassNorms:
    """Compute the norms [1, m] of one sample's gradients, accumulated over parts of its rows.

    m is the number of directions.

    Args:
        request: the request, with the directions of this sample.
        model_input: the rows of the sample.
        plan: the plan of the request.

    Raises:
        QualmsError: if a single row and its gradient do not fit into memory.
        NotBatchable: if the rows influence each other.
    """
    require_room(plan.min_bytes, request.limit, "one row of the input and one of its gradients")
    # Half of the budget is for a pass over some rows.
    rows_per_pass = plan.rows_at_once(request.budget // 2)
    num_passes = -(-num_samples(model_input.batch) // rows_per_pass)  # rounded up
    logits = logits_in_groups(request.model, model_input, num_passes)
    row_parts = _RowParts(request, model_input, plan, rows_per_pass, logits)
    # A quarter of the budget is for gradients that are accumulated at the same time.
    max_gradients = max(1, request.budget // 4 // plan.gradient_bytes)
    # `cotangents_at` takes logits [samples, rows, classes]; this is one sample.
    directions = request.directions.cotangents_at(logits[None])
    values: dict[str, Tensor] = {}
    start = 0  # index of the next direction
    for block, scales in directions.blocks():
        # `scales` has a column for each sample; this is the only sample.
        scale_parts = scales[:, 0].split(max_gradients)
        block_parts = block.to(logits.dtype).split(max_gradients)
        for cotangents, scale in zip(block_parts, scale_parts, strict=True):
            stop = start + len(cotangents)
            # Logits do not depend on the direction, so they are verified only once.
            gradients_by_name = row_parts.sum_gradients(cotangents, verify=start == 0)
            for name, gradients in gradients_by_name.items():
                if name not in values:
                    values[name] = scale.new_zeros(1, directions.num_directions)
                values[name][0, start:stop] = norm_of(gradients, request.kind) * scale
            start = stop
    # Row 0 is the sample itself; the slice keeps the sample axis.
    return ClassNorms(values, logits[:1], row_parts.without_rule)


@dataclass
class _RowParts:
    """Accumulates the gradients of one sample over parts of its rows.

    Attributes:
        request: the request, with the directions of this sample.
        model_input: the r rows of the sample.
        plan: the plan of the request.
        rows_per_pass: the number of rows that run at once.
        logits: the logits of all rows, computed in other groups of rows than those that are traced
            together, to compare with.
        without_rule: the names of the parameters without a fast gradient rule in the passes so far.
    """

    request: GradientRequest
    model_input: ModelInput
    plan: Plan
    rows_per_pass: int
    logits: Float[Tensor, "r c"]
    without_rule: set[str] = field(default_factory=set)

    def sum_gradients(self, cotangents: Float[Tensor, "k r c"], verify: bool) -> Gradients:
        """Compute the gradients along k directions, summed over all r rows.

        Args:
            cotangents: for each direction its entries for the c logits of each row.
            verify: whether to compare the logits of each part with those from other groups.

        Returns:
            The flat gradients [k, p] by the parameter's name; parameters that the logits do not
            depend on are left out.
        """
        total: Gradients = {}
        for rows in slices(len(self.logits), self.rows_per_pass):
            logits, recorder = self._trace(rows)
            if verify:
                self._verify(rows, logits.detach(), recorder)
            self.without_rule |= recorder.without_rule
            pullback = Pullback(logits, recorder.factors, self.plan.weights, samples=1)
            for j, cotangent in enumerate(cotangents):
                for name, g in full_gradients(pullback, cotangent[rows]).items():
                    if name not in total:
                        total[name] = g.new_zeros(len(cotangents), g.numel())
                    total[name][j] += g.flatten()
        return total

    def _trace(self, rows: slice) -> tuple[Tensor, Recorder]:
        """Trace the rows with the indices `rows` in one forward pass, as the rows of one sample.

        Returns:
            The logits of these rows with their graph, and the recorder with the gradient factors.
        """
        plan = self.plan
        num_rows = rows.stop - rows.start
        part = replace(self.model_input.take(rows), rows_per_sample=num_rows)
        return trace_forward(self.request.model, plan.reformat(part), plan.weights, plan.trace_pair)

    def _verify(self, rows: slice, logits: Tensor, recorder: Recorder) -> None:
        """Raise `NotBatchable` if the logits of some rows depend on the rows that run with them.

        Args:
            rows: the indices of the rows.
            logits: the logits of these rows, traced together.
            recorder: the recorder of the traced pass.
        """
        precision = self.plan.precision
        require_same_across_batches(logits, self.logits[rows], precision)
        require_same_alone(
            self.request.model,
            self.model_input.take(rows),
            logits,
            every=self.plan.needs_single_row_check(recorder),
            precision=precision,
        )
