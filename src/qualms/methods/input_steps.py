"""Steps along the sign of the gradient by the input; discrete inputs take them at their embeddings'
output.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from qualms.errors import QualmsError
from qualms.gradients.batch import Batch, batch_tensors, num_samples, with_tensors
from qualms.gradients.directions import of_class, scale_to_unit
from qualms.gradients.model_input import ModelInput, forward_logits
from qualms.methods.context import BatchContext
from qualms.methods.method import Noise


def attack_direction(
    context: BatchContext, part: Batch, temperature: float = 1.0
) -> Float[Tensor, "b ..."]:
    """sign(∇x NLL of the predicted class), of logits that are divided by a temperature."""
    first, *others = batch_tensors(part)
    shifts: list[Tensor] = []
    if first.is_floating_point():
        shifts.append(first.detach().clone().requires_grad_())
        logits = forward_logits(context.model, ModelInput(with_tensors(part, [shifts[0], *others])))
    else:

        def zero(shape: tuple[int, ...]) -> Tensor:
            kind = next(context.model.parameters())
            shifts.append(
                torch.zeros(
                    num_samples(part),
                    *shape,
                    dtype=kind.dtype,
                    device=kind.device,
                    requires_grad=True,
                )
            )
            return shifts[0]

        logits = forward_logits(context.model, ModelInput(part, embedding_noise=zero))
    # p - e_ŷ, brought to a size near 1: next to certainty the derivative of the loss is rounding,
    # or zero in 32 bits.
    z = logits.detach().double()[:, None] / temperature
    (away,), _ = scale_to_unit(-of_class(z, z[:, 0].argmax(-1))[:, :, 0], len(z))
    (gradient,) = torch.autograd.grad(logits, shifts, away.to(logits.dtype))
    return gradient.sign()


def moved(part: Batch, step: Float[Tensor, "rows ..."]) -> ModelInput:
    """The rows that are a step away from inputs, several for each if there are more steps than
    inputs.
    """
    first, *others = (
        t.repeat_interleave(len(step) // num_samples(part), dim=0) for t in batch_tensors(part)
    )
    if first.is_floating_point():
        return ModelInput(with_tensors(part, [first + step, *others]))
    return ModelInput(with_tensors(part, [first, *others]), embedding_noise=lambda _: step)


def length(
    size: Noise, direction: Float[Tensor, "b ..."], method: str, parameter: str
) -> float | Tensor:
    """The size of a step, with an axis of channels if there is one for each."""
    if not isinstance(size, tuple):
        return size
    shape = tuple(direction.shape[1:])
    if not shape or len(size) not in (1, shape[0]):
        raise QualmsError(
            f"{method} has {len(size)} values of {parameter}, but an input of shape {shape} has "
            f"{shape[0] if shape else 0} channels; give one number, or one per channel."
        )
    return torch.tensor(size, dtype=direction.dtype, device=direction.device).reshape(
        -1, *[1] * (len(shape) - 1)
    )
