"""SCALE: the energy of the logits after the last layer's features h are multiplied by exp(r).

r = Σ_i h_i / Σ of the h_i above their p-th percentile, so that features whose activation is spread
widely are made larger. Nothing is pruned. The paper has features behind a ReLU; where they can be
negative (GELU), negative ones count as zero in r, and are multiplied like the rest.
"""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from qualms.methods.activations import spread, stretched
from qualms.methods.context import BatchContext
from qualms.methods.method import LOGITS, Method
from qualms.parameters import PERCENTILE, check_parameters


@dataclass(frozen=True)
class SCALE(Method):
    """The percentile is the paper's for ImageNet.

    Example:
        ```python
        import torch
        import qualms
        from qualms.methods import SCALE

        model, x = torch.nn.Linear(20, 3), torch.rand(5, 20)
        print(qualms.score(model, x, SCALE(percentile=85.0)))
        ```
    """

    percentile: float = 85.0

    name = "scale"
    paper = "Xu et al., Scaling for Training Time and Post-hoc Out-of-distribution Detection Enhancement, ICLR 2024"
    needs = (LOGITS,)
    cost = "1"

    def __post_init__(self) -> None:
        check_parameters(self, self.name, percentile=PERCENTILE)

    def score(self, context: BatchContext) -> Float[Tensor, " b"]:
        """One number for each input."""
        head = context.head
        return -stretched(
            context.logits, head.bias, spread(head.features, self.percentile)
        ).logsumexp(-1)
