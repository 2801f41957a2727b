"""UNGrad: (1/C) Σ_c ‖∇θ log p_c‖, every class alike (a baseline of Wang & Ji, CVPR 2024).

It ranks backwards on many pairs of datasets: a confident model has large gradients for the classes that it rules out.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from qualms.gradients.smoothing import Smoothing
from qualms.methods.layered import gradient_norms
from qualms.methods.method import GRADIENTS, WANG_JI
from qualms.methods.passes import Passes


@dataclass(frozen=True)
class UNGrad:
    """Parameters: λ of `+layers(λ)` and the perturbations of `+smooth(σ, N)`; None leaves the modifier out."""

    layers: float | None = None
    smooth: Smoothing | None = None

    name: ClassVar[str] = "ungrad"
    paper: ClassVar[str] = WANG_JI
    needs: ClassVar[tuple[str, ...]] = (GRADIENTS,)
    cost: ClassVar[str] = "3, and C backward"
    direction: ClassVar[str] = "classes"

    def score(self, passes: Passes) -> Float[Tensor, " b"]:
        """One number for each input."""
        return ungrad(passes.probs, gradient_norms(passes, self.direction, self.layers, self.smooth))

    @staticmethod
    def class_weights(probs: Float[Tensor, "b c"]) -> Float[Tensor, "b c"]:
        """1/C, whatever the probabilities."""
        return torch.full_like(probs, 1 / probs.shape[-1])


def ungrad(probs: Float[Tensor, "b c"], norms: Float[Tensor, "b c"]) -> Float[Tensor, " b"]:
    """(1/C) Σ_c ‖∇θ log p_c‖."""
    return (UNGrad.class_weights(probs) * norms).sum(-1)
