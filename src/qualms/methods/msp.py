"""Maximum softmax probability, as uncertainty: 1 - max_c p_c."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from qualms.methods.context import BatchContext
from qualms.methods.method import LOGITS, Method


@dataclass(frozen=True)
class MSP(Method):
    """No parameters.

    Example:
        ```python
        import torch
        import qualms
        from qualms.methods import MSP

        model, x = torch.nn.Linear(4, 3), torch.randn(5, 4)
        print(qualms.score(model, x, MSP()))
        ```
    """

    name = "msp"
    paper = "Hendrycks & Gimpel, A Baseline for Detecting Misclassified and Out-of-Distribution Examples, ICLR 2017"
    needs = (LOGITS,)
    cost = "1"

    def score(self, context: BatchContext) -> Float[Tensor, " b"]:
        """One number for each input."""
        return -(context.log_probs.amax(-1)).expm1()
