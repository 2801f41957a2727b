"""Perturb x: E_Δx KL( p(y | x + Δx) ‖ p(y | x) ), Δx ~ N(0, σ²I). Discrete inputs are perturbed at their embeddings."""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from qualms.gradients.smoothing import Smoothing
from qualms.methods.divergence import expected_kl
from qualms.methods.method import PASSES, WANG_JI
from qualms.methods.passes import Passes


@dataclass(frozen=True)
class PerturbX:
    """σ in the units of the tensor that the model receives, or one per channel. Paper: 0.008, CIFAR-100 0.02."""

    sigma: float | tuple[float, ...] = 0.008
    draws: int = 100

    name: ClassVar[str] = "perturb-x"
    paper: ClassVar[str] = WANG_JI
    needs: ClassVar[tuple[str, ...]] = (PASSES,)
    cost: ClassVar[str] = "1 + N"

    def score(self, passes: Passes) -> Float[Tensor, " b"]:
        """One number for each input."""
        noise = Smoothing(self.sigma, self.draws, antithetic=False)
        return expected_kl(passes.perturbed_log_probs(noise), passes.log_probs)
