"""NEGrad: ‖Σ_c p_c ∇θ log p_c‖, the norm of the expected gradient (a baseline of Wang & Ji, CVPR 2024).

The score function has zero mean, so this is identically zero in exact arithmetic. The sum is computed as written; what
remains of it, without smoothing, is rounding of the order of 1e-16, and is returned as zero. Rounding grows with the
gradients and so ranks inputs much like them: left in, it would be a signal out of nothing. With smoothing the score is
not zero, because the weights p_c are those of the unperturbed input.
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
class NEGrad:
    """Parameters: λ of `+layers(λ)` and the perturbations of `+smooth(σ, N)`; None leaves the modifier out."""

    layers: float | None = None
    smooth: Smoothing | None = None

    name: ClassVar[str] = "negrad"
    paper: ClassVar[str] = WANG_JI
    needs: ClassVar[tuple[str, ...]] = (GRADIENTS,)
    cost: ClassVar[str] = "3, and 1 backward"
    direction: ClassVar[str] = "expected"

    def score(self, passes: Passes) -> Float[Tensor, " b"]:
        """One number for each input."""
        return gradient_norms(passes, self.direction, self.layers, self.smooth).squeeze(1)
