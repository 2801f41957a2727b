"""Proposition 1: with much data the posterior is a narrow Gaussian around θ*, so Gaussian noise on
θ* can stand for it.

U(x) = E_{p(θ|D)} KL( p(y|x,θ) ‖ p(y|x,θ*) ) is compared under three distributions of θ: the exact
posterior (on a fine grid, in one or two dimensions), the Laplace Gaussian N(θ*, -H⁻¹), and N(θ*,
σ²I), which is what `perturb-theta` draws.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

import qualms
from qualms.methods.perturb_model import PerturbTheta
from qualms.random import generator

SIZES = (24, 96, 384, 1536, 6144, 24576)
FEATURES = torch.stack(
    [torch.ones(12), torch.linspace(1, 4, 12)], 1
).double()  # an intercept, and x off center
TRUE_WEIGHTS = torch.tensor([-2.0, 1.0], dtype=torch.double)
PROBES = torch.stack(
    [torch.ones(21), torch.linspace(-2, 8, 21)], 1
).double()  # where U is asked for: also off the data
AS_GIVEN = torch.eye(2, dtype=torch.double)
STANDARDIZED = torch.tensor([[1.0, -2.5], [0.0, 1.0]], dtype=torch.double) / torch.tensor(
    [1.0, 0.94]
)  # mean 0, sd 1


@dataclass(frozen=True)
class Posterior:
    """A logistic regression's exact posterior, on a grid u that is white under the Laplace
    Gaussian: θ = θ* + A u.
    """

    mode: Tensor
    root: Tensor  # A, with A Aᵀ = -H⁻¹
    grid: Tensor  # u
    exact: Tensor  # probability of each cell
    laplace: Tensor

    @property
    def weights(self) -> Tensor:
        """θ at each point of the grid."""
        return self.mode + self.grid @ self.root.T

    def isotropic(self, sigma: float) -> Tensor:
        """N(θ*, σ²I), as the probability of each cell."""
        return (-((self.grid @ self.root.T) ** 2).sum(1) / (2 * sigma**2)).softmax(0)

    def cell(self) -> float:
        """How much θ-space one cell covers: probability / cell is the density."""
        step = float(self.grid[:, -1].unique().diff().median())
        return step ** self.grid.shape[1] * abs(float(self.root.det()))


def log_joint(
    theta: Tensor, features: Tensor, ones: Tensor, trials: Tensor, prior_sd: float
) -> Tensor:
    """log p(D|θ) + log p(θ) of a logistic regression with N(0, s²I) prior, from counts at each
    distinct input.
    """
    z = theta @ features.T
    return (ones * logsigmoid(z) + (trials - ones) * logsigmoid(-z)).sum(-1) - (theta**2).sum(
        -1
    ) / (2 * prior_sd**2)


def posterior(
    features: Tensor,
    ones: Tensor,
    trials: Tensor,
    prior_sd: float,
    span: float = 8,
    side: int = 161,
) -> Posterior:
    """The mode by damped Newton steps, and both densities on a grid that reaches `span` deviations
    each way.
    """
    theta = torch.zeros(features.shape[1], dtype=torch.double)
    eye = torch.eye(len(theta), dtype=torch.double) / prior_sd**2
    value = log_joint(theta, features, ones, trials, prior_sd)
    for _ in range(200):
        p = (features @ theta).sigmoid()
        precision = features.T @ (features * (trials * p * (1 - p))[:, None]) + eye
        step = torch.linalg.solve(precision, features.T @ (ones - trials * p) - theta / prior_sd**2)
        while log_joint(theta + step, features, ones, trials, prior_sd) < value - 1e-9 * abs(value):
            step = step / 2
        theta = theta + step
        value = log_joint(theta, features, ones, trials, prior_sd)
        if step.norm() < 1e-10 * (1 + theta.norm()):
            break
    root = torch.linalg.cholesky(torch.linalg.inv(precision))
    axis = torch.linspace(-span, span, side, dtype=torch.double)
    grid = torch.cartesian_prod(*[axis] * len(theta)).reshape(-1, len(theta))
    exact = log_joint(theta + grid @ root.T, features, ones, trials, prior_sd).softmax(0)
    return Posterior(theta, root, grid, exact, (-(grid**2).sum(1) / 2).softmax(0))


def fitted(
    size: int,
    seed: int,
    chance: Tensor | None = None,
    view: Tensor = AS_GIVEN,
    span: float = 8,
    side: int = 161,
) -> Posterior:
    """The posterior after `size` labels, drawn with the model's own probabilities or with `chance`
    instead.

    `view` multiplies the features that the model sees; the labels do not depend on it.
    """
    chance = (FEATURES @ TRUE_WEIGHTS).sigmoid() if chance is None else chance
    trials = torch.full((len(FEATURES),), size / len(FEATURES), dtype=torch.double)
    ones = torch.binomial(trials, chance, generator=generator(seed, size))
    return posterior(FEATURES @ view, ones, trials, 10.0, span, side)


def distance(p: Tensor, q: Tensor) -> float:
    """Total variation: ½ Σ |p - q|."""
    return float((p - q).abs().sum() / 2)


def uncertainty(found: Posterior, density: Tensor, probes: Tensor) -> Tensor:
    """U at each probe: Σ_θ density · KL( p(y|x,θ) ‖ p(y|x,θ*) )."""
    z, at_mode = found.weights @ probes.T, probes @ found.mode
    kl = z.sigmoid() * (logsigmoid(z) - logsigmoid(at_mode)) + (-z).sigmoid() * (
        logsigmoid(-z) - logsigmoid(-at_mode)
    )
    return density @ kl


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """The exponent b of the power law y ~ x^b, by least squares of the logarithms."""
    a, b = torch.tensor(x).double().log(), torch.tensor(y).double().log()
    return float(((a - a.mean()) * (b - b.mean())).sum() / ((a - a.mean()) ** 2).sum())


def growing_data(sizes: tuple[int, ...] = SIZES, datasets: int = 6) -> dict[str, list[float]]:
    """Means over datasets at each size: the gaps between the exact posterior and its Laplace
    Gaussian.

    `laplace` is the total variation between posterior and Laplace Gaussian, `density` the largest
    difference between their densities, sup_θ |p(θ|D) - N(θ; θ*, -H⁻¹)|; `gap` is the relative error
    of U under the Laplace Gaussian and `level` is U itself, both averaged over the probes; `rank`
    is the least Spearman correlation of the two U in any of the datasets.
    """
    rows: dict[str, list[float]] = {
        "laplace": [],
        "density": [],
        "gap": [],
        "level": [],
        "rank": [],
    }
    for size in sizes:
        found = [fitted(size, seed) for seed in range(datasets)]
        exact = torch.stack([uncertainty(f, f.exact, PROBES) for f in found])
        laplace = torch.stack([uncertainty(f, f.laplace, PROBES) for f in found])
        rows["laplace"].append(sum(distance(f.exact, f.laplace) for f in found) / datasets)
        rows["density"].append(
            sum(float((f.exact - f.laplace).abs().max()) / f.cell() for f in found) / datasets
        )
        rows["gap"].append(float(((laplace - exact).abs() / exact).mean()))
        rows["level"].append(float(exact.mean()))
        rows["rank"].append(min(rank_agreement(a, b) for a, b in zip(laplace, exact, strict=True)))
    return rows


def isotropic(
    sizes: tuple[int, ...] = SIZES, view: Tensor = AS_GIVEN, seed: int = 0, draws: int = 300
) -> dict[str, list[float]]:
    """The best that N(θ*, σ²I) can do at each size: its total variation, its σ, and how it ranks
    the probes by U.

    `rank` is Spearman's correlation between the exact U and `perturb-theta` at that σ;
    `rank_laplace` is the same for noise of covariance -H⁻¹. `place` is where the middle of the data
    comes in the order by exact U, from the lowest, and `place_equal` in that by `perturb-theta`.
    """
    rows: dict[str, list[float]] = {
        key: [] for key in ("distance", "sigma", "rank", "rank_laplace", "place", "place_equal")
    }
    middle = int((PROBES[:, 1] == 2.5).nonzero())
    for size in sizes:
        found = fitted(
            size, seed, view=view, span=18, side=241
        )  # the widest of these Gaussians reaches three times as far
        narrow, wide = torch.linalg.svdvals(found.root).flip(0).tolist()
        sigmas = torch.linspace(math.log(narrow), math.log(wide), 15).exp().tolist()
        tv, sigma = min((distance(found.exact, found.isotropic(s)), s) for s in sigmas)
        probes = PROBES @ view
        exact = uncertainty(found, found.exact, probes)
        rows["distance"].append(tv)
        rows["sigma"].append(sigma)
        equal = by_perturbation(found, probes, sigma, draws)
        rows["rank"].append(rank_agreement(equal, exact))
        rows["place"].append(1 + int((exact < exact[middle]).sum()))
        rows["place_equal"].append(1 + int((equal < equal[middle]).sum()))
        rows["rank_laplace"].append(
            rank_agreement(by_perturbation(found, probes, None, draws), exact)
        )
    return rows


class Whitened(nn.Module):
    """The regression at θ* + A w, with w = 0 its only weights: noise of σ = 1 on w is a draw from
    N(θ*, A Aᵀ).
    """

    mode: Tensor
    root: Tensor

    def __init__(self, mode: Tensor, root: Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(len(mode), dtype=torch.double))
        self.register_buffer("mode", mode)
        self.register_buffer("root", root)

    def forward(self, features: Tensor) -> Tensor:
        """Two logits, of which the first is 0."""
        z = features @ (self.mode + self.root @ self.w)
        return torch.stack([torch.zeros_like(z), z], -1)


def by_perturbation(found: Posterior, probes: Tensor, sigma: float | None, draws: int) -> Tensor:
    """U at the probes by `perturb-theta`: under N(θ*, -H⁻¹), or under N(θ*, σ²I) if σ is given."""
    root = found.root if sigma is None else sigma * torch.eye(len(found.mode), dtype=torch.double)
    return qualms.score(Whitened(found.mode, root), probes, PerturbTheta(1.0, draws))


def rank_agreement(a: Tensor, b: Tensor) -> float:
    """Spearman's correlation."""
    ranks = torch.stack([a.argsort().argsort(), b.argsort().argsort()]).double()
    return float(torch.corrcoef(ranks)[0, 1])


