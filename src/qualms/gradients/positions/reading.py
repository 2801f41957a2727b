"""A model that answers at many positions, read as a classifier of one position, or of several side
by side.
"""

from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from qualms.errors import QualmsError
from qualms.gradients.batch import logits_in
from qualms.gradients.isolation import isolate_forward
from qualms.gradients.layers import Params, selected_parameters

INSIDE = "model."  # what the names of a model's parameters begin with where it is read at positions


class AtPositions(nn.Module):
    """The logits of some positions side by side, [b, P·c]; of all of them, in their order, if none
    are named.

    The engines take it for a classifier: for one position it is one, for several its logits are
    those of P classifiers.
    """

    def __init__(
        self, model: nn.Module, class_dim: int, positions: list[int] | None = None
    ) -> None:
        super().__init__()
        self.model, self.class_dim, self.positions = model, class_dim, positions
        self.training = False

    def forward(self, *args: Any, **kwargs: Any) -> Float[Tensor, "b pc"]:
        """One pass of the model."""
        with isolate_forward(self.model):
            logits = classes_last(self.model(*args, **kwargs), self.class_dim).flatten(1, -2)
        return (logits if self.positions is None else logits[:, self.positions]).flatten(1)


def classes_last(output: Any, class_dim: int) -> Float[Tensor, "b *positions c"]:
    """The logits in a model's output, their axes those of inputs, positions and classes."""
    logits = logits_in(output)
    if logits.ndim < 3:
        raise QualmsError(
            f"the model returns logits of shape {tuple(logits.shape)}, one answer for each input; leave out class_dim."
        )
    axis = class_dim % logits.ndim if -logits.ndim <= class_dim < logits.ndim else 0
    if axis == 0 or logits.shape[axis] < 2:
        raise QualmsError(
            f"class_dim={class_dim} is not an axis of classes in logits of shape {tuple(logits.shape)}; use -1 for "
            "language models, 1 for segmentation."
        )
    return logits.movedim(axis, -1)


def inside(model: nn.Module, params: Params) -> Params:
    """Which parameters count, where the model is read at positions: those that count in the model
    itself.
    """
    if params is None:
        return None
    chosen = selected_parameters(model, params)
    return lambda name: name.removeprefix(INSIDE) in chosen
