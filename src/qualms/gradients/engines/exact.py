"""The exact engine: the gradients of all classes from one forward and C backward passes.

∇θ log p_c = Jᵀ(e_c - p). Back-propagating e_c - p for a whole batch gives, at every operation that
uses a parameter, the cotangents of all samples at once; the gradient factors that the recorder kept
there turn them into norms. The weight gradient summed over the batch is never formed.

Where the perturbed rows of a single sample do not fit at once, its gradients are written out and
added up, part by part of the rows: a sum over rows can be accumulated, its norm cannot. As many
gradients as fit into memory are accumulated at the same time; for each such block of directions the
forward passes run again.

Every chunk of samples is verified (`verify.py`). A chunk that fails, because the model mixes
samples of a batch or hides operations from torch's function modes, runs by plain autograd, one
sample at a time.
"""

from dataclasses import dataclass, replace
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

# Flat gradients along k directions, by the parameter's name.
Gradients = dict[str, Float[Tensor, "k p"]]


class ExactEngine:
    """Computes every gradient exactly, many samples at once.

    Args:
        cache: the plans of the model.
    """

    def __init__(self, cache: PlanCache) -> None:
        self.cache = cache

    def plan(self, request: GradientRequest) -> Plan | Fallback:
        """Reuse the plan of an earlier batch of the same shapes, or make a new plan.

        Args:
            request: what to compute.

        Returns:
            A plan, or the reason why samples have to run one at a time.
        """
        key = _key(request)
        kept = self.cache.get(key, Plan)
        if kept is not None and kept.serves(request):
            return kept
        plan = make_plan(request)
        if isinstance(plan, Plan):
            self.cache.keep(key, replace(plan, is_reused=True))
        return plan

    def run(self, plan: Plan, request: GradientRequest) -> ClassNorms:
        """Compute the norms, or inner products, of all samples, chunk by chunk.

        A reused plan may turn out not to fit these samples. It is then dropped, and the request
        starts again with a plan made from them, or by plain autograd.

        Args:
            plan: what `plan` returned for this request.
            request: what to compute.
        """
        norms = self._run_chunks(plan, request)
        if isinstance(norms, Fallback):
            self.cache.forget(_key(request))
            return run_first([self, AutogradEngine(self.cache)], request, self.cache)
        return add_unused_parameters(norms, request, plan.use_order)

    def _run_chunks(
        self,
        plan: Plan,
        request: GradientRequest,
    ) -> ClassNorms | Fallback:
        """Run all chunks; return a `Fallback` if a reused plan does not fit one of them.

        With a new plan, a chunk that fails its checks runs by plain autograd instead.
        """
        work = plan.workload(request)
        fitting = plan.samples_at_once(request.budget, work)
        # 0 if the rows of one sample do not fit at once: a chunk is then one sample, run in parts.
        size = min(request.settings.batch_size or fitting, fitting) or 1
        chunks = split_evenly(request.num_samples, size)
        check = CrossBatchCheck(request, chunks)
        parts: list[ClassNorms] = []
        for part in chunks:
            chunk = _Chunk(plan, request.with_directions_of(part), request.make_rows(part), work)
            run = partial(chunk.run, check, part) if fitting else chunk.run_in_parts
            norms = attempt("run a chunk of samples together", run)
            if isinstance(norms, Fallback):
                if plan.is_reused:
                    return norms
                self.cache.warn_slow(norms)
                # If the model itself is at fault, plain autograd raises the error.
                norms = plain_autograd(chunk.request, chunk.model_input, plan.row_bytes)
            parts.append(norms)
        return ClassNorms.concatenate(parts)


