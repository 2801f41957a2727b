"""One table of gradient norms for each input, direction and layer, whatever the engine."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from qualms.gradients.engines.base import ClassNorms, combine_parameters
from qualms.gradients.engines.exact import exact
from qualms.gradients.engines.layer_cut import LayerCut
from qualms.gradients.engines.reference import reference
from qualms.gradients.engines.sketch import SketchEngine
from qualms.gradients.layers import group_by_layer
from qualms.gradients.measure import Kind
from qualms.gradients.plan_cache import PlanCache
from qualms.gradients.precision import at_least_float32
from qualms.gradients.request import GradientRequest


@dataclass(frozen=True)
class LayerTable:
    """[b, m, l] norms of the gradients along m directions, or [b, l, m, m] of inner products, in
    double precision.
    """

    values: Tensor
    logits: Float[Tensor, "b c"]
    layers: list[str]
    general: list[str]  # layers that no fast rule covered
    error: Tensor | None = None  # standard error, if the norms are sketched
    left_out: float = (
        0.0  # the largest share of Σ_l a_l ‖g_l‖ that layers which were left out were seen to add
    )
    early: int = 0  # how many layers were left out


def layer_table(
    jobs: Iterable[GradientRequest],
    learnt: PlanCache,
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
        lam: the smallest λ of the scores that the norms are for; None if any of them takes all
            layers alike.
    """
    done: list[ClassNorms] = []
    late: LayerCut | None = None
    for job in jobs:
        settings = job.settings
        kind: Kind = "gram" if gram else settings.norm
        if settings.sketch is not None:
            engine = SketchEngine(learnt)
            done.append(engine.run(engine.plan(job), job))
        elif settings.engine == "reference":
            done.append(reference(job, settings.norm))
        else:
            late = None if gram else late_layers(job, lam, learnt)
            done.append(_exact(job, kind, learnt, regrouped, late))
    whole = ClassNorms.concatenate(done)
    if whole.errors is not None:
        dtype = at_least_float32(whole.logits).dtype
        norms, errors = (
            torch.stack(list(columns.values()), dim=-1).to(dtype)
            for columns in (whole.values, whole.errors)
        )
        return LayerTable(norms, whole.logits, list(whole.values), [], errors)
    groups = group_by_layer(job.model, list(whole.values), settings.granularity)
    dtype = at_least_float32(whole.logits).dtype
    columns: list[Tensor] = []
    for names in (
        groups.values()
    ):  # each is let go when it is in its layer: together they take more than the table
        together = combine_parameters((whole.values.pop(name) for name in names), kind)
        columns.append(together if gram else together.to(dtype))
    values = torch.stack(columns, dim=1 if gram else -1)
    general = [layer for layer, names in groups.items() if not whole.general.isdisjoint(names)]
    left_out, early = (late.share, late.early) if late is not None else (0.0, 0)
    return LayerTable(values, whole.logits, list(groups), general, left_out=left_out, early=early)


def late_layers(job: GradientRequest, lam: float | None, learnt: PlanCache) -> LayerCut | None:
    """The layers that a tolerance leaves to be computed; None for all, as where a score does not
    weight them down.
    """
    settings = job.settings
    if not settings.tolerance or not lam or lam < 0:
        return None
    key = ("late layers", job.shapes, tuple(job.selected), settings.granularity, settings.norm, lam)
    return learnt.once(key, lambda: LayerCut.of(job, lam))


def _exact(
    job: GradientRequest,
    kind: Kind,
    learnt: PlanCache,
    regrouped: Float[Tensor, "b c"] | None,
    late: LayerCut | None,
) -> ClassNorms:
    """The exact engine on the late layers, or on all of them; those that are left out have zeros."""
    while late is not None and late.early:
        found = exact(late.job(job), kind, learnt, regrouped)
        if late.confirm(job, found):
            nothing = torch.zeros_like(next(iter(found.values.values())))
            left_out = {name: nothing for layer in late.layers[: late.early] for name in layer}
            return replace(found, values=left_out | found.values)
    return exact(job, kind, learnt, regrouped)
