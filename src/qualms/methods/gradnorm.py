"""GradNorm as the paper's tables have it: ‖(1/C) Σ_c ∇θ log p_c‖, over all parameters, higher taken as uncertain.

Huang et al. use it the other way round, as confidence, over the last layer and with the L1 norm: that is
`gradnorm-huang`. Read as uncertainty it ranks backwards, in the paper's table too (AUROC 11 to 28 %).
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
class GradNorm:
    """Parameters: λ of `+layers(λ)` and the perturbations of `+smooth(σ, N)`; None leaves the modifier out."""

    layers: float | None = None
    smooth: Smoothing | None = None

    name: ClassVar[str] = "gradnorm"
    paper: ClassVar[str] = (
        "Huang et al., On the Importance of Gradients for Detecting Distributional Shifts in the Wild, NeurIPS 2021"
    )
    needs: ClassVar[tuple[str, ...]] = (GRADIENTS,)
    cost: ClassVar[str] = "3, and 1 backward"
    direction: ClassVar[str] = "uniform"

    def score(self, passes: Passes) -> Float[Tensor, " b"]:
        """One number for each input."""
        return gradient_norms(passes, self.direction, self.layers, self.smooth).squeeze(1)
