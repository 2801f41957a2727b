"""Fisher: Σ_c p_c ‖∇θ log p_c‖², the trace of the Fisher information of one input.

It is twice the limit of `perturb-theta` for small σ, divided by σ²: E KL = σ²/2 · Σ_c p_c ‖∇θ log
p_c‖² + O(σ⁴). One random tangent gives one number of the sum, however many classes there are.
"""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from qualms.methods.gradient_score import GradientScore


@dataclass(frozen=True)
class Fisher(GradientScore):
    """Σ_c p_c ‖∇θ log p_c‖².

    Parameters: λ of `+layers(λ)` and the perturbations of `+smooth(σ, N)`; None leaves the modifier
    out.

    Example:
        ```python
        import torch
        import qualms
        from qualms.methods import Fisher

        model, x = torch.nn.Linear(4, 3), torch.randn(5, 4)
        print(qualms.score(model, x, Fisher()))
        ```
    """

    name = "fisher"
    paper = "Fisher, Theory of Statistical Estimation, 1925"
    cost = "2, and C backward"
    direction = "classes"
    power = 2

    def weights(self, probs: Float[Tensor, "b c"]) -> Float[Tensor, "b c"]:
        """p_c."""
        return probs
