"""NEGrad: ‖Σ_c p_c ∇θ log p_c‖, the norm of the expected gradient (a baseline of Wang & Ji, CVPR
2024).

The score function has zero mean, so this is identically zero in exact arithmetic, and it is zero
here. A sum as written would leave rounding of the order of 1e-16, which grows with the gradients
and so ranks inputs much like them: a signal out of nothing. With smoothing the score is not zero,
because the weights p_c are those of the unperturbed input.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from qualms.methods.gradient_score import GradientScore
from qualms.methods.method import WANG_JI


@dataclass(frozen=True)
class NEGrad(GradientScore):
    """‖Σ_c p_c ∇θ log p_c‖, zero without smoothing.

    Parameters: λ of `+layers(λ)` and the perturbations of `+smooth(σ, N)`; None leaves the modifier
    out.

    Example:
        ```python
        import torch
        import qualms
        from qualms.methods import NEGrad

        model, x = torch.nn.Linear(4, 3), torch.randn(5, 4)
        print(qualms.score(model, x, NEGrad()))  # zeros
        ```
    """

    name = "negrad"
    paper = WANG_JI
    cost = "2, and 1 backward"
    direction = "expected"

    def weights(self, probs: Float[Tensor, "b c"]) -> Float[Tensor, "b 1"]:
        """1: the norm itself."""
        return torch.ones_like(probs[:, :1])
