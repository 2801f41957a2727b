"""One sample by plain autograd, which every engine must match before its results are used."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from qualms.errors import QualmsError, reason
from qualms.gradients.isolation import all_parameters_differentiable, interrupts
from qualms.gradients.model_input import ModelInput, forward_logits, in_channels_last
from qualms.gradients.precision import Narrowest, at_least_float32, close_logits

NO_PATH = (
    "the logits do not depend differentiably on any parameter; "
    "remove torch.no_grad, detach or inference-only operations from the model's forward pass."
)


@dataclass(frozen=True)
class FirstSample:
    """The first row of a batch by plain autograd.

    Args:
        rows: that row.
        logits: its logits.
        gradient: by the parameter's name: along a random direction, or what is kept of it.
        precision: the type that rounds most on the way to the logits.
    """

    rows: ModelInput
    logits: Float[Tensor, "1 c"]
    gradient: dict[str, Float[Tensor, "1 ..."]]
    precision: torch.dtype

    @classmethod
    def of(
        cls,
        model: nn.Module,
        model_input: ModelInput,
        selected: dict[str, Tensor],
        reduce: Callable[[Tensor], Tensor] = at_least_float32,
    ) -> "FirstSample":
        """Run the row twice: a model that is random in evaluation mode has no gradient.

        Args:
            model: inside `preserve_state`.
            model_input: a batch, of which the first row is run.
            selected: the parameters, by name.
            reduce: what is kept of a gradient.
        """
        first = model_input.take(slice(0, 1))
        logits, gradient = sample_gradients(model, first, selected, random_direction, reduce)
        return cls(first, logits, gradient, require_repeatable(model, first, logits))


@torch.no_grad()
def require_repeatable(
    model: nn.Module,
    row: ModelInput,
    logits: Float[Tensor, "1 c"],
) -> torch.dtype:
    """Require that a row gives the same logits again.

    Asked of every batch, since another input may show a randomness that the first one hid.

    Args:
        model: inside `preserve_state`.
        row: a single one.
        logits: what the model returned for it.

    Returns:
        The type that rounds most on the way to the logits.
    """
    casts = Narrowest()
    again = forward_logits(model, row, casts)
    if not close_logits(again, logits, casts.of(logits)):
        raise QualmsError(
            "the model is random in evaluation mode: the same input gave two different outputs; "
            "turn off its randomness (such as dropout with training=True, or sampling layers)."
        )
    return casts.of(logits)


@dataclass(frozen=True)
class ModelProfile:
    """What the first row shows of a model: the base of what each engine goes on to find out.

    Args:
        classes: number of classes.
        largest_result: bytes of the largest result of an operation on one row.
        channels_last: whether the model takes images in that memory format, in which convolutions
            are faster.
        precision: the type that rounds most on the way to the logits: a model of 64 bits may cast
            to 32 inside.
    """

    classes: int
    largest_result: int
    channels_last: bool
    precision: torch.dtype

    def reformat(self, model_input: ModelInput) -> ModelInput:
        """The same input in the memory format that is fastest for this model."""
        return in_channels_last(model_input) if self.channels_last else model_input


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
    """The gradient of each parameter along each direction, for one row.

    Args:
        model: inside `preserve_state`.
        row: a single one.
        selected: the parameters, by name.
        directions: from the logits to what is pulled back.
        reduce: what is kept of a gradient: together gradients are as large as the weights, for each
            direction.

    Returns:
        The logits, and the gradients by the parameter's name, without parameters that the logits
        do not depend on.
    """
    with all_parameters_differentiable(model):
        logits = forward_logits(model, row)
        if not logits.requires_grad:
            raise QualmsError(NO_PATH)
        parameters = list(selected.values())
        columns: dict[str, list[Tensor | None]] = {name: [] for name in selected}
        for direction in directions(logits.detach()):
            of_direction = list(gradients_of(logits, parameters, direction.to(logits.dtype)))
            for i, name in enumerate(selected):
                g = of_direction[i]
                of_direction[i] = None  # freed one by one
                columns[name].append(None if g is None else reduce(g))
    logits = logits.detach()  # frees the graph
    gradients: dict[str, Tensor] = {}
    for name, p in selected.items():
        column = columns.pop(name)
        if all(g is None for g in column):
            continue
        known: list[Tensor] = []
        for g in column:
            known.append(reduce(torch.zeros_like(p)) if g is None else g)
        gradients[name] = known[0][None] if len(known) == 1 else torch.stack(known)
    return logits, gradients


def gradients_of(
    target: Tensor,
    parameters: list[Tensor],
    cotangent: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """Jᵀ·cotangent of a tensor by autograd, keeping the graph.

    Args:
        target: what is differentiated.
        parameters: with respect to these.
        cotangent: in the target's shape; 1 by default, for a scalar.

    Returns:
        A dense gradient for each parameter, or None if the target does not depend on it.
    """
    interrupts.deliver()
    try:
        found = torch.autograd.grad(
            target, parameters, cotangent, retain_graph=True, allow_unused=True
        )
    except RuntimeError as error:
        raise QualmsError(f"the model cannot be differentiated: {reason(error)}") from error
    return tuple(_to_dense(g) for g in found)


def _to_dense(g: Tensor | None) -> Tensor | None:
    if g is None or g.layout == torch.strided:
        return g
    return g.to_dense()
