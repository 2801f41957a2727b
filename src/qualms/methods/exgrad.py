"""ExGrad: Σ_c p_c ‖∇θ log p_c‖, the expected gradient norm (Igoe et al., 2022; a row of the paper's
tables).

It bounds the KL divergence of small weight perturbations from above (Wang & Ji, CVPR 2024,
proposition 4).
"""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from qualms.methods.gradient_score import GradientScore


@dataclass(frozen=True)
class ExGrad(GradientScore):
    """Σ_c p_c ‖∇θ log p_c‖.

    Parameters: λ of `+layers(λ)` and the perturbations of `+smooth(σ, N)`; None leaves the modifier
    out.

    Example:
        ```python
        import torch
        import qualms
        from qualms.methods import ExGrad

        model, x = torch.nn.Linear(4, 3), torch.randn(5, 4)
        print(qualms.score(model, x, ExGrad(layers=0.4)))
        ```
    """

    name = "exgrad"
    paper = "Igoe et al., How Useful are Gradients for OOD Detection?, 2022"
    cost = "2, and C backward"
    direction = "classes"

    def weights(self, probs: Float[Tensor, "b c"]) -> Float[Tensor, "b c"]:
        """p_c."""
        return probs
