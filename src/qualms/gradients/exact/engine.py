"""The exact engine: gradient norms of all classes from one forward and C backward passes through the activations.

∇θ log p_c = Jᵀ(e_c - p). Back-propagating e_c - p for a whole batch gives, at every operation that uses a parameter,
the cotangents of all its inputs at once; the pieces that the recorder left there turn them into norms. No weight
gradient is formed for the batch as a whole, and none is kept.

What the pieces say is checked before it is believed (`checks.py`). Inputs that fail, because the model mixes the inputs
of a batch or hides operations from torch's function modes, are run by plain autograd, one row at a time.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from qualms.gradients.exact.by_autograd import by_autograd, graph_bytes
from qualms.gradients.exact.by_features import LastProduct, measure_by_features
from qualms.gradients.exact.by_parts import by_parts
from qualms.gradients.exact.checks import (
    Regrouped,
    measure_separate,
    require_same_alone,
    require_same_in_other_company,
    require_separate_gradients,
)
from qualms.gradients.exact.measure import Kind, measure
from qualms.gradients.exact.probe import Probe
from qualms.gradients.inputs import Unclear, count
from qualms.gradients.job import Job
from qualms.gradients.learnt import Key, Learnt
from qualms.gradients.measured import Measured
from qualms.gradients.memory import in_mebibytes
from qualms.gradients.rows import Rows
from qualms.gradients.watch.forward import recorded, use_order
from qualms.gradients.watch.weights import UseOrder

PROBED = 16  # rows among which the probe looks for two that differ


def exact(job: Job, kind: Kind, learnt: Learnt, regrouped: Float[Tensor, "b c"] | None = None) -> Measured:
    """Norms (or inner products) of the gradients along the job's directions, for every selected parameter.

    Args:
        job: what is wanted.
        kind: ‖g‖ (`l2`), Σ|g| (`l1`) or inner products (`gram`).
        learnt: where the look at the first rows is kept for the next batch.
        regrouped: the logits of the inputs from forward passes in other company than their neighbours', if known.
    """
    key = _key(job)
    kept = learnt.get(key)
    if isinstance(kept, Probe) and kept.serves(job.inputs * job.per_input, job.budget):
        try:
            return _in_order(job, kind, _in_chunks(job, kind, kept, regrouped, None), kept.use_order)
        except Exception:  # other inputs than those it was made on: look again
            del learnt.found[key]
    probe = _look(job)
    if isinstance(probe, Exception):
        learnt.warn_slow(probe)
        row_bytes = graph_bytes(job, job.rows(slice(0, 1)).take([0]))
        whole = Measured.joined(
            [by_autograd(job.along_own(one), job.rows(one), kind, row_bytes) for one in _chunks(job.inputs, 1)]
        )
        return _in_order(job, kind, whole, use_order(job.model, job.rows(slice(0, 1)), job.selected))
    learnt.keep(key, probe)
    return _in_order(job, kind, _in_chunks(job, kind, probe, regrouped, learnt), probe.use_order)


def look_at(job: Job, learnt: Learnt) -> Probe | Exception:
    """What the first rows of a job tell, kept for all that follow; the reason if they have to run one at a time."""
    kept: Probe | Exception | None = learnt.get(_key(job))
    if kept is None:
        kept = _look(job)
        if isinstance(kept, Probe):
            learnt.keep(_key(job), kept)
    return kept


def _key(job: Job) -> Key:
    return ("probe", job.shapes, tuple(job.selected))


def _look(job: Job) -> Probe | Exception:
    return Probe.of(job.model, job.rows(slice(0, max(2, PROBED // job.per_input))), job.selected, job.budget)


def _in_chunks(job: Job, kind: Kind, probe: Probe, regrouped: Tensor | None, slow: Learnt | None) -> Measured:
    """Chunk by chunk; what fails a check is run by plain autograd and reported to `slow`, or an error without one."""
    by_features = probe.by_features(job.budget, job.per_input, kind, job.directions.names)
    most = probe.inputs_in(
        job.budget, job.per_input, kind, by_features, None if by_features else job.directions.size(probe.classes)
    )
    chunks = _chunks(job.inputs, min(job.settings.batch_size or most, most) or 1)
    parts: list[Measured] = []
    of_rows = Regrouped(job, chunks, regrouped)
    for chunk in chunks:
        on, own = job.rows(chunk), job.along_own(chunk)
        part: Measured | None
        try:
            if most == 0 and kind == "gram":
                raise Unclear(f"the gradients of all classes of one input do not fit {in_mebibytes(job.budget)}")
            if most == 0:
                part = by_parts(own, on, kind, probe)
            else:
                part = _by_pieces(own, probe.formatted(on), kind, probe, by_features, of_rows[chunk], slow is None)
        except Exception as error:
            if slow is None:
                raise
            slow.warn_slow(error)
            part = None
        # Outside of the block, whose error holds the graph. If the model itself is at fault, plain autograd says so.
        parts.append(part or by_autograd(own, on, kind, probe.row_bytes))
    return Measured.joined(parts)


def _chunks(inputs: int, most: int) -> list[slice]:
    """Parts of nearly equal size, of at most `most` inputs."""
    number = -(-inputs // most)
    size = -(-inputs // number)
    return [slice(start, min(start + size, inputs)) for start in range(0, inputs, size)]


def _by_pieces(
    job: Job,
    on: Rows,
    kind: Kind,
    probe: Probe,
    by_features: bool,
    regrouped: Float[Tensor, "b _ c"],
    same_path: bool,
) -> Measured:
    """The fast way; an exception if it cannot be trusted with these inputs.

    `same_path`: the probe saw other inputs, and what it says of the rows' places holds only on the same path.
    """
    inputs = count(on.batch) // on.per_input
    logits, recorder = recorded(job.model, on, probe.weights, probe.twins)
    if same_path and recorder.first_use != probe.use_order.names:
        raise Unclear("these inputs use the model's parameters in another order")
    apart = logits.unflatten(0, (inputs, on.per_input))
    compared = apart.detach()[:, : regrouped.shape[1]].flatten(0, 1)
    require_same_in_other_company(compared, regrouped.flatten(0, 1), probe.precision)
    require_same_alone(job.model, on, logits.detach(), probe.compares_alone(recorder), probe.precision)
    pieces = recorder.pieces
    last = LastProduct.of(logits, pieces, probe.weights) if by_features else None
    if last is not None:
        require_separate_gradients(logits, pieces, probe.weights, inputs, probe.precision)
        values = measure_by_features(logits, job.directions.names, last, probe.weights, inputs)
    elif kind == "gram":
        require_separate_gradients(logits, pieces, probe.weights, inputs, probe.precision)
        values = measure(logits, job.directions.along(apart), pieces, probe.weights, inputs, kind)
    else:
        values = measure_separate(
            logits, job.directions.along(apart), pieces, probe.weights, inputs, kind, probe.precision
        )
    return Measured(values, apart[:, 0].detach(), recorder.general)


def _in_order(job: Job, kind: Kind, whole: Measured, use_order: UseOrder) -> Measured:
    """The same, with all parameters that count, in the model's order; those that no input here uses are zero."""
    number = job.directions.size(whole.logits.shape[1])
    shape = (job.inputs, number, number) if kind == "gram" else (job.inputs, number)
    nothing = torch.zeros(shape, dtype=torch.double, device=whole.logits.device)
    order = use_order.counted(whole.values, job.selected)
    whole.values = {name: whole.values.get(name, nothing) for name in order}
    return whole
