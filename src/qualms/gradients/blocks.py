"""The blocks of a model, in the order in which it uses them: residual or transformer blocks, or
layers.
"""

from torch import Tensor, nn

from qualms.gradients.batch import Batch, take_samples
from qualms.gradients.layers import group_by_layer
from qualms.gradients.model_input import ModelInput
from qualms.gradients.tracing.traced_forward import use_order


def heavy_blocks(model: nn.Module, batch: Batch, selected: dict[str, Tensor]) -> list[list[str]]:
    """The names of the parameters of each block that has a matrix or kernel, with those of what
    follows it.

    What stands before the first such block is left out, unless there is none: then all is one
    block. There are no blocks if the model hides from torch's function modes which parameters it
    uses.

    Args:
        model: under `untouched`.
        batch: inputs like those to be scored.
        selected: the parameters that count.
    """
    order = use_order(model, ModelInput(take_samples(batch, slice(0, 1))), selected)
    if not order.names:
        return []
    counted = order.relevant(order.names, selected)
    found: list[list[str]] = []
    for names in group_by_layer(model, counted, "block").values():
        if any(selected[name].ndim > 1 for name in names):
            found.append([])
        if found:
            found[-1] += names
    return found or [counted]
