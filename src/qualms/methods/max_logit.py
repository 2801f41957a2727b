"""Largest logit, as uncertainty: -max_c z_c. A shift of all logits changes it."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from qualms.methods.context import BatchContext
from qualms.methods.method import LOGITS, Method


@dataclass(frozen=True)
class MaxLogit(Method):
    """No parameters.

    Example:
        ```python
        import torch
        import qualms
        from qualms.methods import MaxLogit

        model, x = torch.nn.Linear(4, 3), torch.randn(5, 4)
        print(qualms.score(model, x, MaxLogit()))
        ```
    """

    name = "max-logit"
    paper = (
        "Hendrycks et al., Scaling Out-of-Distribution Detection for Real-World Settings, ICML 2022"
    )
    needs = (LOGITS,)
    cost = "1"

    def score(self, context: BatchContext) -> Float[Tensor, " b"]:
        """One number for each input."""
        return -context.logits.amax(-1)
