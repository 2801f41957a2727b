"""What every engine looks at first: one row by plain autograd, and what its forward pass says of
the model.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from qualms.errors import QualmsError
from qualms.gradients.engines.autograd import row_gradients
from qualms.gradients.model_input import ModelInput, forward_logits, in_channels_last
from qualms.gradients.precision import Narrowest, at_least_float32, close_logits


@dataclass(frozen=True)
class FirstRow:
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
    ) -> "FirstRow":
        """Runs the row twice: a model that is random in evaluation mode has no gradient to speak
        of.

        Args:
            model: under `untouched`.
            on: rows, of which the first is run.
            selected: the parameters, by name.
            reduce: what is kept of a gradient.
        """
        first = on.take(slice(0, 1))
        logits, gradient = row_gradients(model, first, selected, random_direction, reduce)
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
class FirstLook:
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
