"""ExGrad: Σ_c p_c ‖∇θ log p_c‖, the expected gradient norm (Igoe et al., 2022; a row of the paper's tables).

It bounds the KL divergence of small weight perturbations from above (Wang & Ji, CVPR 2024, proposition 4).
"""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from qualms.gradients.smoothing import Smoothing
from qualms.methods.layered import gradient_norms
from qualms.methods.method import GRADIENTS
from qualms.methods.passes import Passes


@dataclass(frozen=True)
class ExGrad:
    """Parameters: λ of `+layers(λ)` and the perturbations of `+smooth(σ, N)`; None leaves the modifier out."""

    layers: float | None = None
    smooth: Smoothing | None = None

    name: ClassVar[str] = "exgrad"
    paper: ClassVar[str] = "Igoe et al., How Useful are Gradients for OOD Detection?, 2022"
    needs: ClassVar[tuple[str, ...]] = (GRADIENTS,)
    cost: ClassVar[str] = "3, and C backward"
    direction: ClassVar[str] = "classes"

    def score(self, passes: Passes) -> Float[Tensor, " b"]:
        """One number for each input."""
        return exgrad(passes.probs, gradient_norms(passes, self.direction, self.layers, self.smooth))

    @staticmethod
    def class_weights(probs: Float[Tensor, "b c"]) -> Float[Tensor, "b c"]:
        """p_c."""
        return probs


def exgrad(probs: Float[Tensor, "b c"], norms: Float[Tensor, "b c"]) -> Float[Tensor, " b"]:
    """Σ_c p_c ‖∇θ log p_c‖."""
    return (ExGrad.class_weights(probs) * norms).sum(-1)
