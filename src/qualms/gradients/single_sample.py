"""One sample by plain autograd: what every engine must agree with before it is believed."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from qualms.errors import QualmsError, reason
from qualms.gradients.isolation import all_parameters_differentiable, interrupts
from qualms.gradients.model_input import ModelInput, forward_logits, in_channels_last
from qualms.gradients.precision import Narrowest, at_least_float32, close_logits


@dataclass(frozen=True)
class FirstSample:
    """The first row of a batch by plain autograd: what an engine must agree with before it is
    believed.
    """

    rows: ModelInput
    logits: Float[Tensor, "1 c"]
    gradient: dict[
        str, Float[Tensor, "1 ..."]
    ]  # by name: along a random direction, or what is kept of it
    precision: torch.dtype  # that rounds most on the way to the logits

    @classmethod
    def of(
        cls,
        model: nn.Module,
        on: ModelInput,
        selected: dict[str, Tensor],
        reduce: Callable[[Tensor], Tensor] = at_least_float32,
    ) -> "FirstSample":
        """Runs the row twice: a model that is random in evaluation mode has no gradient to speak
        of.

        Args:
            model: under `untouched`.
            on: rows, of which the first is run.
            selected: the parameters, by name.
            reduce: what is kept of a gradient.
        """
        first = on.take(slice(0, 1))
        logits, gradient = sample_gradients(model, first, selected, random_direction, reduce)
        return cls(first, logits, gradient, require_repeatable(model, first, logits))


@torch.no_grad()
def require_repeatable(
    model: nn.Module, row: ModelInput, logits: Float[Tensor, "1 c"]
) -> torch.dtype:
    """A row must give the same logits again: another input may show a randomness that the first one
    hid.

    Returns the type that rounds most on the way to them.
    """
    casts = Narrowest()
    again = forward_logits(model, row, casts)
    if not close_logits(again, logits, casts.of(logits)):
        raise QualmsError(
            "the model is random in evaluation mode: the same input gave two different logits; "
            "switch its randomness off (dropout called with training=True, sampling layers)."
        )
    return casts.of(logits)


@dataclass(frozen=True)
class ModelProfile:
    """What the first row tells any engine: the base of what each of them goes on to find out."""

    classes: int
    largest_result: int  # bytes of the largest result of an operation on one row
    channels_last: (
        bool  # the model takes images in that memory format, in which convolutions are faster
    )
    precision: (
        torch.dtype
    )  # that rounds most on the way to the logits: a model of 64 bits may cast to 32 inside

    def formatted(self, on: ModelInput) -> ModelInput:
        """Rows in the memory format that is fastest for this model."""
        return in_channels_last(on) if self.channels_last else on


def random_direction(logits: Tensor) -> Float[Tensor, "1 1 c"]:
    """A direction in logit space, the same for every model with as many classes."""
    noise = torch.Generator().manual_seed(0)
    return torch.randn(1, 1, logits.shape[1], generator=noise, dtype=torch.double).to(logits.device)


def sample_gradients(
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
