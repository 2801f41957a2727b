"""One table of gradient norms for each sample, direction and layer, whatever the engine."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from qualms.gradients.engines.base import ClassNorms, combine_parameters
from qualms.gradients.engines.choice import compute_norms
from qualms.gradients.engines.layer_cut import LayerCut, find_layer_cut
from qualms.gradients.layers import group_by_layer
from qualms.gradients.plan_cache import PlanCache
from qualms.gradients.precision import at_least_float32
from qualms.gradients.request import GradientRequest


@dataclass(frozen=True)
class LayerTable:
    """Gradient norms, or inner products, layer by layer.

    Attributes:
        values: [b, m, l] norms of the gradients along m directions, or [b, l, m, m] inner products,
            in double precision.
        logits: of the samples as the engine ran them.
        layers: names.
        general: layers that no fast rule covered.
        error: standard error of the norms, if they are sketched.
        left_out: the largest share of Σ_l a_l ‖g_l‖ that layers which were left out were seen to
            add.
        early: how many layers were left out.
    """

    values: Tensor
    logits: Float[Tensor, "b c"]
    layers: list[str]
    general: list[str]
    error: Tensor | None = None
    left_out: float = 0.0
    early: int = 0


def layer_table(
    requests: Iterable[GradientRequest],
    cache: PlanCache,
    *,
    gram: bool = False,
    regrouped: Tensor | None = None,
    lam: float | None = None,
) -> LayerTable:
    """Compute the gradients of each request, and combine parameters to layers.

    Args:
        requests: batches of one model, with one set of settings.
        cache: what is kept of the model from batch to batch.
        gram: inner products in place of norms.
        regrouped: `known_logits` of the only request.
        lam: `smallest_lambda` of the requests.
    """
    parts: list[ClassNorms] = []
    for one in requests:
        request = replace(one, gram=gram, known_logits=regrouped, smallest_lambda=lam)
        parts.append(compute_norms(request, cache))
    whole = ClassNorms.concatenate(parts)
    table = LayerTable(
        torch.empty(0),
        whole.logits,
        list(whole.values),
        [],
        left_out=whole.left_out,
        early=whole.num_left_out,
    )
    dtype = at_least_float32(whole.logits).dtype
    if whole.errors is not None:
        values = torch.stack(list(whole.values.values()), dim=-1).to(dtype)
        errors = torch.stack(list(whole.errors.values()), dim=-1).to(dtype)
        return replace(table, values=values, error=errors)
    groups = group_by_layer(request.model, list(whole.values), request.settings.granularity)
    columns: list[Tensor] = []
    for names in groups.values():
        # Each is let go when it is in its layer: together they take more than the table.
        column = combine_parameters((whole.values.pop(name) for name in names), request.kind)
        columns.append(column if request.gram else column.to(dtype))
    general: list[str] = []
    for layer, names in groups.items():
        if not whole.general.isdisjoint(names):
            general.append(layer)
    values = torch.stack(columns, dim=1 if request.gram else -1)
    return replace(table, values=values, layers=list(groups), general=general)


def late_layers(request: GradientRequest, lam: float | None, cache: PlanCache) -> LayerCut | None:
    """The layers that a tolerance leaves to be computed; None for all."""
    return find_layer_cut(replace(request, smallest_lambda=lam), cache)
