"""Estimates norms from projections on random tangents: the scale of a distribution, from k draws.

The projection of a gradient g on a random tangent is normal with standard deviation ‖g‖ if the
tangent has normal entries. It is Cauchy with scale Σ_l ‖g_l‖ if each layer's part of the tangent is
divided by a normal number of its own. Where random numbers add up, normal distributions add the
squares of their scales, and Cauchy distributions add their scales (Indyk, Stable distributions,
pseudorandom generators, embeddings and data stream computation, J. ACM 2006). Tangents of random
signs give the variance ‖g‖² as well, and a nearly normal projection where g has many entries. If g
has a single entry, only the correction of bias is wrong, by 1/(4k).
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

# The distribution of a gradient's projection on a random tangent.
Distribution = Literal["normal", "cauchy"]
BISECTION_STEPS = 45
# Keeps logarithms and quotients finite.
TINY = torch.finfo(torch.double).tiny


@dataclass(frozen=True)
class Projections:
    """Projections of gradients on k random tangents, and the norms that they estimate.

    Attributes:
        values: the projections of m gradients of each of b samples on each of the k tangents.
        distribution: the distribution of a gradient's projection on a tangent.
    """

    values: Float[Tensor, "k b m"]
    distribution: Distribution

    def estimate_norms(self) -> Float[Tensor, "b m"]:
        """Estimate the norm of each gradient: the scale of the distribution of its k projections."""
        if self.distribution == "normal":
            return normal_scale(self.values)
        return cauchy_scale(self.values)

    def estimate_squared_norms(self) -> Float[Tensor, "b m"]:
        """Estimate the squared norm of each gradient."""
        if self.distribution == "normal":
            return self.values.square().mean(0)
        return self.estimate_norms().square()

    def influence(self, norms: Float[Tensor, "b m"], j: int) -> Float[Tensor, "b m"]:
        """Compute the influence of the projections on tangent j on the errors of estimated norms.

        This is the influence function, the error that one projection t causes, to first order; the
        sum of its squares over all j estimates the variance. For Cauchy numbers of scale γ with
        density p, the derivative of log p(t) with respect to log γ is (t² - γ²)/(t² + γ²), with
        variance 1/2.

        Args:
            norms: the estimated norms γ.
            j: the index of the tangent, from 0 to k - 1.
        """
        k = len(self.values)
        t_squared = self.values[j].square()
        norm_squared = norms.square()
        # γ² is the mean of k squares, so t causes the error (t² - γ²) / k of γ², and 1 / 2γ of it in γ.
        if self.distribution == "normal":
            return norms * (t_squared / norm_squared.clamp_min(TINY) - 1) / (2 * k)
        total = (t_squared + norm_squared).clamp_min(TINY)
        return norms * 2 / k * (t_squared - norm_squared) / total

    def weighted_error(
        self,
        norms: Float[Tensor, "b m"],
        weights: Float[Tensor, "b m"],
    ) -> Float[Tensor, " b"]:
        """Compute the standard error of Σ_m w_m norm_m, the weighted sum of a sample's norms.

        The m estimates share tangents, so their errors are correlated: influences are added up
        over m before they are squared.

        Args:
            norms: the estimated norms.
            weights: the weights w_m.
        """
        variance = torch.zeros_like(norms[:, 0])
        for j in range(len(self.values)):
            variance = variance + (weights * self.influence(norms, j)).sum(-1).square()
        return variance.sqrt()

    def error(self, norms: Float[Tensor, "b m"]) -> Float[Tensor, "b m"]:
        """Compute the standard errors of estimated norms, from the influence of each tangent."""
        variance = torch.zeros_like(norms)
        for j in range(len(self.values)):
            variance = variance + self.influence(norms, j).square()
        return variance.sqrt()


def normal_scale(draws: Float[Tensor, "k b m"]) -> Float[Tensor, "b m"]:
    """Estimate the standard deviation of normal numbers with mean zero from k draws, without bias."""
    return unbiased_root(draws.square().mean(0), len(draws))


def unbiased_root(mean_square: Float[Tensor, "*n"], k: int) -> Float[Tensor, "*n"]:
    """Estimate a standard deviation from the mean square of k normal draws, without bias.

    The root of an average is biased: for k draws with variance 1 its expectation is
    E sqrt(χ²_k / k) = sqrt(2/k) Γ((k+1)/2) / Γ(k/2), by which it is divided here.
    """
    gamma_ratio = math.exp(math.lgamma((k + 1) / 2) - math.lgamma(k / 2))
    return mean_square.sqrt() / (math.sqrt(2 / k) * gamma_ratio)


def cauchy_scale(draws: Float[Tensor, "k b m"]) -> Float[Tensor, "b m"]:
    """Estimate the scale γ of Cauchy numbers from k draws t_j by maximum likelihood.

    The equation Σ_j t_j² / (t_j² + γ²) = k/2 is solved by bisection of log γ² between the smallest
    and the largest t_j².
    """
    squares = draws.square().clamp_min(TINY)  # so that the logarithms are finite
    low = squares.amin(0).log()
    high = squares.amax(0).log()
    for _ in range(BISECTION_STEPS):
        middle = (low + high) / 2
        shares = squares / (squares + middle.exp())
        is_scale_larger = shares.mean(0) > 0.5
        low = torch.where(is_scale_larger, middle, low)
        high = torch.where(is_scale_larger, high, middle)
    log_square = (low + high) / 2  # log γ²
    scale = (log_square / 2).exp()
    # If all draws are 0, so is the scale.
    return torch.where(draws.any(0), scale, 0.0)
