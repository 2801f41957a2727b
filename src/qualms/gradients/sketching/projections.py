"""Estimates norms from projections on random tangents: the scale of a stable law, from k draws.

A gradient's projection on a random tangent is normal with standard deviation ‖g‖ if the tangent is,
and Cauchy with scale Σ_l ‖g_l‖ if each layer's part of the tangent is divided by a normal number of
its own: the normal law adds squares of scales, the Cauchy law adds scales (Indyk, Stable
distributions, pseudorandom generators, embeddings and data stream computation, J. ACM 2006).
Tangents of random signs give the variance ‖g‖² as well, and nearly the normal law where g has many
entries. If g has a single entry, only the correction of bias is wrong, by 1/(4k).
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

Law = Literal["normal", "cauchy"]
BISECTION_STEPS = 45
TINY = torch.finfo(torch.double).tiny


@dataclass(frozen=True)
class Projections:
    """Projections of gradients on k random tangents, and the norms that they estimate.

    Attributes:
        values: projection of each of m gradients of b samples on each of k tangents.
        law: distribution of the projections of a gradient.
    """

    values: Float[Tensor, "k b m"]
    law: Law

    @property
    def scale(self) -> Float[Tensor, "b m"]:
        """The estimated norm of each gradient: the scale of the law of its k projections."""
        if self.law == "normal":
            return normal_scale(self.values)
        return cauchy_scale(self.values)

    @property
    def square(self) -> Float[Tensor, "b m"]:
        """The estimated squared norm of each gradient."""
        if self.law == "normal":
            return self.values.square().mean(0)
        return self.scale.square()

    def influence(self, scale: Float[Tensor, "b m"], j: int) -> Float[Tensor, "b m"]:
        """Compute the influence function of projection j: its part in each estimate's error.

        To first order; the sum of the squares over j estimates the variance. Under the Cauchy law,
        the derivative of log p(t) with respect to log γ is (t² - γ²)/(t² + γ²), with variance 1/2.

        Args:
            scale: the estimated norms γ.
            j: the index of the tangent, from 0 to k - 1.
        """
        k = len(self.values)
        square = self.values[j].square()
        scale_square = scale.square()
        if self.law == "normal":
            return scale * (square / scale_square.clamp_min(TINY) - 1) / (2 * k)
        total = (square + scale_square).clamp_min(TINY)
        return scale * 2 / k * (square - scale_square) / total

    def weighted_error(
        self,
        scale: Float[Tensor, "b m"],
        weights: Float[Tensor, "b m"],
    ) -> Float[Tensor, " b"]:
        """Compute the standard error of Σ_m w_m scale_m.

        The m estimates share tangents, so their errors are correlated: influences are added up
        over m before they are squared.

        Args:
            scale: the estimated norms.
            weights: the weights w.
        """
        variance = torch.zeros_like(scale[:, 0])
        for j in range(len(self.values)):
            variance = variance + (weights * self.influence(scale, j)).sum(-1).square()
        return variance.sqrt()

    def error(self, scale: Float[Tensor, "b m"]) -> Float[Tensor, "b m"]:
        """Compute the standard error of each estimated norm, given these norms as `scale`."""
        variance = torch.zeros_like(scale)
        for j in range(len(self.values)):
            variance = variance + self.influence(scale, j).square()
        return variance.sqrt()


def normal_scale(t: Float[Tensor, "k b m"]) -> Float[Tensor, "b m"]:
    """Estimate the standard deviation of k normal draws with mean zero, without bias."""
    return unbiased_root(t.square().mean(0), len(t))


def unbiased_root(mean_square: Float[Tensor, "*n"], k: int) -> Float[Tensor, "*n"]:
    """Estimate a standard deviation from the mean square of k normal draws, without bias.

    The root of an average is biased: E sqrt(χ²_k / k) = sqrt(2/k) Γ((k+1)/2) / Γ(k/2).
    """
    gamma_ratio = math.exp(math.lgamma((k + 1) / 2) - math.lgamma(k / 2))
    return mean_square.sqrt() / (math.sqrt(2 / k) * gamma_ratio)


def cauchy_scale(t: Float[Tensor, "k b m"]) -> Float[Tensor, "b m"]:
    """Estimate the scale γ of Cauchy numbers from k draws by maximum likelihood.

    The equation Σ_j t_j² / (t_j² + γ²) = k/2 is solved by bisection of log γ² between the smallest
    and the largest t².
    """
    square = t.square().clamp_min(TINY)  # its logarithm is finite
    low = square.amin(0).log()
    high = square.amax(0).log()
    for _ in range(BISECTION_STEPS):
        middle = (low + high) / 2
        share = square / (square + middle.exp())
        is_above = share.mean(0) > 0.5
        low = torch.where(is_above, middle, low)
        high = torch.where(is_above, high, middle)
    scale = ((low + high) / 4).exp()  # γ from log γ² = (low + high) / 2
    return torch.where(t.any(0), scale, 0.0)  # 0 if all draws are 0