def split_evenly(samples: int, size: int) -> list[slice]:
    """Split `samples` samples into chunks of nearly equal size, at most `size` each."""
    number = -(-samples // size)
    return slices(samples, -(-samples // number))


def _key(request: GradientRequest) -> Key:
    """The key of a request's plan in the cache: what a plan depends on."""
    return ("plan", request.shapes, tuple(request.selected))


@dataclass(frozen=True)
class _Chunk:
    """Samples that run in one pass, as many as fit into memory.

    Attributes:
        plan: the plan of the whole request.
        request: the request, with the directions of this chunk's samples.
        model_input: the rows of this chunk's samples.
        work: what is computed for each sample.
    """

    plan: Plan
    request: GradientRequest
    model_input: ModelInput
    work: Workload

    def run(self, check: CrossBatchCheck, part: slice) -> ClassNorms:
        """Trace the samples together, check their logits, and measure their gradients.

        Args:
            check: gives the logits of the same samples from other batches, to compare with.
            part: the indices of the samples in the request.

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
        by_sample = logits.unflatten(0, (-1, self.work.rows_per_sample))
        elsewhere = check.logits_of(part)
        # Of each sample all rows, or the first row alone, as far as the logits elsewhere are known.
        here = by_sample.detach()[:, : elsewhere.shape[1]]
        require_same_across_batches(here.flatten(0, 1), elsewhere.flatten(0, 1), plan.precision)
        require_same_alone(
            self.request.model,
            model_input,
            logits.detach(),
            every=plan.needs_single_row_check(recorder),
            precision=plan.precision,
        )
        values = self._measure(logits, recorder)
        return ClassNorms(values, by_sample[:, 0].detach(), recorder.without_rule)

    def _measure(self, logits: Tensor, recorder: Recorder) -> dict[str, Tensor]:
        """Measure the traced gradients, and check that each depends on its own sample alone.

        Args:
            logits: the logits of all rows, with their graph.
            recorder: the recorder of the traced pass, with the gradient factors.

        Returns:
            The values of `ClassNorms`: norms [b, m] or inner products [b, m, m] by the parameter's
            name.

        Raises:
            NotBatchable: if a gradient depends on other samples.
        """
        directions, kind, precision = (
            self.request.directions,
            self.request.kind,
            self.plan.precision,
        )
        by_sample = logits.unflatten(0, (-1, self.work.rows_per_sample))
        pullback = Pullback(logits, recorder.factors, self.plan.weights, len(by_sample))
        last = LastProduct.of(pullback) if self.work.via_last_layer else None
        if last is not None:
            require_separate_gradients(pullback, precision)
            return measure_via_last_layer(pullback, directions.names, last)
        cotangents = directions.cotangents_at(by_sample)
        if kind == "gram":
            require_separate_gradients(pullback, precision)
            return measure(pullback, cotangents, kind)
        return measure_separate(pullback, cotangents, kind, precision)

    def run_in_parts(self) -> ClassNorms:
        """Measure a chunk of one sample, whose rows do not fit at once, by parts of its rows.

        Raises:
            NotBatchable: for inner products, which need the gradients of all directions at once.
        """
        if self.request.gram:
            budget = in_mebibytes(self.request.budget)
            raise NotBatchable(f"the gradients of all classes of one input do not fit {budget}")
        return accumulate_chunks(self.request, self.model_input, self.plan)


# One sample whose rows do not fit at once.


def accumulate_chunks(
    request: GradientRequest,
    model_input: ModelInput,
    plan: Plan,
) -> ClassNorms:
    """Compute the norms [1, m] of one sample's gradients, accumulated over parts of its rows.

    Args:
        request: the request, with the directions of this sample.
        model_input: the rows of the sample.
        plan: the plan of the request.

    Raises:
        QualmsError: if a single row and its gradient do not fit into memory.
        NotBatchable: if the rows influence each other.
    """
    require_room(plan.min_bytes, request.limit, "one row of the input and one of its gradients")
    # Half of the budget goes to a pass, a quarter to the gradients that are accumulated.
    size = plan.rows_at_once(request.budget // 2)
    groups = -(-num_samples(model_input.batch) // size)
    logits = logits_in_groups(request.model, model_input, groups)
    work = _RowParts(request, model_input, plan, size, logits)
    held = max(1, request.budget // 4 // plan.gradient_bytes)  # directions accumulated at once
    directions = request.directions.cotangents_at(logits[None])
    values: dict[str, Tensor] = {}
    number = 0
    for block, scales in directions.blocks():
        scale_parts = scales[:, 0].split(held)
        block_parts = block.to(logits.dtype).split(held)
        for cotangents, scale in zip(block_parts, scale_parts, strict=True):
            for name, gradients in work.add_up(cotangents, verify=number == 0).items():
                if name not in values:
                    values[name] = scale.new_zeros(1, directions.num_directions)
                norms = norm_of(gradients, request.kind) * scale
                values[name][0, number : number + len(cotangents)] = norms
            number += len(cotangents)
    return ClassNorms(values, logits[:1], work.without_rule)


@dataclass
class _RowParts:
    """Accumulates the gradients of one sample over parts of its rows.

    Attributes:
        request: the request, with the directions of this sample.
        model_input: the rows of the sample.
        plan: the plan of the request.
        size: the number of rows that run at once.
        logits: the logits of all rows, computed in other groups of rows than those that are traced
            together, to compare with.
        without_rule: the parameters without a fast gradient rule that the passes so far have used.
    """

    request: GradientRequest
    model_input: ModelInput
    plan: Plan
    size: int
    logits: Float[Tensor, "r c"]

    def __post_init__(self) -> None:
        self.without_rule: set[str] = set()

    def add_up(self, directions: Float[Tensor, "k r c"], verify: bool) -> Gradients:
        """Compute the gradients along k directions, summed over all rows.

        Args:
            directions: k cotangents of the logits, with an entry for each row.
            verify: whether to compare the logits of each part with those from other groups.

        Returns:
            The flat gradients [k, p] by the parameter's name; parameters that the logits do not
            depend on are left out.
        """
        total: Gradients = {}
        for part in slices(len(self.logits), self.size):
            logits, recorder = self._trace(part)
            if verify:
                self._verify(part, logits.detach(), recorder)
            self.without_rule |= recorder.without_rule
            pullback = Pullback(logits, recorder.factors, self.plan.weights, samples=1)
            for j, v in enumerate(directions):
                for name, g in full_gradients(pullback, v[part]).items():
                    if name not in total:
                        total[name] = g.new_zeros(len(directions), g.numel())
                    total[name][j] += g.flatten()
        return total

    def _trace(self, part: slice) -> tuple[Tensor, Recorder]:
        """Trace the rows in the slice `part` together, as the rows of one sample.

        Returns:
            The logits of these rows with their graph, and the recorder with the gradient factors.
        """
        plan = self.plan
        rows = replace(self.model_input.take(part), rows_per_sample=part.stop - part.start)
        return trace_forward(self.request.model, plan.reformat(rows), plan.weights, plan.trace_pair)

    def _verify(self, part: slice, logits: Tensor, recorder: Recorder) -> None:
        """Raise `NotBatchable` if the logits of some rows depend on the rows that run with them.

        Args:
            part: the rows.
            logits: the logits of these rows, traced together.
            recorder: the recorder of the traced pass.
        """
        precision = self.plan.precision
        require_same_across_batches(logits, self.logits[part], precision)
        require_same_alone(
            self.request.model,
            self.model_input.take(part),
            logits,
            every=self.plan.needs_single_row_check(recorder),
            precision=precision,
        )
