"""MC-AA: mutual information over x + ε·sign(∇x L), ε uniform in [-a, a], L the NLL of the predicted class."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from qualms.errors import QualmsError
from qualms.gradients.inputs import Batch, count, take, tensors, with_tensors
from qualms.gradients.rows import Rows, logits_of
from qualms.methods.divergence import mutual_information
from qualms.methods.method import SEVERAL_PASSES, Noise, Scale, converted
from qualms.methods.monte_carlo import MonteCarlo
from qualms.methods.passes import Passes
from qualms.parameters import NOISE, check_parameters, whole
from qualms.random import generator


@dataclass(frozen=True)
class MCAA(MonteCarlo):
    """a in the units of the tensor that the model receives, or one per channel. Paper: 0.0001, CIFAR-100 0.0005.

    Example:
        ```python
        import torch
        import qualms
        from qualms.methods import MCAA

        model, x = torch.nn.Linear(4, 3), torch.randn(5, 4)
        print(qualms.score(model, x, MCAA(a=0.01, draws=20)))
        ```
    """

    a: Noise = 0.0001
    draws: int = 100

    name = "mc-aa"
    paper = "Alarab & Prakoonwit, Adversarial Attack for Uncertainty Estimation, 2022"
    needs = (SEVERAL_PASSES,)
    cost = "3 + N"

    def __post_init__(self) -> None:
        check_parameters(self, self.name, a=NOISE, draws=whole(2))

    def score(self, passes: Passes) -> Float[Tensor, " b"]:
        """One number for each input."""
        per_chunk = max(1, passes.subject.rows_at_once // self.draws)
        parts = []
        for start in range(0, count(passes.batch), per_chunk):
            part = take(passes.batch, slice(start, start + per_chunk))
            uniform = [
                2 * torch.rand(self.draws, generator=generator(passes.seed, passes.first + start + i)) - 1
                for i in range(count(part))
            ]
            parts.append(self._log_probs(passes, part, torch.stack(uniform)))
        return mutual_information(torch.cat(parts))

    def in_units(self, scale: Scale) -> "MCAA":
        """The same with a in the units of the model's input."""
        return replace(self, a=converted(self.a, scale))

    def _log_probs(self, passes: Passes, part: Batch, uniform: Float[Tensor, "b n"]) -> Float[Tensor, "b n c"]:
        sign = _attack_direction(passes, part)
        steps = uniform.reshape(*uniform.shape, *[1] * (sign.ndim - 1)).to(sign) * (self._scale(sign) * sign)[:, None]
        flat = steps.flatten(0, 1)
        first, *others = (t.repeat_interleave(self.draws, dim=0) for t in tensors(part))
        if first.is_floating_point():
            on = Rows(with_tensors(part, [first + flat, *others]))
        else:
            on = Rows(with_tensors(part, [first, *others]), embedding_noise=lambda _: flat)
        return passes.forward(on).double().log_softmax(-1).unflatten(0, uniform.shape)

    def _scale(self, sign: Float[Tensor, "b ..."]) -> float | Tensor:
        """a, with an axis of channels if there is one for each."""
        if not isinstance(self.a, tuple):
            return self.a
        shape = tuple(sign.shape[1:])
        if not shape or len(self.a) not in (1, shape[0]):
            raise QualmsError(
                f"mc-aa has {len(self.a)} values of a, but an input of shape {shape} has "
                f"{shape[0] if shape else 0} channels; give one number, or one per channel."
            )
        return torch.tensor(self.a, dtype=sign.dtype, device=sign.device).reshape(-1, *[1] * (len(shape) - 1))


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
