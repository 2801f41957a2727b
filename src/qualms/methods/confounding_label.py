"""Gradients of a confounding label: ‖∇θ L(x, y = all classes at once)‖, L the binary cross-entropy of the logits.

A model that knows an input needs little change to accept it; the label that turns every class on asks for an update
whose size is the score.
"""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from qualms.gradients.smoothing import Smoothing
from qualms.methods.evidence import Evidence
from qualms.methods.layered import gradient_norms
from qualms.methods.method import GRADIENTS


@dataclass(frozen=True)
class ConfoundingLabel:
    """Parameters: λ of `+layers(λ)` and the perturbations of `+smooth(σ, N)`; None leaves the modifier out."""

    layers: float | None = None
    smooth: Smoothing | None = None

    name: ClassVar[str] = "confounding-label"
    paper: ClassVar[str] = "Lee & AlRegib, Gradients as a Measure of Uncertainty in Neural Networks, ICIP 2020"
    needs: ClassVar[tuple[str, ...]] = (GRADIENTS,)
    cost: ClassVar[str] = "2.6"
    direction: ClassVar[str] = "confounding"

    def score(self, seen: Evidence) -> Float[Tensor, " b"]:
        """One number for each input."""
        return gradient_norms(seen, self.direction, self.layers, self.smooth).squeeze(1)
