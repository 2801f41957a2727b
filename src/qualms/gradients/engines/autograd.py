"""Gradients of one row by plain autograd: what everything else must agree with."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from qualms.errors import QualmsError, reason
from qualms.gradients import interrupts
from qualms.gradients.isolation import all_parameters_differentiable
from qualms.gradients.model_input import ModelInput, forward_logits
from qualms.gradients.precision import at_least_float32


def row_gradients(
    model: nn.Module,
    row: ModelInput,
    selected: dict[str, Tensor],
    directions: Callable[[Float[Tensor, "1 c"]], Float[Tensor, "m 1 c"]],
    reduce: Callable[[Tensor], Tensor] = at_least_float32,
) -> tuple[Float[Tensor, "1 c"], dict[str, Float[Tensor, "m ..."]]]:
    """The logits of one row, and each parameter's gradient along each direction; unused parameters
    are left out.

    Args:
        model: under `untouched`.
        row: a single one.
        selected: the parameters, by name.
        directions: from the logits to what is pulled back.
        reduce: what is kept of a gradient: together gradients are as large as the weights, for each
            direction.
    """
    with all_parameters_differentiable(model):
        logits = forward_logits(model, row)
        if not logits.requires_grad:
            raise QualmsError(NO_PATH)
        parameters = list(selected.values())
        found: list[list[Tensor | None]] = []
        for direction in directions(logits.detach()):
            of_direction = list(gradients_of(logits, parameters, direction.to(logits.dtype)))
            for i, g in enumerate(of_direction):
                of_direction[i] = None if g is None else reduce(g)
            found.append(of_direction)
    logits = logits.detach()  # and no graph
    gradients = {}
    for i, (name, p) in enumerate(selected.items()):
        column = [of_direction[i] for of_direction in found]
        for of_direction in found:
            of_direction[i] = None  # let go one by one
        if any(g is not None for g in column):
            gradients[name] = _stacked(
                [reduce(torch.zeros_like(p)) if g is None else g for g in column]
            )
    return logits, gradients


def _stacked(parts: list[Tensor]) -> Float[Tensor, "m ..."]:
    """The tensors along a new first axis; a single one without a copy."""
    return parts[0][None] if len(parts) == 1 else torch.stack(parts)


def gradients_of(
    target: Tensor, parameters: list[Tensor], cotangent: Tensor | None = None
) -> tuple[Tensor | None, ...]:
    """Jᵀ·cotangent of the target by autograd, keeping the graph; None for parameters that it does
    not depend on.
    """
    interrupts.deliver()
    try:
        found = torch.autograd.grad(
            target, parameters, cotangent, retain_graph=True, allow_unused=True
        )
    except RuntimeError as error:
        raise QualmsError(f"the model cannot be differentiated: {reason(error)}") from error
    return tuple(g if g is None or g.layout == torch.strided else g.to_dense() for g in found)


NO_PATH = (
    "the logits do not depend on any parameter in a way that can be differentiated; "
    "remove torch.no_grad, detach or inference-only operations from the model's forward pass."
)
