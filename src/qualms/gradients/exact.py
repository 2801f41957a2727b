"""The exact engine: gradient norms of all classes from one forward and C backward passes through the activations.

∇θ log p_c = Jᵀ(e_c - p). Back-propagating e_c - p for a whole batch gives, at every operation that uses a parameter,
the cotangents of all its inputs at once; the pieces that the recorder left there turn them into norms. No weight
gradient is formed for the batch as a whole, and none is kept.

Nothing is taken on trust: the first input's gradient is also computed by plain autograd, and what the pieces say must
agree. A model for which it does not (one that mixes the inputs of a batch, or hides operations from torch's function
modes) is run by plain autograd throughout, one row at a time.
"""

import logging
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from qualms.gradients.combine import Kind, measure
from qualms.gradients.inputs import Batch, count, take
from qualms.gradients.layout import Unclear
from qualms.gradients.measured import Measured
from qualms.gradients.plain import row_gradients
from qualms.gradients.probe import Probe, recorded
from qualms.gradients.smoothing import Rows, Smoothing, rows

log = logging.getLogger("qualms")
Directions = Callable[[Float[Tensor, "b r c"]], Float[Tensor, "m b r c"]]


def exact(
    model: nn.Module,
    batch: Batch,
    selected: dict[str, Tensor],
    *,
    kind: Kind,
    directions: Directions,
    smoothing: Smoothing | None,
    first_index: int,
    seed: int,
    budget: int,
    batch_size: int | None,
) -> Measured:
    """Norms (or inner products) of the gradients along `directions`, for every selected parameter."""
    per_input = smoothing.draws + 1 if smoothing else 1
    probe = Probe.of(model, rows(batch, smoothing, first_index, seed, at_most=PROBED), selected)
    size = min(batch_size or count(batch), count(batch), probe.inputs_in(budget, per_input, kind))
    parts: list[Measured] = []
    for start in range(0, count(batch), size):
        on = rows(take(batch, slice(start, start + size)), smoothing, first_index + start, seed)
        part = None
        if probe.trusted and (probe.plan is not None or count(on.batch) == 1):
            try:
                part = _by_pieces(model, probe.formatted(on), kind, directions, probe)
            except Unclear as reason:
                log.info("%s: these inputs are run by plain autograd, one row at a time", reason)
        parts.append(part or _by_autograd(model, on, selected, kind, directions))
    whole = Measured.joined(parts)
    if probe.plan is None and count(batch) > 1:
        whole.general = set(whole.values)  # run one input at a time
    order = [name for name in probe.first_use if name in whole.values]
    order += [name for name in whole.values if name not in probe.first_use]
    whole.values = {name: whole.values[name] for name in order}
    return whole


PROBED = 16  # inputs among which the probe looks for two that differ


def _by_pieces(model: nn.Module, on: Rows, kind: Kind, directions: Directions, probe: Probe) -> Measured:
    logits, recorder = recorded(model, on, probe.weights, probe.plan)
    inputs = count(on.batch) // on.per_input
    apart = logits.unflatten(0, (inputs, on.per_input))
    cotangents = directions(apart).flatten(1, 2) / on.per_input
    values = measure(logits, cotangents, recorder.pieces, probe.weights, inputs, kind)
    return Measured(values, apart[:, 0].detach(), recorder.one_by_one)


def _by_autograd(
    model: nn.Module, on: Rows, selected: dict[str, Tensor], kind: Kind, directions: Directions
) -> Measured:
    """The general path for a whole model: exact whatever it does, at the price of one row at a time."""
    inputs = count(on.batch) // on.per_input
    logits: list[Tensor] = []
    values: dict[str, list[Tensor]] = {}
    for i in range(inputs):
        total: dict[str, Tensor] = {}
        for r in range(on.per_input):
            row = on.take(slice(i * on.per_input + r, i * on.per_input + r + 1))
            z, gradients = row_gradients(model, row, selected, lambda z: directions(z[:, None]).flatten(1, 2))
            if r == 0:
                logits.append(z)
            for name, g in gradients.items():
                total[name] = total.get(name, 0) + g / on.per_input
        for name, g in total.items():
            flat = g.reshape(g.shape[0], -1)
            value = flat @ flat.mT if kind == "gram" else flat.abs().sum(1) if kind == "l1" else flat.square().sum(1)
            values.setdefault(name, []).append(value)
    return Measured({n: torch.stack(v) for n, v in values.items()}, torch.cat(logits), set(values))
