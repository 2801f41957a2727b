"""Gradient norms by sample, direction and layer, from any engine; and the blocks of a model."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from qualms.gradients.batch import Batch, take_samples
from qualms.gradients.engines.base import ClassNorms, combine_parameters, run_first
from qualms.gradients.engines.choice import engines_for
from qualms.gradients.layers import group_by_layer
from qualms.gradients.model_input import ModelInput
from qualms.gradients.plan_cache import PlanCache
from qualms.gradients.precision import at_least_float32
from qualms.gradients.request import GradientRequest
from qualms.gradients.tracing.traced_forward import use_order


@dataclass(frozen=True)
class LayerTable:
    """Gradient norms, or inner products, layer by layer.

    Attributes:
        values: [b, m, l] norms of the gradients along m directions, or [b, l, m, m] inner products,
            which are in double precision.
        logits: the logits of the samples, as the engine ran them.
        layers: the names of the layers, in order of first use.
        general: the layers that have a parameter without a fast gradient rule.
        error: standard errors [b, m, l] of the norms; None unless the norms are sketched.
        left_out: the largest observed share of Σ_l a_l ‖g_l‖ that the early layers left out
            contribute.
        num_left_out: the number of early layers left out.
    """

    values: Tensor
    logits: Float[Tensor, "b c"]
    layers: list[str]
    general: list[str]
    error: Tensor | None = None
    left_out: float = 0.0
    num_left_out: int = 0


def layer_table(
    requests: Iterable[GradientRequest],
    cache: PlanCache,
    *,
    gram: bool = False,
    regrouped: Tensor | None = None,
    lam: float | None = None,
) -> LayerTable:
    """Measure the gradients of each request, and combine the values of parameters into layers.

    Args:
        requests: requests for consecutive batches of one model, with the same settings.
        cache: the plans of the model, reused from batch to batch.
        gram: whether to compute inner products in place of norms.
        regrouped: the logits [b, c] of the samples from other batches (`known_logits` of the
            request); only if there is a single request.
        lam: `smallest_lambda` of the requests.
    """
    parts: list[ClassNorms] = []
    for given_request in requests:
        request = replace(given_request, gram=gram, known_logits=regrouped, smallest_lambda=lam)
        parts.append(run_first(engines_for(request, cache), request, cache))
    whole = ClassNorms.concatenate(parts)
    if whole.errors is not None:
        return _table_of_estimates(whole, whole.errors)
    groups = group_by_layer(request.model, list(whole.values), request.settings.granularity)
    dtype = torch.double if gram else at_least_float32(whole.logits).dtype
    columns: list[Tensor] = []
    general: list[str] = []
    for layer, names in groups.items():
        # `pop` frees each value once it is combined: together the values take more than the table.
        layer_values = (whole.values.pop(name) for name in names)
        columns.append(combine_parameters(layer_values, request.kind).to(dtype))
        if not whole.without_rule.isdisjoint(names):
            general.append(layer)
    return LayerTable(
        torch.stack(columns, dim=1 if gram else -1),
        whole.logits,
        list(groups),
        general,
        left_out=whole.left_out,
        num_left_out=whole.num_left_out,
    )


def _table_of_estimates(norms: ClassNorms, errors: dict[str, Tensor]) -> LayerTable:
    """Make the table of a sketch, whose values are estimates for whole layers."""
    dtype = at_least_float32(norms.logits).dtype
    values = torch.stack(list(norms.values.values()), dim=-1).to(dtype)
    error = torch.stack(list(errors.values()), dim=-1).to(dtype)
    return LayerTable(values, norms.logits, list(norms.values), [], error)


def heavy_blocks(
    model: nn.Module,
    batch: Batch,
    selected: dict[str, Tensor],
) -> list[list[str]]:
    """The parameter names of each residual or transformer block (or layer), in order of use.

    Every block has a matrix or kernel; layers without one (normalizations) join the block before
    them. Layers before the first block are left out; without any block, all parameters form one.

    Args:
        model: the model, inside `preserve_state`.
        batch: samples like those to be scored.
        selected: the parameters whose gradients are wanted, by name.

    Returns:
        Lists of parameter names; empty if torch's function modes do not show which parameters the
        model uses.
    """
    first = ModelInput(take_samples(batch, slice(0, 1)))
    order = use_order(model, first, selected)
    if not order.names:
        return []
    counted = order.relevant(order.names, selected)
    blocks: list[list[str]] = []
    for names in group_by_layer(model, counted, "block").values():
        if any(selected[name].ndim > 1 for name in names):
            blocks.append([])
        if blocks:
            blocks[-1] += names
    return blocks or [counted]
