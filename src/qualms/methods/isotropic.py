"""Isotropic: Σ_c ‖∇θ p_c‖² = Σ_c p_c² ‖∇θ log p_c‖², how far probabilities move with the weights
(arXiv 2603.29466).

It is the total variance of the prediction, divided by σ², if the weights vary by N(0, σ²I) with a
small σ.
"""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from qualms.methods.gradient_score import GradientScore


@dataclass(frozen=True)
class Isotropic(GradientScore):
    """Σ_c ‖∇θ p_c‖².

    Parameters: λ of `+layers(λ)` and the perturbations of `+smooth(σ, N)`; None leaves the modifier
    out.

    Example:
        ```python
        import torch
        import qualms
        from qualms.methods import Isotropic

        model, x = torch.nn.Linear(4, 3), torch.randn(5, 4)
        print(qualms.score(model, x, Isotropic()))
        ```
    """

    name = "isotropic"
    paper = "arXiv 2603.29466"
    cost = "2, and C backward"
    direction = "classes"
    power = 2

    def weights(self, probs: Float[Tensor, "b c"]) -> Float[Tensor, "b c"]:
        """p_c²."""
        return probs.square()
