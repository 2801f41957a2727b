"""The exact engine: gradient norms of all classes from one forward and C backward passes through
the activations.

∇θ log p_c = Jᵀ(e_c - p). Back-propagating e_c - p for a whole batch gives, at every operation that
uses a parameter, the cotangents of all its inputs at once; the pieces that the recorder left there
turn them into norms. No weight gradient is formed for the batch as a whole, and none is kept.

What the pieces say is checked before it is believed (`checks.py`). Inputs that fail, because the
model mixes the inputs of a batch or hides operations from torch's function modes, are run by plain
autograd, one row at a time.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from qualms.gradients.batch import NotBatchable, num_samples
from qualms.gradients.engines.autograd import graph_bytes, plain_autograd
from qualms.gradients.engines.base import ClassNorms
from qualms.gradients.engines.chunked import accumulate_chunks
from qualms.gradients.engines.last_layer import LastProduct, measure_via_last_layer
from qualms.gradients.engines.probe import Probe
from qualms.gradients.measure import Kind, measure
from qualms.gradients.memory import in_mebibytes
from qualms.gradients.model_input import ModelInput
from qualms.gradients.plan_cache import Key, PlanCache
from qualms.gradients.request import GradientRequest
from qualms.gradients.tracing.param_use import UseOrder
from qualms.gradients.tracing.traced_forward import trace_forward, use_order
from qualms.gradients.verify import (
    CrossBatchCheck,
    measure_separate,
    require_same_across_batches,
    require_same_alone,
    require_separate_gradients,
)

PROBED = 16  # rows among which the probe looks for two that differ


def exact(
    job: GradientRequest,
    kind: Kind,
    learnt: PlanCache,
    regrouped: Float[Tensor, "b c"] | None = None,
) -> ClassNorms:
    """Norms (or inner products) of the gradients along the job's directions, for every selected
    parameter.

    Args:
        job: what is wanted.
        kind: ‖g‖ (`l2`), Σ|g| (`l1`) or inner products (`gram`).
        learnt: where the look at the first rows is kept for the next batch.
        regrouped: the logits of the inputs from forward passes in other company than their
            neighbors', if known.
    """
    key = _key(job)
    kept = learnt.get(key)
    if isinstance(kept, Probe) and kept.serves(job.inputs * job.rows_per_sample, job.budget):
        try:
            return _in_order(
                job, kind, _in_chunks(job, kind, kept, regrouped, None), kept.use_order
            )
        except Exception:  # other inputs than those it was made on: look again
            del learnt.found[key]
    probe = _look(job)
    if isinstance(probe, Exception):
        learnt.warn_slow(probe)
        row_bytes = graph_bytes(job, job.rows(slice(0, 1)).take([0]))
        whole = ClassNorms.concatenate(
            [
                plain_autograd(job.along_own(one), job.rows(one), kind, row_bytes)
                for one in _chunks(job.inputs, 1)
            ]
        )
        return _in_order(
            job, kind, whole, use_order(job.model, job.rows(slice(0, 1)), job.selected)
        )
    learnt.keep(key, probe)
    return _in_order(job, kind, _in_chunks(job, kind, probe, regrouped, learnt), probe.use_order)


def look_at(job: GradientRequest, learnt: PlanCache) -> Probe | Exception:
    """What the first rows of a job tell, kept for all that follow; the reason if they have to run
    one at a time.
    """
    kept: Probe | Exception | None = learnt.get(_key(job))
    if kept is None:
        kept = _look(job)
        if isinstance(kept, Probe):
            learnt.keep(_key(job), kept)
    return kept


def _key(job: GradientRequest) -> Key:
    return ("probe", job.shapes, tuple(job.selected))


def _look(job: GradientRequest) -> Probe | Exception:
    return Probe.of(
        job.model,
        job.rows(slice(0, max(2, PROBED // job.rows_per_sample))),
        job.selected,
        job.budget,
    )


def _in_chunks(
    job: GradientRequest, kind: Kind, probe: Probe, regrouped: Tensor | None, slow: PlanCache | None
) -> ClassNorms:
    """Chunk by chunk; what fails a check is run by plain autograd and reported to `slow`, or an
    error without one.
    """
    by_features = probe.by_features(job.budget, job.rows_per_sample, kind, job.directions.names)
    most = probe.inputs_in(
        job.budget,
        job.rows_per_sample,
        kind,
        by_features,
        None if by_features else job.directions.size(probe.classes),
    )
    chunks = _chunks(job.inputs, min(job.settings.batch_size or most, most) or 1)
    parts: list[ClassNorms] = []
    of_rows = CrossBatchCheck(job, chunks, regrouped)
    for chunk in chunks:
        on, own = job.rows(chunk), job.along_own(chunk)
        part: ClassNorms | None
        try:
            if most == 0 and kind == "gram":
                raise NotBatchable(
                    f"the gradients of all classes of one input do not fit {in_mebibytes(job.budget)}"
                )
            if most == 0:
                part = accumulate_chunks(own, on, kind, probe)
            else:
                part = _by_pieces(
                    own, probe.reformat(on), kind, probe, by_features, of_rows[chunk], slow is None
                )
        except Exception as error:
            if slow is None:
                raise
            slow.warn_slow(error)
            part = None
        # Outside of the block, whose error holds the graph. If the model itself is at fault, plain
        # autograd says so.
        parts.append(part or plain_autograd(own, on, kind, probe.row_bytes))
    return ClassNorms.concatenate(parts)


def _chunks(inputs: int, most: int) -> list[slice]:
    """Parts of nearly equal size, of at most `most` inputs."""
    number = -(-inputs // most)
    size = -(-inputs // number)
    return [slice(start, min(start + size, inputs)) for start in range(0, inputs, size)]


def _by_pieces(
    job: GradientRequest,
    on: ModelInput,
    kind: Kind,
    probe: Probe,
    by_features: bool,
    regrouped: Float[Tensor, "b _ c"],
    same_path: bool,
) -> ClassNorms:
    """The fast way; an exception if it cannot be trusted with these inputs.

    `same_path`: the probe saw other inputs, and what it says of the rows' places holds only on the
    same path.
    """
    inputs = num_samples(on.batch) // on.rows_per_sample
    logits, recorder = trace_forward(job.model, on, probe.weights, probe.trace_pair)
    if same_path and recorder.first_use != probe.use_order.names:
        raise NotBatchable("these inputs use the model's parameters in another order")
    apart = logits.unflatten(0, (inputs, on.rows_per_sample))
    compared = apart.detach()[:, : regrouped.shape[1]].flatten(0, 1)
    require_same_across_batches(compared, regrouped.flatten(0, 1), probe.precision)
    require_same_alone(
        job.model, on, logits.detach(), probe.compares_alone(recorder), probe.precision
    )
    pieces = recorder.factors
    last = LastProduct.of(logits, pieces, probe.weights) if by_features else None
    if last is not None:
        require_separate_gradients(logits, pieces, probe.weights, inputs, probe.precision)
        values = measure_via_last_layer(logits, job.directions.names, last, probe.weights, inputs)
    elif kind == "gram":
        require_separate_gradients(logits, pieces, probe.weights, inputs, probe.precision)
        values = measure(logits, job.directions.along(apart), pieces, probe.weights, inputs, kind)
    else:
        values = measure_separate(
            logits,
            job.directions.along(apart),
            pieces,
            probe.weights,
            inputs,
            kind,
            probe.precision,
        )
    return ClassNorms(values, apart[:, 0].detach(), recorder.without_rule)


def _in_order(
    job: GradientRequest, kind: Kind, whole: ClassNorms, use_order: UseOrder
) -> ClassNorms:
    """The same, with all parameters that count, in the model's order; those that no input here uses
    are zero.
    """
    number = job.directions.size(whole.logits.shape[1])
    shape = (job.inputs, number, number) if kind == "gram" else (job.inputs, number)
    nothing = torch.zeros(shape, dtype=torch.double, device=whole.logits.device)
    order = use_order.relevant(whole.values, job.selected)
    whole.values = {name: whole.values.get(name, nothing) for name in order}
    return whole
