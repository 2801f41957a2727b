"""The exact engine: gradient norms of all classes from one forward and C backward passes through the activations.

∇θ log p_c = Jᵀ(e_c - p). Back-propagating e_c - p for a whole batch gives, at every operation that uses a parameter,
the cotangents of all its inputs at once; the pieces that the recorder left there turn them into norms. No weight
gradient is formed for the batch as a whole, and none is kept.

What the pieces say is tested before it is believed (`trust.py`). Inputs for which a test fails, because the model mixes
the inputs of a batch or hides operations from torch's function modes, are run by plain autograd, one row at a time.
"""

import logging

from jaxtyping import Float
from torch import Tensor, nn

from qualms.gradients.autograd import row_gradients
from qualms.gradients.directions import Directions
from qualms.gradients.exact.by_features import LastProduct, measure_by_features
from qualms.gradients.exact.checks import regrouped_logits, require_independent_rows, require_separate_gradients
from qualms.gradients.exact.early_layers import Cutoff, EarlyLayers
from qualms.gradients.exact.measure import Kind, measure
from qualms.gradients.exact.probe import Probe, first_use, recorded
from qualms.gradients.inputs import Batch, count, take
from qualms.gradients.measured import Measured
from qualms.gradients.smoothing import Rows, Smoothing, rows
from qualms.gradients.watch.pieces import Piece

log = logging.getLogger("qualms")


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
    cutoff: Cutoff | None = None,
) -> Measured:
    """Norms (or inner products) of the gradients along `directions`, for every selected parameter.

    With a cutoff, those of early layers that cannot matter are zero for all but the first chunk of inputs.
    """

    def rows_for(part: slice) -> Rows:
        return rows(take(batch, part), smoothing, range(first_index, first_index + count(batch))[part], seed)

    probe = Probe.of(model, rows_for(slice(0, PROBED)), selected)
    per_input = smoothing.draws + 1 if smoothing else 1
    by_features = probe is not None and probe.by_features(budget, per_input, kind, directions.names)
    most = probe.inputs_in(budget, per_input, kind, by_features) if probe else 1
    chunks = _chunks(count(batch), min(batch_size or most, most))
    in_other_company = None
    if probe is not None:
        try:
            in_other_company = regrouped_logits(model, count(batch), rows_for, len(chunks))
        except Exception as reason:  # if the model itself is at fault, plain autograd will say so
            log.info("%s: the inputs are run by plain autograd, one row at a time", reason)
    parts: list[Measured] = []
    early: frozenset[str] = frozenset()
    for chunk in chunks:
        on = rows_for(chunk)
        part = None
        if probe is not None and in_other_company is not None:
            early_layers = EarlyLayers(cutoff, early, probe.first_use) if cutoff is not None and early else None
            elsewhere = in_other_company[chunk]
            part = _by_pieces(model, probe.formatted(on), kind, directions, probe, by_features, elsewhere, early_layers)
        if part is not None and probe is not None and cutoff is not None and not parts:
            early = cutoff.early(part.values, probe.first_use)
        parts.append(part or _by_autograd(model, on, selected, kind, directions))
    whole = Measured.joined(parts)
    used_first = probe.first_use if probe else first_use(model, rows_for(slice(0, 1)), selected)
    order = [name for name in used_first if name in whole.values]
    order += [name for name in selected if name in whole.values and name not in order]
    whole.values = {name: whole.values[name] for name in order}
    return whole


PROBED = 16  # inputs among which the probe looks for two that differ


def _chunks(inputs: int, most: int) -> list[slice]:
    """Parts of nearly equal size, of `most` inputs at the most."""
    number = -(-inputs // most)
    size = -(-inputs // number)
    return [slice(start, min(start + size, inputs)) for start in range(0, inputs, size)]


def _by_pieces(
    model: nn.Module,
    on: Rows,
    kind: Kind,
    directions: Directions,
    probe: Probe,
    by_features: bool,
    in_other_company: Float[Tensor, "b r c"],
    early_layers: EarlyLayers | None,
) -> Measured | None:
    """The fast way, or None if it cannot be trusted with these inputs."""
    inputs = count(on.batch) // on.per_input
    try:
        logits, recorder = recorded(model, on, probe.weights, probe.twins)
        require_independent_rows(model, on, logits.detach(), in_other_company.flatten(0, 1), recorder)
        require_separate_gradients(logits, recorder, probe.weights, inputs)
        apart = logits.unflatten(0, (inputs, on.per_input))
        pieces: list[Piece] = recorder.pieces
        if early_layers is not None:
            pieces = early_layers.pieces(logits, directions, pieces, probe.weights, inputs)
        head = LastProduct.of(logits, pieces, probe.weights) if by_features else None
        if (
            by_features and head is None
        ):  # nothing but the head is left: its chunks have no room for a pass for each class
            head = LastProduct.of(logits, recorder.pieces, probe.weights)
        if head is not None:
            values = measure_by_features(logits, directions.names, head, probe.weights, inputs)
        else:
            cotangents = directions(apart).flatten(1, 2) / on.per_input
            values = measure(logits, cotangents, pieces, probe.weights, inputs, kind)
    except Exception as reason:  # if the model itself is at fault, plain autograd will say so
        log.info("%s: these inputs are run by plain autograd, one row at a time", reason)
        return None
    return Measured(values, apart[:, 0].detach(), recorder.one_by_one)


def _by_autograd(
    model: nn.Module, on: Rows, selected: dict[str, Tensor], kind: Kind, directions: Directions
) -> Measured:
    """The general path for a whole model: exact whatever it does, at the price of one row at a time."""
    parts: list[Measured] = []
    for start in range(0, count(on.batch), on.per_input):
        total: dict[str, Tensor] = {}
        for r in range(on.per_input):
            row = on.take(slice(start + r, start + r + 1))
            z, gradients = row_gradients(model, row, selected, lambda z: directions(z[:, None]).flatten(1, 2))
            if r == 0:
                logits = z
            for name, g in gradients.items():
                total[name] = total.get(name, 0) + g / on.per_input
        values = {name: _measured(g.reshape(1, len(g), -1), kind) for name, g in total.items()}
        parts.append(Measured(values, logits, set(values)))
    return Measured.joined(parts)


def _measured(gradients: Float[Tensor, "1 m p"], kind: Kind) -> Tensor:
    if kind == "gram":
        return gradients @ gradients.mT
    return gradients.abs().sum(2) if kind == "l1" else gradients.square().sum(2)
