"""UNGrad: (1/C) Σ_c ‖∇θ log p_c‖, every class alike (a baseline of Wang & Ji, CVPR 2024).

It ranks backwards on many pairs of datasets: a confident model has large gradients for the classes
that it rules out.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from qualms.methods.gradient_score import GradientScore
from qualms.methods.method import WANG_JI


@dataclass(frozen=True)
class UNGrad(GradientScore):
    """(1/C) Σ_c ‖∇θ log p_c‖: every class alike.

    Parameters: λ of `+layers(λ)` and the perturbations of `+smooth(σ, N)`; None leaves the modifier
    out.

    Example:
        ```python
        import torch
        import qualms
        from qualms.methods import UNGrad

        model, x = torch.nn.Linear(4, 3), torch.randn(5, 4)
        print(qualms.score(model, x, UNGrad()))
        ```
    """

    name = "ungrad"
    paper = WANG_JI
    cost = "2, and C backward"
    direction = "classes"

    def weights(self, probs: Float[Tensor, "b c"]) -> Float[Tensor, "b c"]:
        """1/C, whatever the probabilities."""
        return torch.full_like(probs, 1 / probs.shape[-1])
