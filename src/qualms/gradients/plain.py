"""Gradients of one row by plain autograd: what everything else must agree with."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from qualms.errors import QualmsError
from qualms.gradients.guard import all_parameters_differentiable
from qualms.gradients.pieces import accurate
from qualms.gradients.smoothing import Rows, logits_of


def row_gradients(
    model: nn.Module,
    row: Rows,
    selected: dict[str, Tensor],
    directions: Callable[[Float[Tensor, "1 c"]], Float[Tensor, "m 1 c"]],
) -> tuple[Float[Tensor, "1 c"], dict[str, Float[Tensor, "m ..."]]]:
    """The logits of one row, and each parameter's gradient along each direction; unused parameters are left out."""
    with all_parameters_differentiable(model):
        logits = logits_of(model, row)
        if not logits.requires_grad:
            raise QualmsError(NO_PATH)
        found = []
        for direction in directions(logits.detach()):
            try:
                found.append(
                    torch.autograd.grad(
                        logits,
                        list(selected.values()),
                        direction.to(logits.dtype),
                        retain_graph=True,
                        allow_unused=True,
                    )
                )
            except RuntimeError as error:
                raise QualmsError(f"the model cannot be differentiated: {str(error).splitlines()[0]}") from error
    columns = zip(selected, zip(*found, strict=True), strict=True)
    gradients = {
        name: torch.stack([accurate(torch.zeros_like(selected[name]) if g is None else g) for g in column])
        for name, column in columns
        if any(g is not None for g in column)
    }
    return logits.detach(), gradients


NO_PATH = (
    "the logits do not depend on any parameter in a way that can be differentiated; "
    "remove torch.no_grad, detach or inference-only operations from the model's forward pass."
)
