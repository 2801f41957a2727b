"""GradNorm as the paper's tables have it: ‖(1/C) Σ_c ∇θ log p_c‖, over all parameters, higher taken
as uncertain.

Huang et al. use it the other way round, as confidence, over the last layer and with the L1 norm:
that is `gradnorm-huang`. Read as uncertainty it ranks backwards, in the paper's table too (AUROC 11
to 28 %).
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from qualms.methods.gradient_score import GradientScore


@dataclass(frozen=True)
class GradNorm(GradientScore):
    """‖(1/C) Σ_c ∇θ log p_c‖.

    Parameters: λ of `+layers(λ)` and the perturbations of `+smooth(σ, N)`; None leaves the modifier
    out.

    Example:
        ```python
        import torch
        import qualms
        from qualms.methods import GradNorm

        model, x = torch.nn.Linear(4, 3), torch.randn(5, 4)
        print(qualms.score(model, x, GradNorm()))
        ```
    """

    name = "gradnorm"
    paper = "Huang et al., On the Importance of Gradients for Detecting Distributional Shifts in the Wild, NeurIPS 2021"
    cost = "2, and 1 backward"
    direction = "uniform"

    def weights(self, probs: Float[Tensor, "b c"]) -> Float[Tensor, "b 1"]:
        """1: the norm itself."""
        return torch.ones_like(probs[:, :1])
