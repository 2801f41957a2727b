"""One table of gradient norms for each input, direction and layer, whatever the engine."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from qualms.gradients.exact.early_layers import Cutoff
from qualms.gradients.exact.engine import exact
from qualms.gradients.exact.measure import Kind
from qualms.gradients.job import Job
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
            done.append(exact(job, kind, learnt, regrouped, _cutoff(job, kind, lam)))
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
    return LayerTable(values, whole.logits, list(groups), general)


def _cutoff(job: Job, kind: Kind, lam: float | None) -> Cutoff | None:
    """How much of the early layers may be left out; None if nothing, or if some score does not weight them down."""
    if not job.settings.tolerance or not lam or lam < 0 or kind == "gram":
        return None
    model, granularity = job.model, job.settings.granularity
    return Cutoff(job.settings.tolerance, lam, lambda names: list(grouped(model, names, granularity).values()), kind)
