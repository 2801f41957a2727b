"""MC-AA: mutual information over x + ε·sign(∇x L), ε uniform in [-a, a], L the NLL of the predicted class."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from qualms.gradients.inputs import Batch, count, take, tensors, with_tensors
from qualms.gradients.rows import Rows, logits_of
from qualms.methods.divergence import mutual_information
from qualms.methods.method import PASSES
from qualms.methods.passes import Passes
from qualms.random import generator


@dataclass(frozen=True)
class MCAA:
    """a in the units of the tensor that the model receives, or one per channel. Paper: 0.0001, CIFAR-100 0.0005."""

    a: float | tuple[float, ...] = 0.0001
    draws: int = 100

    name: ClassVar[str] = "mc-aa"
    paper: ClassVar[str] = "Alarab & Prakoonwit, Adversarial Attack for Uncertainty Estimation, 2022"
    needs: ClassVar[tuple[str, ...]] = (PASSES,)
    cost: ClassVar[str] = "3 + N"

    def score(self, passes: Passes) -> Float[Tensor, " b"]:
        """One number for each input."""
        per_chunk = max(1, passes.subject.rows_at_once // self.draws)
        parts = []
        for start in range(0, count(passes.batch), per_chunk):
            part = take(passes.batch, slice(start, start + per_chunk))
            uniform = [
                2 * torch.rand(self.draws, generator=generator(passes.seed, passes.first_index + start + i)) - 1
                for i in range(count(part))
            ]
            parts.append(self._log_probs(passes, part, torch.stack(uniform)))
        return mutual_information(torch.cat(parts))

    def _log_probs(self, passes: Passes, part: Batch, uniform: Float[Tensor, "b n"]) -> Float[Tensor, "b n c"]:
        sign = _attack_direction(passes, part)
        scale = torch.as_tensor(self.a).reshape(-1, *[1] * (sign.ndim - 2)) if isinstance(self.a, tuple) else self.a
        steps = uniform.reshape(*uniform.shape, *[1] * (sign.ndim - 1)).to(sign) * (scale * sign)[:, None]
        flat = steps.flatten(0, 1)
        first, *others = (t.repeat_interleave(self.draws, dim=0) for t in tensors(part))
        if first.is_floating_point():
            on = Rows(with_tensors(part, [first + flat, *others]))
        else:
            on = Rows(with_tensors(part, [first, *others]), embedding_noise=lambda _: flat)
        return passes.forward(on).double().log_softmax(-1).unflatten(0, uniform.shape)


def _attack_direction(passes: Passes, part: Batch) -> Float[Tensor, "b ..."]:
    """sign(∇x NLL of the predicted class); for discrete inputs at the embeddings' output."""
    first, *others = tensors(part)
    shifts: list[Tensor] = []
    if first.is_floating_point():
        shifts.append(first.detach().clone().requires_grad_())
        logits = logits_of(passes.model, Rows(with_tensors(part, [shifts[0], *others])))
    else:

        def zero(shape: tuple[int, ...]) -> Tensor:
            kind = next(passes.model.parameters())
            shifts.append(torch.zeros(count(part), *shape, dtype=kind.dtype, device=kind.device, requires_grad=True))
            return shifts[0]

        logits = logits_of(passes.model, Rows(part, embedding_noise=zero))
    loss = F.cross_entropy(logits, logits.argmax(-1), reduction="sum")
    (gradient,) = torch.autograd.grad(loss, shifts)
    return gradient.sign()
