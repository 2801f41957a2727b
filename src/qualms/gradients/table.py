"""One table of gradient norms for each input, direction and layer, whatever the engine."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from qualms.gradients.exact.engine import exact
from qualms.gradients.exact.measure import Kind
from qualms.gradients.job import Job
from qualms.gradients.late_layers import LateLayers
from qualms.gradients.layers import grouped
from qualms.gradients.learnt import Learnt
from qualms.gradients.measured import Measured, added_up
from qualms.gradients.precision import accurate
from qualms.gradients.reference import reference
from qualms.gradients.sketch.engine import sketch_layers


@dataclass(frozen=True)
class LayerTable:
    """[b, m, l] norms of the gradients along m directions, or [b, l, m, m] of inner products, in double precision."""

    values: Tensor
    logits: Float[Tensor, "b c"]
    layers: list[str]
    general: list[str]  # layers that no fast rule covered
    error: Tensor | None = None  # standard error, if the norms are sketched
    left_out: float = 0.0  # the largest share of Σ_l a_l ‖g_l‖ that layers which were left out were seen to add
    early: int = 0  # how many layers were left out


def layer_table(
    jobs: Iterable[Job],
    learnt: Learnt,
    *,
    gram: bool = False,
    regrouped: Float[Tensor, "b c"] | None = None,
    lam: float | None = None,
) -> LayerTable:
    """Runs the engine on each batch, and adds up parameters to layers.

    Args:
        jobs: batches of one model, with one set of settings.
        learnt: what is kept of the model from batch to batch.
        gram: inner products instead of norms, by the exact engine.
        regrouped: the logits of the only job, where they are known (see `exact`).
        lam: the smallest λ of the scores that the norms are for; None if any of them takes all layers alike.
    """
    done: list[Measured] = []
    errors: list[Measured] = []
    late: LateLayers | None = None
    for job in jobs:
        settings = job.settings
        kind: Kind = "gram" if gram else settings.norm
        if settings.sketch is not None:
            found, logits = sketch_layers(job, learnt)
            done.append(Measured({layer: norms for layer, (norms, _) in found.items()}, logits, set()))
            errors.append(Measured({layer: error for layer, (_, error) in found.items()}, logits, set()))
        elif settings.engine == "reference":
            done.append(reference(job, settings.norm))
        else:
            late = None if gram else late_layers(job, lam, learnt)
            done.append(_exact(job, kind, learnt, regrouped, late))
    whole = Measured.joined(done)
    if errors:
        dtype = accurate(whole.logits).dtype
        norms, error = (
            torch.stack(list(m.values.values()), dim=-1).to(dtype) for m in (whole, Measured.joined(errors))
        )
        return LayerTable(norms, whole.logits, list(whole.values), [], error)
    groups = grouped(job.model, list(whole.values), settings.granularity)
    dtype = accurate(whole.logits).dtype
    columns: list[Tensor] = []
    for names in groups.values():  # each is let go when it is in its layer: together they take more than the table
        together = added_up((whole.values.pop(name) for name in names), kind)
        columns.append(together if gram else together.to(dtype))
    values = torch.stack(columns, dim=1 if gram else -1)
    general = [layer for layer, names in groups.items() if not whole.general.isdisjoint(names)]
    left_out, early = (late.share, late.early) if late is not None else (0.0, 0)
    return LayerTable(values, whole.logits, list(groups), general, left_out=left_out, early=early)


def late_layers(job: Job, lam: float | None, learnt: Learnt) -> LateLayers | None:
    """The layers that a tolerance leaves to be computed; None for all, as where a score does not weight them down."""
    settings = job.settings
    if not settings.tolerance or not lam or lam < 0:
        return None
    key = ("late layers", job.shapes, tuple(job.selected), settings.granularity, settings.norm, lam)
    return learnt.once(key, lambda: LateLayers.of(job, lam))


def _exact(
    job: Job, kind: Kind, learnt: Learnt, regrouped: Float[Tensor, "b c"] | None, late: LateLayers | None
) -> Measured:
    """The exact engine on the late layers, or on all of them; those that are left out have zeros."""
    while late is not None and late.early:
        found = exact(late.job(job), kind, learnt, regrouped)
        if late.confirm(job, found):
            nothing = torch.zeros_like(next(iter(found.values.values())))
            left_out = {name: nothing for layer in late.layers[: late.early] for name in layer}
            return replace(found, values=left_out | found.values)
    return exact(job, kind, learnt, regrouped)
