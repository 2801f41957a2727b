"""The exact engine: the gradients of all classes from one forward and C backward passes.

∇θ log p_c = Jᵀ(e_c - p). Back-propagating e_c - p for a whole batch gives, at every operation that
uses a parameter, the cotangents of all samples at once; the factors that the recorder left there
turn them into norms. No weight gradient is formed for the batch as a whole, and none is kept.

Every chunk of samples is verified (`verify.py`). One that fails, because the model mixes the samples
of a batch or hides operations from torch's function modes, runs by plain autograd, one sample at a
time.
"""

from dataclasses import dataclass, replace
from functools import partial

from qualms.gradients.batch import NotBatchable, num_samples
from qualms.gradients.engines.autograd import (
    AutogradEngine,
    all_selected,
    plain_autograd,
    split_evenly,
)
from qualms.gradients.engines.base import ClassNorms, run_first
from qualms.gradients.engines.chunked import accumulate_chunks
from qualms.gradients.engines.last_layer import measure_via_last_layer
from qualms.gradients.fallback import Fallback, attempt
from qualms.gradients.last_product import LastProduct
from qualms.gradients.measure import measure
from qualms.gradients.memory import in_mebibytes
from qualms.gradients.model_input import ModelInput
from qualms.gradients.plan import Plan, Workload, make_plan
from qualms.gradients.plan_cache import Key, PlanCache
from qualms.gradients.request import GradientRequest
from qualms.gradients.tracing.traced_forward import trace_forward
from qualms.gradients.verify import (
    CrossBatchCheck,
    measure_separate,
    require_same_across_batches,
    require_same_alone,
    require_separate_gradients,
)


class ExactEngine:
    """Computes every gradient exactly, many samples at once.

    Args:
        cache: of the model.
    """

    def __init__(self, cache: PlanCache) -> None:
        self.cache = cache

    def plan(self, request: GradientRequest) -> Plan | Fallback:
        """The plan of an earlier batch of the same shapes, or a new one.

        Args:
            request: what to compute.

        Returns:
            A plan, or the reason why samples have to run one at a time.
        """
        key = _key(request)
        kept: Plan | None = self.cache.get(key)
        if kept is not None and kept.serves(request):
            return kept
        plan = make_plan(request)
        if isinstance(plan, Plan):
            self.cache.keep(key, replace(plan, is_reused=True))
        return plan

    def run(self, plan: Plan, request: GradientRequest) -> ClassNorms:
        """The norms of all samples, chunk by chunk.

        A plan that was made for other samples may not hold for these: it is then made anew.
        """
        found = self._run_chunks(plan, request)
        if isinstance(found, Fallback):
            self.cache.forget(_key(request))
            return run_first([self, AutogradEngine(self.cache)], request, self.cache)
        return all_selected(found, request, plan.use_order)

    def _run_chunks(self, plan: Plan, request: GradientRequest) -> ClassNorms | Fallback:
        """All chunks; a `Fallback` if a reused plan does not hold for one of them."""
        work = plan.workload(request)
        fitting = plan.samples_at_once(request.budget, work)
        size = min(request.settings.batch_size or fitting, fitting) or 1
        chunks = split_evenly(request.inputs, size)
        check = CrossBatchCheck(request, chunks)
        parts: list[ClassNorms] = []
        for part in chunks:
            chunk = _Chunk(plan, request.along_own(part), request.rows(part), work)
            run = partial(chunk.run_in_parts if fitting == 0 else chunk.run, check, part)
            found = attempt("run a chunk of samples together", run)
            if isinstance(found, Fallback):
                if plan.is_reused:
                    return found
                self.cache.warn_slow(found)
                # If the model itself is at fault, plain autograd says so.
                found = plain_autograd(chunk.request, chunk.model_input, plan.row_bytes)
            parts.append(found)
        return ClassNorms.concatenate(parts)


def _key(request: GradientRequest) -> Key:
    return ("plan", request.shapes, tuple(request.selected))


@dataclass(frozen=True)
class _Chunk:
    """Samples that run together.

    Attributes:
        plan: of the request.
        request: the directions are those of these samples.
        model_input: the rows of the samples.
        work: what is computed for each of them.
    """

    plan: Plan
    request: GradientRequest
    model_input: ModelInput
    work: Workload

    def run(self, check: CrossBatchCheck, part: slice) -> ClassNorms:
        """Trace the samples together, verify the trace, and measure.

        Args:
            check: knows the logits of the samples from other batches.
            part: the place of the samples in the request.

        Raises:
            NotBatchable: if a check fails.
        """
        plan, request, rows = self.plan, self.request, self.work.rows_per_sample
        model_input = plan.reformat(self.model_input)
        samples = num_samples(model_input.batch) // rows
        logits, recorder = trace_forward(request.model, model_input, plan.weights, plan.trace_pair)
        if plan.is_reused and recorder.first_use != plan.use_order.names:
            raise NotBatchable("these inputs use the model's parameters in another order")
        by_sample = logits.unflatten(0, (samples, rows))
        elsewhere = check.logits_of(part)
        same_rows = by_sample.detach()[:, : elsewhere.shape[1]]
        require_same_across_batches(
            same_rows.flatten(0, 1), elsewhere.flatten(0, 1), plan.precision
        )
        every = plan.must_compare_alone(recorder)
        require_same_alone(request.model, model_input, logits.detach(), every, plan.precision)
        factors, weights = recorder.factors, plan.weights
        traced = (logits, factors, weights, samples)
        last = None
        if self.work.via_last_layer:
            last = LastProduct.of(logits, factors, weights)
        if last is not None:
            require_separate_gradients(*traced, plan.precision)
            names = request.directions.names
            values = measure_via_last_layer(logits, names, last, weights, samples)
        elif request.kind == "gram":
            require_separate_gradients(*traced, plan.precision)
            cotangents = request.directions.along(by_sample)
            values = measure(logits, cotangents, factors, weights, samples, "gram")
        else:
            cotangents = request.directions.along(by_sample)
            values = measure_separate(
                logits, cotangents, factors, weights, samples, request.kind, plan.precision
            )
        return ClassNorms(values, by_sample[:, 0].detach(), recorder.without_rule)

    def run_in_parts(self, check: CrossBatchCheck, part: slice) -> ClassNorms:
        """One sample whose rows do not fit at once, part of its rows by part."""
        if self.request.gram:
            budget = in_mebibytes(self.request.budget)
            raise NotBatchable(f"the gradients of all classes of one input do not fit {budget}")
        return accumulate_chunks(self.request, self.model_input, self.plan)


def look_at(request: GradientRequest, cache: PlanCache) -> Plan | Fallback:
    """The plan of the exact engine."""
    return ExactEngine(cache).plan(request)
