"""From projections on random tangents to norms: the scale of a stable law, estimated from a sample
of k.

A gradient's projection on a random tangent is normal with standard deviation ‖g‖ if the tangent is,
and Cauchy with scale Σ_l ‖g_l‖ if each layer's part of the tangent is divided by a normal number of
its own: the normal law adds squares of scales, the Cauchy law adds scales (Indyk, Stable
distributions, pseudorandom generators, embeddings and data stream computation, J. ACM 2006).
Tangents of random signs give the variance ‖g‖² as well, and nearly the normal law where g has many
entries; if it had a single one, the only error would be the correction of bias, 1/(4k).
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

Law = Literal["normal", "cauchy"]
STEPS = 45  # of a bisection


@dataclass(frozen=True)
class Sample:
    """k projections of each of m gradients of b inputs."""

    projections: Float[Tensor, "k b m"]
    law: Law

    @property
    def scale(self) -> Float[Tensor, "b m"]:
        """The estimated norms."""
        return (
            normal_scale(self.projections)
            if self.law == "normal"
            else cauchy_scale(self.projections)
        )

    @property
    def square(self) -> Float[Tensor, "b m"]:
        """The estimated squares of the norms."""
        return self.projections.square().mean(0) if self.law == "normal" else self.scale.square()

    def influence(self, scale: Float[Tensor, "b m"], j: int) -> Float[Tensor, "b m"]:
        """How far projection j moved the estimate, to first order; the sum of squares over j is its
        variance.
        """
        square, scale_square, k = (
            self.projections[j].square(),
            scale.square(),
            len(self.projections),
        )
        if self.law == "normal":
            return scale * (square / scale_square.clamp_min(TINY) - 1) / (2 * k)
        # The derivative of log p by log γ is (t² - γ²)/(t² + γ²), of variance 1/2.
        return scale * 2 / k * (square - scale_square) / (square + scale_square).clamp_min(TINY)

    def weighted_error(
        self, scale: Float[Tensor, "b m"], weights: Float[Tensor, "b m"]
    ) -> Float[Tensor, " b"]:
        """The standard error of Σ_m w_m scale_m; each tangent moves all m estimates at once."""
        each = (
            (weights * self.influence(scale, j)).sum(-1).square()
            for j in range(len(self.projections))
        )
        return sum(each, torch.zeros_like(scale[:, 0])).sqrt()

    def error(self, scale: Float[Tensor, "b m"]) -> Float[Tensor, "b m"]:
        """The standard error of each estimate."""
        each = (self.influence(scale, j).square() for j in range(len(self.projections)))
        return sum(each, torch.zeros_like(scale)).sqrt()


TINY = torch.finfo(torch.double).tiny


def normal_scale(t: Float[Tensor, "k b m"]) -> Float[Tensor, "b m"]:
    """sqrt(mean t²), without the bias of a root of an average: E sqrt(χ²_k) = sqrt(2) Γ((k+1)/2) /
    Γ(k/2).
    """
    return unbiased_root(t.square().mean(0), len(t))


def unbiased_root(mean: Float[Tensor, "*n"], k: int) -> Float[Tensor, "*n"]:
    """The standard deviation of normal numbers of which k have this mean square."""
    mean_root = math.sqrt(2 / k) * math.exp(math.lgamma((k + 1) / 2) - math.lgamma(k / 2))
    return mean.sqrt() / mean_root


def cauchy_scale(t: Float[Tensor, "k b m"]) -> Float[Tensor, "b m"]:
    """The maximum-likelihood scale γ: Σ_j t_j² / (t_j² + γ²) = k/2, by bisection between the
    smallest and largest.
    """
    square = t.square().clamp_min(TINY)
    low, high = square.amin(0).log(), square.amax(0).log()
    for _ in range(STEPS):
        middle = (low + high) / 2
        above = (square / (square + middle.exp())).mean(0) > 0.5
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    return torch.where(t.any(0), ((low + high) / 4).exp(), 0.0)