def separable(sizes: tuple[int, ...] = SIZES, prior_sd: float = 10.0) -> dict[str, list[float]]:
    """One weight, inputs ±1 and ±2, every label the sign of its input: without the prior the mode
    is at infinity.
    """
    features = torch.tensor([[-2.0], [-1.0], [1.0], [2.0]], dtype=torch.double)
    rows: dict[str, list[float]] = {"laplace": [], "mode": [], "ratio": []}
    for size in sizes:
        trials = torch.full((4,), size / 4, dtype=torch.double)
        found = posterior(
            features, trials * (features[:, 0] > 0), trials, prior_sd, span=40, side=8001
        )
        probe = torch.tensor([[0.1]], dtype=torch.double)
        exact, laplace = (uncertainty(found, d, probe) for d in (found.exact, found.laplace))
        rows["laplace"].append(distance(found.exact, found.laplace))
        rows["mode"].append(float(found.mode))
        rows["ratio"].append(float(laplace / exact))
    return rows


def growing_dimension(
    power: float, dimensions: tuple[int, ...] = (4, 16, 64, 256)
) -> dict[str, list[float]]:
    """d weights and n = 32 dᵖ labels, n/d on each of the one-hot inputs: the posterior factorizes
    and d is no obstacle.

    `hellinger` is the distance between the posterior and its Laplace Gaussian, from 1 - H² = (1 -
    H₁²)ᵈ, exactly; it bounds the total variation on both sides, H² ≤ TV ≤ H sqrt(2 - H²). `gap` is
    the relative error of U, at any input.
    """
    one = torch.ones(1, 1, dtype=torch.double)
    rows: dict[str, list[float]] = {"size": [], "hellinger": [], "gap": []}
    for d in dimensions:
        trials = torch.tensor([round(32 * d ** (power - 1))], dtype=torch.double)
        found = posterior(one, (0.75 * trials).round(), trials, prior_sd=10.0, span=12, side=4001)
        affinity = float((found.exact * found.laplace).sqrt().sum())
        exact, laplace = (
            uncertainty(found, density, one) for density in (found.exact, found.laplace)
        )
        rows["size"].append(float(trials) * d)
        rows["hellinger"].append(math.sqrt(max(0.0, 1 - affinity**d)))
        rows["gap"].append(float((laplace - exact).abs() / exact))
    return rows


def misspecified(sizes: tuple[int, ...] = SIZES, datasets: int = 6) -> dict[str, list[float]]:
    """Labels that are mostly 1 in the middle of the inputs and mostly 0 on both sides, which no
    such model can say.

    `error` is how far the model's probability is from the truth at x = 2.5, `level` what U says
    about it there.
    """
    chance = torch.where((FEATURES[:, 1] - 2.5).abs() < 0.5, 0.9, 0.1).double()
    middle = torch.tensor([[1.0, 2.5]], dtype=torch.double)
    rows: dict[str, list[float]] = {"laplace": [], "error": [], "level": []}
    for size in sizes:
        found = [fitted(size, seed, chance) for seed in range(datasets)]
        rows["laplace"].append(sum(distance(f.exact, f.laplace) for f in found) / datasets)
        rows["error"].append(
            sum(0.9 - float((middle @ f.mode).sigmoid()) for f in found) / datasets
        )
        rows["level"].append(sum(float(uncertainty(f, f.exact, middle)) for f in found) / datasets)
    return rows
