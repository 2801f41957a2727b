"""ReAct: -log Σ_c exp z_c, the energy, of logits from features clipped at a quantile of the
training features.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from torch import Tensor

from qualms.methods.context import BatchContext
from qualms.methods.method import TRAINING_DATA, Method
from qualms.methods.training_features import training_features
from qualms.parameters import SHARE, check_parameters


@dataclass(frozen=True)
class ReAct(Method):
    """One threshold for all features: the paper's 90th percentile of all the numbers in the
    training features.

    Example:
        ```python
        import torch
        import qualms
        from qualms.methods import ReAct

        model, x = torch.nn.Linear(4, 3), torch.randn(5, 4)
        print(qualms.score(model, x, ReAct(quantile=0.9), train=[torch.randn(50, 4)]))
        ```
    """

    quantile: float = 0.9

    name = "react"
    paper = (
        "Sun et al., ReAct: Out-of-distribution Detection With Rectified Activations, NeurIPS 2021"
    )
    needs = (TRAINING_DATA,)
    cost = "1, and 1 for each training input"

    def __post_init__(self) -> None:
        check_parameters(self, self.name, quantile=SHARE)

    def score(self, context: BatchContext) -> Float[Tensor, " b"]:
        """One number for each input."""
        fitted, head = context.model_context.fitted, context.head
        if self not in fitted:  # torch's quantile takes 16 million numbers at most
            fitted[self] = float(
                np.quantile(training_features(context, self.name).features.cpu(), self.quantile)
            )
        return -head.logits(head.features.clamp(max=fitted[self])).double().logsumexp(-1)
