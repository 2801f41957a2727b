"""Entropy of the prediction: -Σ_c p_c log p_c. Total uncertainty: it cannot tell ignorance from
ambiguity.
"""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from qualms.methods.context import BatchContext
from qualms.methods.divergence import entropy_of
from qualms.methods.method import LOGITS, Method


@dataclass(frozen=True)
class Entropy(Method):
    """No parameters.

    Example:
        ```python
        import torch
        import qualms
        from qualms.methods import Entropy

        model, x = torch.nn.Linear(4, 3), torch.randn(5, 4)
        print(qualms.score(model, x, Entropy()))
        ```
    """

    name = "entropy"
    paper = "Shannon, A Mathematical Theory of Communication, 1948"
    needs = (LOGITS,)
    cost = "1"

    def score(self, context: BatchContext) -> Float[Tensor, " b"]:
        """One number for each input."""
        return entropy_of(context.log_probs)
