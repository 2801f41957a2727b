"""From a gradient's norms per layer to one number: the plain norm, or a sum with deeper layers weighted up."""

from jaxtyping import Float
from torch import Tensor

from qualms.gradients.layers import layer_weights
from qualms.gradients.smoothing import Smoothing
from qualms.methods.passes import Passes

LAMBDA = 0.3


def total_norms(norms: Float[Tensor, "b m l"], layers: float | None, norm: str) -> Float[Tensor, "b m"]:
    """‖g‖ without a λ; with one, Σ_l a_l ‖g_l‖ (λ = 0 is Σ_l ‖g_l‖, which is not the plain L2 norm)."""
    if layers is not None:
        return norms @ layer_weights(norms.shape[-1], layers).to(norms)
    return norms.sum(-1) if norm == "l1" else norms.square().sum(-1).sqrt()


def gradient_norms(
    passes: Passes, direction: str, layers: float | None, smooth: Smoothing | None
) -> Float[Tensor, "b m"]:
    """The norms that a gradient score asks for: direction `classes` gives one for each class, others one."""
    if passes.subject.settings.sketch is not None:
        return passes.sketched_norms(direction, smooth, layers)
    return total_norms(passes.norms(direction, smooth), layers, passes.subject.settings.norm)
