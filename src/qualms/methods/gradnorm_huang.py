"""GradNorm as published: minus the L1 norm, over the last layer's weight, of the gradient of
KL(uniform ‖ p).

With h the layer's input the gradient is (p - 1/C) hᵀ, so its L1 norm is Σ_c |p_c - 1/C| · ‖h‖₁: one
forward pass. Large gradients mean confidence, hence the sign.
"""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from qualms.methods.context import BatchContext
from qualms.methods.divergence import from_uniform
from qualms.methods.method import LOGITS, Method


@dataclass(frozen=True)
class GradNormHuang(Method):
    """No parameters.

    Example:
        ```python
        import torch
        import qualms
        from qualms.methods import GradNormHuang

        model, x = torch.nn.Linear(4, 3), torch.randn(5, 4)
        print(qualms.score(model, x, GradNormHuang()))
        ```
    """

    name = "gradnorm-huang"
    paper = "Huang et al., On the Importance of Gradients for Detecting Distributional Shifts in the Wild, NeurIPS 2021"
    needs = (LOGITS,)
    cost = "1"

    def score(self, context: BatchContext) -> Float[Tensor, " b"]:
        """One number for each input."""
        features = context.head.features.double()
        return -from_uniform(context.logits) * features.abs().sum(-1)
