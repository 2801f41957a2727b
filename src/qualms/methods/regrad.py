"""REGrad: Σ_c sqrt(p_c ‖∇θ log p_c‖²), the paper's score (Wang & Ji, CVPR 2024, section 4.1).

The square root of a class's probability weighs its gradient: more than ExGrad gives to classes that
the model deems unlikely, less than UNGrad. With `+layers+smooth` it is REGrad*, the paper's method.
"""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from qualms.methods.divergence import log_softmax
from qualms.methods.gradient_score import GradientScore
from qualms.methods.method import WANG_JI


@dataclass(frozen=True)
class REGrad(GradientScore):
    """Σ_c sqrt(p_c) ‖∇θ log p_c‖.

    Parameters: λ of `+layers(λ)` and the perturbations of `+smooth(σ, N)`; None leaves the modifier
    out.

    Example:
        ```python
        import torch
        import qualms
        from qualms.methods import REGrad

        model, x = torch.nn.Linear(4, 3), torch.randn(5, 4)
        print(qualms.score(model, x, REGrad(layers=0.3, smooth=qualms.Smoothing(0.02))))  # REGrad*
        ```
    """

    name = "regrad"
    paper = WANG_JI
    cost = "2, and C backward"
    direction = "classes"

    def weights(self, probs: Float[Tensor, "b c"]) -> Float[Tensor, "b c"]:
        """sqrt(p_c)."""
        return probs.sqrt()

    def weights_at(self, logits: Float[Tensor, "b c"]) -> Float[Tensor, "b c"]:
        """By logarithms: the root of a probability that is zero in double precision need not be."""
        return (log_softmax(logits.double()) / 2).exp()
