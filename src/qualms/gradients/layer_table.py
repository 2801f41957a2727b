"""Gradient norms by sample, direction and layer, from any engine."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from qualms.gradients.engines.base import ClassNorms, combine_parameters, run_first
from qualms.gradients.engines.choice import engines_for
from qualms.gradients.layers import group_by_layer
from qualms.gradients.plan_cache import PlanCache
from qualms.gradients.precision import at_least_float32
from qualms.gradients.request import GradientRequest


@dataclass(frozen=True)
class LayerTable:
    """Gradient norms or inner products, for b samples, l layers and m directions in logit space.

    Attributes:
        values: norms of the gradients [b, m, l]; or their inner products [b, l, m, m], in double
            precision.
        logits: the logits of the samples, as the engine ran them.
        layers: the names of the layers, in order of first use.
        general: the layers that have a parameter without a fast gradient rule.
        error: standard errors [b, m, l] of the norms; None unless the norms are sketched.
        left_out: an engine may leave out early layers that hardly matter to a score
            Σ_l a_l ‖g_l‖: the largest share that they were observed to contribute.
        num_left_out: the number of early layers left out.
    """

    values: Tensor
    logits: Float[Tensor, "b c"]
    layers: list[str]
    general: list[str]
    error: Tensor | None = None
    left_out: float = 0.0
    num_left_out: int = 0


def layer_table(requests: Iterable[GradientRequest], cache: PlanCache) -> LayerTable:
    """Run each request by the first engine that can, and combine parameters into layers.

    Args:
        requests: requests for consecutive batches of one model, with the same settings.
        cache: the plans of the model, reused from batch to batch.

    Returns:
        One table for the samples of all requests.
    """
    results: list[ClassNorms] = []
    for request in requests:
        results.append(run_first(engines_for(request, cache), request, cache))
    norms = ClassNorms.concatenate(results)
    # Only the estimates of a sketch have standard errors.
    if norms.errors is not None:
        return _table_of_estimates(norms, norms.errors)
    # `request` is the last one: all have the same model and settings.
    names_by_layer = group_by_layer(request.model, list(norms.values), request.settings.granularity)
    dtype = torch.double if request.gram else at_least_float32(norms.logits).dtype
    layer_values: list[Tensor] = []
    general: list[str] = []
    for layer, names in names_by_layer.items():
        # `pop` frees each value once it is combined: together the values take more than the table.
        parameter_values = (norms.values.pop(name) for name in names)
        layer_values.append(combine_parameters(parameter_values, request.kind).to(dtype))
        # Users are told which layers take a general, slower way.
        if norms.without_rule & set(names):
            general.append(layer)
    return LayerTable(
        values=torch.stack(layer_values, dim=1 if request.gram else -1),
        logits=norms.logits,
        layers=list(names_by_layer),
        general=general,
        left_out=norms.left_out,
        num_left_out=norms.num_left_out,
    )


def _table_of_estimates(norms: ClassNorms, errors: dict[str, Tensor]) -> LayerTable:
    """Make the table of a sketch, which estimates whole layers instead of parameters.

    Args:
        norms: the estimates, with the names of layers as keys.
        errors: the standard errors of the estimates, by layer.
    """
    dtype = at_least_float32(norms.logits).dtype
    values = torch.stack(list(norms.values.values()), dim=-1).to(dtype)
    error = torch.stack(list(errors.values()), dim=-1).to(dtype)
    return LayerTable(
        values,
        norms.logits,
        layers=list(norms.values),
        general=[],
        error=error,
    )
