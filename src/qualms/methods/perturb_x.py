"""Perturb x: E_Δx KL( p(y | x + Δx) ‖ p(y | x) ), Δx ~ N(0, σ²I). Discrete inputs are perturbed at
their embeddings.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from qualms.gradients.settings import Smoothing
from qualms.methods.context import BatchContext
from qualms.methods.divergence import kl
from qualms.methods.method import SEVERAL_PASSES, WANG_JI, Noise, Scale, converted
from qualms.methods.monte_carlo import MonteCarlo
from qualms.parameters import NOISE, check_parameters, whole


@dataclass(frozen=True)
class PerturbX(MonteCarlo):
    """σ in the units of the tensor that the model receives, or one per channel. Paper: 0.008,
    CIFAR-100 0.02.

    Example:
        ```python
        import torch
        import qualms
        from qualms.methods import PerturbX

        model, x = torch.nn.Linear(4, 3), torch.randn(5, 4)
        print(qualms.score(model, x, PerturbX(sigma=0.1, draws=20)))
        ```
    """

    sigma: Noise = 0.008
    draws: int = 100

    name = "perturb-x"
    paper = WANG_JI
    needs = (SEVERAL_PASSES,)
    cost = "1 + N"

    def __post_init__(self) -> None:
        check_parameters(self, self.name, sigma=NOISE, draws=whole(1))

    def score(self, context: BatchContext) -> Float[Tensor, " b"]:
        """One number for each input."""
        noise = Smoothing(self.sigma, self.draws, antithetic=False)
        parts = [
            kl(log_q, context.log_probs[owners])
            for owners, log_q in context.perturbed_log_probs(noise)
        ]
        of_each_row = torch.cat(parts).unflatten(0, (-1, self.draws + 1))
        return of_each_row[:, 1:].mean(1)

    def in_units(self, scale: Scale) -> "PerturbX":
        """The same with σ in the units of the model's input."""
        return replace(self, sigma=converted(self.sigma, scale))
