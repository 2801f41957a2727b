"""Ablation: what each part of REGrad* adds, and how much its two parameters matter. Both are rows
of `ood`.
"""

import math

from qualms.gradients.smoothing import Smoothing
from qualms.methods.exgrad import ExGrad
from qualms.methods.method import Method
from qualms.methods.regrad import REGrad
from qualms.methods.ungrad import UNGrad
from qualms.tasks.paper import LAMBDA, SIGMA

LAMBDAS = (0.0, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, math.inf)
SIGMAS = (0.01, 0.015, 0.02, 0.025, 0.03, 0.05)
LAST_LAYER = 50.0  # exp(-50) of the layer before the last is far below rounding: λ → ∞


def components(dataset: str, smooth: Smoothing | None = None) -> dict[str, Method]:
    """Each score plain, with weighted layers, and with smoothed gradients as well (tables 4 and 6)."""
    lam, smooth = LAMBDA.get(dataset, 0.3), smooth or Smoothing(SIGMA)
    rows: dict[str, Method] = {}
    for name, kind in (("UNGrad", UNGrad), ("ExGrad", ExGrad), ("REGrad", REGrad)):
        rows[name] = kind()
        rows[f"{name}+layers"] = kind(layers=lam)
        rows["REGrad*" if name == "REGrad" else f"{name}+layers+smooth"] = kind(
            layers=lam, smooth=smooth
        )
    return rows


def lambda_sweep(lambdas: tuple[float, ...] = LAMBDAS) -> dict[str, Method]:
    """REGrad+layers(λ); the paper's limit λ → 0 is the plain norm, ours at λ = 0 the sum of the
    layers' norms.
    """
    rows: dict[str, Method] = {"λ → 0": REGrad()}
    for lam in lambdas:
        rows["λ → ∞" if lam == math.inf else f"λ = {lam:g}"] = REGrad(layers=min(lam, LAST_LAYER))
    return rows


def sigma_sweep(
    dataset: str, sigmas: tuple[float, ...] = SIGMAS, smooth: Smoothing | None = None
) -> dict[str, Method]:
    """REGrad+layers+smooth(σ), σ in pixels scaled to [0, 1].

    λ is the dataset's; for SVHN 0.3, at which the paper's table 5 has its sweep, though its setting
    elsewhere is 0.2.
    """
    how, lam = smooth or Smoothing(SIGMA), 0.3 if dataset == "svhn" else LAMBDA.get(dataset, 0.3)
    return {
        f"σ = {s:g}": REGrad(layers=lam, smooth=Smoothing(s, how.draws, how.antithetic))
        for s in sigmas
    }
