"""MC-AA: mutual information over x + ε·sign(∇x L), ε uniform in [-a, a], L the NLL of the predicted class."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from qualms.gradients.inputs import Batch, count, take
from qualms.methods.divergence import log_softmax, mutual_information
from qualms.methods.input_steps import attack_direction, length, moved
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
                2 * torch.rand(self.draws, generator=generator(passes.seed, number)) - 1
                for number in passes.numbers[start : start + per_chunk]
            ]
            parts.append(self._log_probs(passes, part, torch.stack(uniform)))
        return mutual_information(torch.cat(parts))

    def in_units(self, scale: Scale) -> "MCAA":
        """The same with a in the units of the model's input."""
        return replace(self, a=converted(self.a, scale))

    def _log_probs(self, passes: Passes, part: Batch, uniform: Float[Tensor, "b n"]) -> Float[Tensor, "b n c"]:
        sign = attack_direction(passes, part)
        step = length(self.a, sign, self.name, "a") * sign
        steps = uniform.reshape(*uniform.shape, *[1] * (sign.ndim - 1)).to(sign) * step[:, None]
        logits = passes.forward(moved(part, steps.flatten(0, 1)))
        return log_softmax(logits.double()).unflatten(0, uniform.shape)
