"""LTS: the energy of the logits multiplied by r², where r says how widely the last layer's
activation is spread.

r = Σ_i h_i / Σ of the h_i above their p-th percentile, h the features that the last linear layer
reads. Negative features count as zero in r, as in the authors' code; behind a ReLU there are none.
"""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from qualms.methods.activations import spread
from qualms.methods.context import BatchContext
from qualms.methods.method import LOGITS, Method
from qualms.parameters import PERCENTILE, check_parameters


@dataclass(frozen=True)
class LTS(Method):
    """The 95th percentile: r is against the largest 5 %.

    Example:
        ```python
        import torch
        import qualms
        from qualms.methods import LTS

        model, x = torch.nn.Linear(20, 3), torch.rand(5, 20)
        print(qualms.score(model, x, LTS(percentile=95.0)))
        ```
    """

    percentile: float = 95.0

    name = "lts"
    paper = "Djurisic et al., Logit Scaling for Out-of-Distribution Detection, 2024"
    needs = (LOGITS,)
    cost = "1"

    def __post_init__(self) -> None:
        check_parameters(self, self.name, percentile=PERCENTILE)

    def score(self, context: BatchContext) -> Float[Tensor, " b"]:
        """One number for each input."""
        factor = spread(context.head.features, self.percentile) ** 2
        return -(context.logits * factor[:, None]).logsumexp(-1)
