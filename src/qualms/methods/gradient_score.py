"""What the gradient scores share: Σ_m w_m ‖g_m‖ over the gradients g_m along some directions, each with its weight.

With `+layers(λ)` ‖g‖ becomes Σ_l exp(λ(l - L)) ‖g_l‖, in which deeper layers count more, and with `+smooth(σ, N)` each
g is averaged over perturbed inputs before any norm is taken (Wang & Ji, CVPR 2024, sections 4.2 and 4.3).
"""

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from jaxtyping import Float
from torch import Tensor

from qualms.gradients.layers import layer_weights
from qualms.gradients.smoothing import Smoothing
from qualms.methods.method import FEW, GRADIENTS, Method, Scale, converted
from qualms.methods.passes import Passes
from qualms.parameters import FINITE_OR_NONE, Rule, settle

LAMBDA = 0.3


@dataclass(frozen=True)
class GradientScore(Method):
    """Parameters: λ of `+layers(λ)` and the perturbations of `+smooth(σ, N)`; None leaves the modifier out."""

    layers: float | None = None
    smooth: Smoothing | None = None

    needs = (GRADIENTS,)
    direction: ClassVar[str]

    def __post_init__(self) -> None:
        settle(self, self.name, layers=FINITE_OR_NONE, smooth=SMOOTHING)

    @abstractmethod
    def weights(self, probs: Float[Tensor, "b c"]) -> Float[Tensor, "b m"]:
        """What the norm of each gradient counts."""

    def score(self, passes: Passes) -> Float[Tensor, " b"]:
        """One number for each input."""
        norms = gradient_norms(passes, self.direction, self.layers, self.smooth)
        return (self.weights(passes.probs) * norms).sum(-1)

    @property
    def spec(self) -> str:
        """The name with its modifiers; of noise per channel the first."""
        spec = self.name
        if self.layers is not None:
            spec += f"+layers({self.layers:g})"
        if self.smooth is not None:
            sigma = self.smooth.sigma[0] if isinstance(self.smooth.sigma, tuple) else self.smooth.sigma
            spec += f"+smooth({sigma:g},{self.smooth.draws})"
        return spec

    def in_units(self, scale: Scale) -> "GradientScore":
        """The same with σ of smoothing in the units of the model's input."""
        if self.smooth is None:
            return self
        return replace(self, smooth=replace(self.smooth, sigma=converted(self.smooth.sigma, scale)))

    def quick(self) -> "GradientScore":
        """The same with two draws of smoothing at most."""
        if self.smooth is None:
            return self
        return replace(self, smooth=replace(self.smooth, draws=min(self.smooth.draws, FEW)))


def gradient_norms(passes: Passes, direction: str, lam: float | None, smooth: Smoothing | None) -> Float[Tensor, "b m"]:
    """The norms that a gradient score asks for: direction `classes` gives one for each class, others one."""
    if passes.subject.settings.sketch is not None:
        return passes.sketched_norms(direction, smooth, lam)
    return total_norms(passes.norms(direction, smooth), lam, passes.subject.settings.norm)


def total_norms(norms: Float[Tensor, "b m l"], lam: float | None, norm: str) -> Float[Tensor, "b m"]:
    """‖g‖ without a λ; with one, Σ_l a_l ‖g_l‖ (λ = 0 is Σ_l ‖g_l‖, which is not the plain L2 norm)."""
    if lam is not None:
        return norms @ layer_weights(norms.shape[-1], lam).to(norms)
    return norms.sum(-1) if norm == "l1" else norms.square().sum(-1).sqrt()


def _smoothing(value: Any) -> Smoothing | None:
    if value is not None and not isinstance(value, Smoothing):
        raise ValueError
    return value


SMOOTHING = Rule("a qualms.Smoothing, or None", _smoothing)
