"""MC-AA: mutual information over x + ε·sign(∇x L), ε uniform in [-a, a], L the NLL of the predicted
class.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from qualms.gradients.batch import num_samples, take_samples
from qualms.methods.context import BatchContext
from qualms.methods.divergence import log_softmax
from qualms.methods.draws import information_over_draws
from qualms.methods.input_steps import attack_direction, length, moved
from qualms.methods.method import SEVERAL_PASSES, Noise, Scale, converted
from qualms.methods.monte_carlo import MonteCarlo
from qualms.parameters import NOISE, check_parameters, whole
from qualms.random import generator


@dataclass(frozen=True)
class MCAA(MonteCarlo):
    """a in the units of the tensor that the model receives, or one per channel. Paper: 0.0001,
    CIFAR-100 0.0005.

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

    @property
    def extra_passes(self) -> float:
        """A forward and a backward pass for the direction, and a forward pass for each draw."""
        return 3.0 + self.draws

    def score(self, context: BatchContext) -> Float[Tensor, " b"]:
        """One number for each input."""
        model_context, inputs = context.model_context, num_samples(context.batch)
        rows = model_context.rows_at_once(context.batch, inputs * self.draws)
        most = min(max(1, rows // self.draws), model_context.rows_with_graph(context.batch))

        def log_probs(block: slice) -> Iterator[Tensor]:
            part, numbers = take_samples(context.batch, block), context.numbers[block]
            drawn = [
                torch.rand(self.draws, generator=generator(context.seed, number))
                for number in numbers
            ]
            uniform = 2 * torch.stack(drawn) - 1
            sign = attack_direction(context, part)
            step = length(self.a, sign, self.name, "a") * sign
            for some in uniform.split(max(1, rows // len(sign)), dim=1):
                sizes = some.reshape(*some.shape, *[1] * (sign.ndim - 1)).to(sign)
                logits = context.forward(moved(part, (sizes * step[:, None]).flatten(0, 1)))
                yield log_softmax(logits.double()).unflatten(0, some.shape)

        return information_over_draws(context, self.draws, log_probs, most)

    def in_units(self, scale: Scale) -> "MCAA":
        """The same with a in the units of the model's input."""
        return replace(self, a=converted(self.a, scale))
