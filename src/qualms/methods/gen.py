"""GEN: Σ over the M largest probabilities of p^γ (1 - p)^γ, a generalized entropy."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from qualms.methods.context import BatchContext
from qualms.methods.divergence import log_complements
from qualms.methods.method import LOGITS, Method
from qualms.parameters import POSITIVE, check_parameters, whole


@dataclass(frozen=True)
class GEN(Method):
    """γ < 1 makes it sensitive to small deviations from a certain prediction; M keeps a long tail
    of classes out.

    Example:
        ```python
        import torch
        import qualms
        from qualms.methods import GEN

        model, x = torch.nn.Linear(4, 3), torch.randn(5, 4)
        print(qualms.score(model, x, GEN(gamma=0.1, top=10)))
        ```
    """

    gamma: float = 0.1
    top: int = 100

    name = "gen"
    paper = "Liu et al., GEN: Pushing the Limits of Softmax-Based OOD Detection, CVPR 2023"
    needs = (LOGITS,)
    cost = "1"

    def __post_init__(self) -> None:
        check_parameters(self, self.name, gamma=POSITIVE, top=whole(1))

    def score(self, context: BatchContext) -> Float[Tensor, " b"]:
        """One number for each input."""
        log_p = context.log_probs
        likeliest, places = log_p.topk(min(self.top, log_p.shape[1]), dim=-1)
        # By logarithms: (1 - p)^γ is far from zero where 1 - p is next to it.
        return (self.gamma * (likeliest + log_complements(log_p).gather(-1, places))).exp().sum(-1)
