"""Gradients of a confounding label: minus ‖∇θ L(x, every class on)‖, L the binary cross-entropy of the logits.

The label that turns every class on at once was never seen in training, and the update that it asks for depends on what
the model knows of the input. Lee & AlRegib train a detector on such magnitudes, which leaves their sign to the fit. On
classifiers trained with softmax a confident input asks for the larger update, since all other logits are far down:
hence the minus. A shift of all logits changes it.
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
class ConfoundingLabel:
    """Parameters: λ of `+layers(λ)` and the perturbations of `+smooth(σ, N)`; None leaves the modifier out."""

    layers: float | None = None
    smooth: Smoothing | None = None

    name: ClassVar[str] = "confounding-label"
    paper: ClassVar[str] = "Lee & AlRegib, Gradients as a Measure of Uncertainty in Neural Networks, ICIP 2020"
    needs: ClassVar[tuple[str, ...]] = (GRADIENTS,)
    cost: ClassVar[str] = "3, and 1 backward"
    direction: ClassVar[str] = "confounding"

    def score(self, passes: Passes) -> Float[Tensor, " b"]:
        """One number for each input."""
        return -gradient_norms(passes, self.direction, self.layers, self.smooth).squeeze(1)
