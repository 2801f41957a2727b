"""The last blocks of a model: residual or transformer blocks, or layers, in the order in which it
uses them.
"""

from collections.abc import Sequence

from torch import Tensor

from qualms.errors import QualmsError
from qualms.gradients.batch import take_samples
from qualms.gradients.layer_table import heavy_blocks
from qualms.gradients.layers import layer_of, selected_parameters
from qualms.gradients.model_input import ModelInput
from qualms.gradients.tracing.traced_forward import use_order
from qualms.methods.context import BatchContext


def blocks_of(context: BatchContext, method: str) -> list[list[str]]:
    """The names of the parameters of each block; only those that count (`params`) are in it."""
    # an input that the model does not take is told of here, and not as a model that hides its
    # layers
    _ = context.logits
    selected = selected_parameters(context.model, context.model_context.settings.params)
    found = heavy_blocks(context.model, context.batch, selected)
    if not found:
        raise QualmsError(
            f"{method} needs to see in which order the model uses its layers, which it hides from torch's function "
            "modes (a scripted module?); use regrad or entropy."
        )
    return found


def without_head(blocks: Sequence[Sequence[str]], context: BatchContext) -> list[list[str]]:
    """The blocks without the parameters of the classifier, the last linear layer."""
    head, names = context.head, {p.data_ptr(): name for name, p in context.model.named_parameters()}
    known = [
        names[t.data_ptr()]
        for t in (head.weight, head.bias)
        if t is not None and t.data_ptr() in names
    ]
    if (
        head.weight.data_ptr() not in names
    ):  # it is computed from parameters: those of the layer with the bias, or last
        layer = layer_of(context.model, (known or [_last_used(context)])[0], "module")
        known += [
            name for name in names.values() if layer_of(context.model, name, "module") == layer
        ]
    left = [[name for name in block if name not in known] for block in blocks]
    return [block for block in left if block]


def _last_used(context: BatchContext) -> str:
    """The parameter that the model uses last, whether it counts or not."""
    every: dict[str, Tensor] = dict(context.model.named_parameters())
    return use_order(
        context.model, ModelInput(take_samples(context.batch, slice(0, 1))), every
    ).names[-1]
