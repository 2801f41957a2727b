"""ExGrad V: minus Σ_c |p_c - 1/C|, the distance of the prediction from a uniform one.

The paper prints the distance itself, which is a confidence; its table uses it as uncertainty, as
here.
"""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from qualms.methods.context import BatchContext
from qualms.methods.divergence import from_uniform
from qualms.methods.method import LOGITS, Method


@dataclass(frozen=True)
class ExGradV(Method):
    """No parameters.

    Example:
        ```python
        import torch
        import qualms
        from qualms.methods import ExGradV

        model, x = torch.nn.Linear(4, 3), torch.randn(5, 4)
        print(qualms.score(model, x, ExGradV()))
        ```
    """

    name = "exgrad-v"
    paper = "Igoe et al., How Useful are Gradients for OOD Detection?, 2022"
    needs = (LOGITS,)
    cost = "1"

    def score(self, context: BatchContext) -> Float[Tensor, " b"]:
        """One number for each input."""
        return -from_uniform(context.logits)
