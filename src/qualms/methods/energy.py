"""Energy: -log Σ_c exp z_c. A shift of all logits changes it."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from qualms.methods.context import BatchContext
from qualms.methods.method import LOGITS, Method


@dataclass(frozen=True)
class Energy(Method):
    """No parameters.

    Example:
        ```python
        import torch
        import qualms
        from qualms.methods import Energy

        model, x = torch.nn.Linear(4, 3), torch.randn(5, 4)
        print(qualms.score(model, x, Energy()))
        ```
    """

    name = "energy"
    paper = "Liu et al., Energy-based Out-of-distribution Detection, NeurIPS 2020"
    needs = (LOGITS,)
    cost = "1"

    def score(self, context: BatchContext) -> Float[Tensor, " b"]:
        """One number for each input."""
        return -context.logits.logsumexp(-1)
