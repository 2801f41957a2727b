"""Proposition 4: E_Δθ KL( p(θ) ‖ p(θ + Δθ) ) ≤ ExGrad(x) · E‖Δθ‖ for small Δθ.

Its first-order term is 0 for every network, because Σ_c p_c ∂ log p_c / ∂θ = 0. What is left is of
second order: for Δθ ~ N(0, σ²I) the divergence is σ²/2 · T(x) + O(σ⁴), in both directions, with the
trace of the Fisher information T = Σ_c p_c ‖∂ log p_c / ∂θ‖². And T lies between two scores:
ExGrad² ≤ T ≤ REGrad² ≤ C · T.
"""

import math

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import functional_call

import qualms
from qualms.methods.perturb_model import PerturbTheta
from qualms.random import generator

SIGMAS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 10.0)


def digits() -> tuple[Tensor, Tensor]:
    """The 8x8 digits of scikit-learn, from 0 to 1."""
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.double).reshape(-1, 1, 8, 8) / 16, torch.tensor(labels)


def networks(seed: int = 0) -> dict[str, nn.Module]:
    """Four kinds for ten classes of digits, untrained."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return {
            "softmax regression": nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).double(),
            "ReLU network": nn.Sequential(
                nn.Flatten(),
                nn.Linear(64, 32),
                nn.ReLU(),
                nn.Linear(32, 32),
                nn.ReLU(),
                nn.Linear(32, 10),
            ).double(),
            "tanh network": nn.Sequential(
                nn.Flatten(),
                nn.Linear(64, 32),
                nn.Tanh(),
                nn.Linear(32, 32),
                nn.Tanh(),
                nn.Linear(32, 10),
            ).double(),
            "CNN": nn.Sequential(
                nn.Conv2d(1, 8, 3),
                nn.ReLU(),
                nn.Conv2d(8, 8, 3),
                nn.ReLU(),
                nn.Flatten(),
                nn.Linear(128, 10),
            ).double(),
        }


def trained(seed: int = 0, steps: int = 150) -> tuple[dict[str, nn.Module], Tensor]:
    """Each network after some steps of Adam on 500 digits, and 40 digits that it has not seen."""
    (x, y), models = digits(), networks(seed)
    for model in models.values():
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(steps):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[:500]), y[:500]).backward()
            optimizer.step()
    return models, x[1000:1040]


def mean_length(parameters: int, sigma: float) -> float:
    """E‖Δθ‖ for Δθ ~ N(0, σ²I): σ √2 Γ((d+1)/2) / Γ(d/2)."""
    return (
        sigma
        * math.sqrt(2)
        * math.exp(math.lgamma((parameters + 1) / 2) - math.lgamma(parameters / 2))
    )


def reverse_divergence(
    model: nn.Module, x: Tensor, sigma: float, draws: int, seed: int = 0
) -> Tensor:
    """E_Δθ KL( p(θ) ‖ p(θ + Δθ) ), the direction of the proposition; the same directions of Δθ for
    every σ.
    """
    log_p = model(x).log_softmax(-1).detach()
    total = torch.zeros(len(x), dtype=torch.double)
    for draw in range(draws):
        noise = generator(seed, draw)
        moved = {
            name: p.detach() + sigma * torch.randn(p.shape, generator=noise, dtype=torch.double)
            for name, p in model.named_parameters()
        }
        with torch.no_grad():
            log_q = functional_call(model, moved, (x,)).log_softmax(-1)
        total += (log_p.exp() * (log_p - log_q)).sum(-1)
    return total / draws


def gradient_scores(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """ExGrad, REGrad and the trace T of the Fisher information, from one set of class-gradient
    norms.
    """
    found = qualms.class_gradient_norms(model, x)
    squares = found.norms.square().sum(-1)  # over all weights
    return {
        "exgrad": (found.probs * squares.sqrt()).sum(-1),
        "regrad": (found.probs * squares).sqrt().sum(-1),
        "trace": (found.probs * squares).sum(-1),
    }


def first_order(model: nn.Module, x: Tensor) -> float:
    """The largest ‖Σ_c p_c ∂ log p_c / ∂θ‖ over five inputs, relative to UNGrad: what the
    first-order term comes to.
    """
    left = []
    for one in x[:5].split(1):
        log_p = model(one).log_softmax(-1)
        gradient = torch.autograd.grad(
            (log_p.exp().detach() * log_p).sum(), list(model.parameters())
        )
        left.append(torch.cat([g.flatten() for g in gradient]).norm())
    return float((torch.stack(left) / qualms.score(model, x[:5], "ungrad")).max())


def sweep(
    model: nn.Module, x: Tensor, sigmas: tuple[float, ...] = SIGMAS, draws: int = 100
) -> dict[str, list[float]]:
    """At each σ, over the inputs: how the divergence compares with the bound and with its
    second-order value.

    `share` is the median of divergence / bound, `worst` its maximum, `broken` the share of inputs
    above the bound; `second` is the median of divergence / (σ²T/2), and `forward` the same for the
    other direction of KL, which is what `perturb-theta` computes.
    """
    scores = gradient_scores(model, x)
    size = sum(p.numel() for p in model.parameters())
    rows: dict[str, list[float]] = {
        k: [] for k in ("share", "worst", "broken", "second", "forward")
    }
    for sigma in sigmas:
        kl = reverse_divergence(model, x, sigma, draws)
        against = kl / (scores["exgrad"] * mean_length(size, sigma))
        second = sigma**2 / 2 * scores["trace"]
        rows["share"].append(float(against.median()))
        rows["worst"].append(float(against.max()))
        rows["broken"].append(float((against > 1).double().mean()))
        rows["second"].append(float((kl / second).median()))
        rows["forward"].append(
            float((qualms.score(model, x, PerturbTheta(sigma, draws)) / second).median())
        )
    return rows


def sandwich(model: nn.Module, x: Tensor) -> dict[str, float]:
    """The extremes over inputs of ExGrad² / T, at most 1, and of REGrad² / T, between 1 and the
    number of classes.
    """
    scores = gradient_scores(model, x)
    low, high = (
        scores["exgrad"].square() / scores["trace"],
        scores["regrad"].square() / scores["trace"],
    )
    return {
        "exgrad_least": float(low.min()),
        "exgrad_most": float(low.max()),
        "regrad_least": float(high.min()),
        "regrad_most": float(high.max()),
    }


def ranking(model: nn.Module, x: Tensor, sigma: float, draws: int = 100) -> dict[str, float]:
    """Spearman's correlation of `perturb-theta` with the trace, ExGrad, REGrad and entropy over the
    inputs.
    """
    perturbed = qualms.score(model, x, PerturbTheta(sigma, draws))
    others = gradient_scores(model, x) | {"entropy": qualms.score(model, x, "entropy")}
    places = perturbed.argsort().argsort().double()
    return {
        name: float(
            torch.corrcoef(torch.stack([places, values.argsort().argsort().double()]))[0, 1]
        )
        for name, values in others.items()
    }
