"""ASH-S: the energy of the logits after the last layer's features h are pruned and the rest
multiplied by exp(r).

All h_i up to their p-th percentile become zero; r = Σ_i h_i before pruning / Σ_i h_i after it. The
paper has features behind a ReLU; where they can be negative (GELU), the largest are kept whatever
their sign, and negative ones count as zero in r.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from qualms.methods.activations import largest, spread, stretched
from qualms.methods.context import BatchContext
from qualms.methods.method import LOGITS, Method
from qualms.parameters import PERCENTILE, check_parameters


@dataclass(frozen=True)
class ASHS(Method):
    """The percentile is the paper's for ImageNet.

    Example:
        ```python
        import torch
        import qualms
        from qualms.methods import ASHS

        model, x = torch.nn.Linear(20, 3), torch.rand(5, 20)
        print(qualms.score(model, x, ASHS(percentile=90.0)))
        ```
    """

    percentile: float = 90.0

    name = "ash-s"
    paper = "Djurisic et al., Extremely Simple Activation Shaping for Out-of-Distribution Detection, ICLR 2023"
    needs = (LOGITS,)
    cost = "1"

    def __post_init__(self) -> None:
        check_parameters(self, self.name, percentile=PERCENTILE)

    def score(self, context: BatchContext) -> Float[Tensor, " b"]:
        """One number for each input."""
        head = context.head
        logits = head.logits(pruned(head.features, self.percentile))
        return -stretched(logits, head.bias, spread(head.features, self.percentile)).logsumexp(-1)


def pruned(features: Float[Tensor, "b f"], percentile: float) -> Float[Tensor, "b f"]:
    """The largest features, all others zero."""
    values, places = largest(features, percentile)
    return torch.zeros_like(features).scatter(1, places, values)
