"""REGrad: Σ_c sqrt(p_c ‖∇θ log p_c‖²), the paper's score (Wang & Ji, CVPR 2024, section 4.1).

The square root of a class's probability weighs its gradient: more than ExGrad gives to classes that the model deems
unlikely, less than UNGrad. With `+layers+smooth` it is REGrad*, the paper's method.
"""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from qualms.gradients.smoothing import Smoothing
from qualms.methods.layered import gradient_norms
from qualms.methods.method import GRADIENTS, WANG_JI
from qualms.methods.passes import Passes


@dataclass(frozen=True)
class REGrad:
    """Parameters: λ of `+layers(λ)` and the perturbations of `+smooth(σ, N)`; None leaves the modifier out."""

    layers: float | None = None
    smooth: Smoothing | None = None

    name: ClassVar[str] = "regrad"
    paper: ClassVar[str] = WANG_JI
    needs: ClassVar[tuple[str, ...]] = (GRADIENTS,)
    cost: ClassVar[str] = "3, and C backward"
    direction: ClassVar[str] = "classes"

    def score(self, passes: Passes) -> Float[Tensor, " b"]:
        """One number for each input."""
        return regrad(passes.probs, gradient_norms(passes, self.direction, self.layers, self.smooth))

    @staticmethod
    def class_weights(probs: Float[Tensor, "b c"]) -> Float[Tensor, "b c"]:
        """sqrt(p_c)."""
        return probs.sqrt()


def regrad(probs: Float[Tensor, "b c"], norms: Float[Tensor, "b c"]) -> Float[Tensor, " b"]:
    """Σ_c sqrt(p_c) ‖∇θ log p_c‖."""
    return (REGrad.class_weights(probs) * norms).sum(-1)
