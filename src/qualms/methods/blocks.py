"""The last blocks of a model: residual or transformer blocks, or layers, in the order in which it uses them."""

from collections.abc import Sequence

from qualms.errors import QualmsError
from qualms.gradients.inputs import take
from qualms.gradients.layers import grouped, selected_parameters
from qualms.gradients.rows import Rows
from qualms.gradients.watch.forward import use_order
from qualms.methods.passes import Passes


def heavy_blocks(passes: Passes, method: str) -> list[list[str]]:
    """The names of the parameters of each block that has a matrix or kernel, with those of what follows it.

    Only parameters that count (`params`) are in it. What stands before the first such block is left out, unless there
    is none: then all is one block.
    """
    selected = selected_parameters(passes.model, passes.subject.settings.params)
    order = use_order(passes.model, Rows(take(passes.batch, slice(0, 1))), selected)
    if not order.names:
        raise QualmsError(
            f"{method} needs to see in which order the model uses its layers, which it hides from torch's function "
            "modes (a scripted module?); use regrad or entropy."
        )
    counted = order.counted(order.names, selected)
    found: list[list[str]] = []
    for names in grouped(passes.model, counted, "block").values():
        if any(selected[name].ndim > 1 for name in names):
            found.append([])
        if found:
            found[-1] += names
    return found or [counted]


def without_head(blocks: Sequence[Sequence[str]], passes: Passes) -> list[list[str]]:
    """The blocks without the parameters of the classifier, the last linear layer."""
    head = passes.head
    own = {t.data_ptr() for t in (head.weight, head.bias) if t is not None}
    named = {name for name, p in passes.model.named_parameters() if p.data_ptr() in own}
    if not named and blocks:  # a weight that is computed from parameters, those of the last block
        named = set(blocks[-1])
    left = [[name for name in block if name not in named] for block in blocks]
    return [block for block in left if block]
