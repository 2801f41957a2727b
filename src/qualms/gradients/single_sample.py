"""One sample by plain autograd, which every engine must match before its results are used."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from qualms.errors import QualmsError, reason
from qualms.gradients.isolation import all_parameters_differentiable, interrupts
from qualms.gradients.model_input import ModelInput, forward_logits, in_channels_last
from qualms.gradients.precision import CoarsestCast, at_least_float32, close_logits


@dataclass(frozen=True)
class FirstSample:
    """The logits and the gradient of a batch's first row, computed by plain autograd.

    Args:
        rows: the first row, as a batch of one.
        logits: the logits of that row.
        gradient: by the parameter's name, the gradient along `random_direction`, or what was kept
            of it, such as its norm.
        precision: the coarsest float type that the forward pass casts to.
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
        """Compute the logits and the gradient of a batch's first row, to compare traces with.

        Args:
            model: the model, inside `preserve_state`.
            model_input: a batch, of which the first row is run.
            selected: the parameters to differentiate with respect to, by name.
            reduce: maps a gradient to what is kept of it, such as its norm.

        Raises:
            QualmsError: if a second run of the row gives other logits.
        """
        first_row = model_input.take(slice(0, 1))
        logits, gradient = sample_gradients(model, first_row, selected, random_direction, reduce)
        precision = check_repeatable(model, first_row, logits)
        return cls(first_row, logits, gradient, precision)


@torch.no_grad()
def check_repeatable(
    model: nn.Module,
    row: ModelInput,
    logits: Float[Tensor, "1 c"],
) -> torch.dtype:
    """Run one row of a batch again, and raise an error if its logits differ from the first run's.

    This is checked in every batch: an input may reach a random operation that inputs of earlier
    batches did not reach.

    Args:
        model: the model, inside `preserve_state`.
        row: a single row.
        logits: what the model returned for this row before.

    Returns:
        The coarsest float type that the forward pass casts to, which sets the tolerance of later
        comparisons.

    Raises:
        QualmsError: if the logits differ by more than rounding.
    """
    casts = CoarsestCast()
    second_logits = forward_logits(model, row, casts)
    precision = casts.precision_of(logits)
    if not close_logits(second_logits, logits, precision):
        raise QualmsError(
            "the model is not deterministic in evaluation mode: the same input gave two different "
            "outputs; turn off its randomness (such as dropout with training=True, or sampling "
            "layers)."
        )
    return precision


@dataclass(frozen=True)
class ModelProfile:
    """Facts about a model, measured on one row; the plans of the engines extend this class.

    Args:
        classes: the number of classes.
        largest_result: the bytes of the largest result of an operation on one row.
        channels_last: whether to run images in the channels-last memory format, in which
            convolutions are faster.
        precision: the coarsest float type that the forward pass casts to; a model in float64 may
            cast to float32 inside.
    """

    classes: int
    largest_result: int
    channels_last: bool
    precision: torch.dtype

    def reformat(self, model_input: ModelInput) -> ModelInput:
        """Convert the input to the memory format that is fastest for this model."""
        return in_channels_last(model_input) if self.channels_last else model_input


def random_direction(logits: Tensor) -> Float[Tensor, "1 1 c"]:
    """Draw a random direction in logit space, the same for all logits with this number of classes."""
    num_classes = logits.shape[1]
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(
        1,
        1,
        num_classes,
        generator=generator,
        dtype=torch.double,
    )
    return direction.to(logits.device)


def sample_gradients(
    model: nn.Module,
    row: ModelInput,
    selected: dict[str, Tensor],
    directions: Callable[[Float[Tensor, "1 c"]], Float[Tensor, "m 1 c"]],
    reduce: Callable[[Tensor], Tensor] = at_least_float32,
) -> tuple[Float[Tensor, "1 c"], dict[str, Float[Tensor, "m ..."]]]:
    """Compute the gradient Jᵀv of each parameter along each direction v, for one row.

    J is the Jacobian of the logits with respect to the parameter.

    Args:
        model: the model, inside `preserve_state`.
        row: a single row.
        selected: the parameters to differentiate with respect to, by name.
        directions: maps the logits [1, c] to the directions v [m, 1, c].
        reduce: maps a gradient to what is kept of it. All gradients along one direction take as
            much memory as the weights; keeping norms saves that.

    Returns:
        The logits, and a dict from each parameter's name to the reduced gradients along all
        directions, stacked. Parameters that the logits do not depend on are left out.
    """
    with all_parameters_differentiable(model):
        logits = forward_logits(model, row)
        require_differentiable(logits)
        parameters = list(selected.values())
        # For each parameter its gradients along all directions; None where there is none.
        reduced_by_name: dict[str, list[Tensor | None]] = {name: [] for name in selected}
        for direction in directions(logits.detach()):
            gradients = list(gradients_of(logits, parameters, direction.to(logits.dtype)))
            for i, name in enumerate(selected):
                g = gradients[i]
                # Frees each gradient once it is reduced.
                gradients[i] = None
                reduced_by_name[name].append(None if g is None else reduce(g))
    # Frees the graph.
    logits = logits.detach()
    stacked_by_name: dict[str, Tensor] = {}
    for name, p in selected.items():
        # `pop` frees the single gradients once they are stacked.
        along_directions = reduced_by_name.pop(name)
        if all(g is None for g in along_directions):
            continue
        reduced: list[Tensor] = []
        for g in along_directions:
            reduced.append(reduce(torch.zeros_like(p)) if g is None else g)
        if len(reduced) == 1:
            # A view, where `stack` would copy a gradient as large as the weight.
            stacked_by_name[name] = reduced[0].unsqueeze(0)
        else:
            stacked_by_name[name] = torch.stack(reduced)
    return logits, stacked_by_name


def require_differentiable(logits: Tensor) -> None:
    """Raise a QualmsError unless a backward pass from the logits reaches some parameter."""
    if not logits.requires_grad:
        raise QualmsError(
            "the logits do not depend differentiably on any parameter; remove torch.no_grad, "
            "detach or inference-only operations from the model's forward pass."
        )


def gradients_of(
    target: Tensor,
    parameters: list[Tensor],
    cotangent: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """Compute Jᵀ·cotangent by autograd, with J the Jacobian of `target`; the graph is kept.

    Args:
        target: the tensor that is differentiated.
        parameters: the tensors to differentiate with respect to.
        cotangent: a tensor in the shape of `target`; 1 by default, for a scalar.

    Returns:
        A dense gradient for each parameter, or None if the target does not depend on it.
    """
    # Raise KeyboardInterrupt here if Ctrl-C was pressed since the last pass.
    interrupts.deliver()
    try:
        gradients = torch.autograd.grad(
            target,
            parameters,
            cotangent,
            retain_graph=True,
            allow_unused=True,
        )
    except RuntimeError as error:
        raise QualmsError(f"the model cannot be differentiated: {reason(error)}") from error
    return tuple(_to_dense(g) for g in gradients)


def _to_dense(g: Tensor | None) -> Tensor | None:
    """Convert a sparse gradient, such as that of `Embedding(sparse=True)`, to a dense tensor."""
    if g is None or g.layout == torch.strided:
        return g
    return g.to_dense()
