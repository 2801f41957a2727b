"""One table of gradient norms for each sample, direction and layer, whatever the engine.

Also the blocks of a model, in the order in which it uses them.
"""

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
        logits: of the samples as the engine ran them.
        layers: names.
        general: layers that no fast rule covered.
        error: standard error of the norms, if they are sketched.
        left_out: the largest share of Σ_l a_l ‖g_l‖ that layers which were left out were seen to
            add.
        num_left_out: how many layers were left out.
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
        parts.append(run_first(engines_for(request, cache), request, cache))
    whole = ClassNorms.concatenate(parts)
    if whole.errors is not None:
        return _table_of_estimates(whole, whole.errors)
    groups = group_by_layer(request.model, list(whole.values), request.settings.granularity)
    dtype = torch.double if gram else at_least_float32(whole.logits).dtype
    columns: list[Tensor] = []
    general: list[str] = []
    for layer, names in groups.items():
        # Each is freed when it is in its layer: together they take more than the table.
        of_layer = (whole.values.pop(name) for name in names)
        columns.append(combine_parameters(of_layer, request.kind).to(dtype))
        if not whole.general.isdisjoint(names):
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
    """The table of a sketch, which estimates the norms of whole layers."""
    dtype = at_least_float32(norms.logits).dtype
    values = torch.stack(list(norms.values.values()), dim=-1).to(dtype)
    error = torch.stack(list(errors.values()), dim=-1).to(dtype)
    return LayerTable(values, norms.logits, list(norms.values), [], error)


def heavy_blocks(
    model: nn.Module,
    batch: Batch,
    selected: dict[str, Tensor],
) -> list[list[str]]:
    """The parameters of each residual or transformer block, or layer, in order of use.

    A block has a matrix or kernel; parameters without one belong to the block before them. Those
    before the first block are left out, unless there is no block: then all are one. There are none
    if the model hides from torch's function modes which parameters it uses.

    Args:
        model: inside `preserve_state`.
        batch: samples like those to be scored.
        selected: the parameters that count.
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
