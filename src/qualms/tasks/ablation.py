"""Ablation of REGrad*: what each of its parts adds, and how much its two parameters matter.

These functions return methods, which `qualms.tasks.ood` compares.
"""

import math

from qualms.gradients.settings import Smoothing
from qualms.methods.gradients import ExGrad, REGrad, UNGrad
from qualms.methods.method import Method
from qualms.tasks.paper_numbers import LAMBDA, SIGMA

LAMBDAS = (0.0, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, math.inf)
SIGMAS = (0.01, 0.015, 0.02, 0.025, 0.03, 0.05)
# In place of λ → ∞: exp(-50), the weight of the layer before the last, is far below rounding.
LAST_LAYER = 50.0


def components(dataset: str, smooth: Smoothing | None = None) -> dict[str, Method]:
    """Return UNGrad, ExGrad and REGrad: plain, with weighted layers, and with smoothing as well.

    The names are such as `ExGrad`, `ExGrad+layers` and `ExGrad+layers+smooth`, but `REGrad*` for
    REGrad with both. These are the rows of tables 4 and 6 of the paper.

    Args:
        dataset: The name of the dataset, which decides λ as in the paper.
        smooth: The smoothing; by default with the paper's σ.
    """
    lam, smooth = LAMBDA.get(dataset, 0.3), smooth or Smoothing(SIGMA)
    rows: dict[str, Method] = {}
    for name, kind in (("UNGrad", UNGrad), ("ExGrad", ExGrad), ("REGrad", REGrad)):
        rows[name] = kind()
        rows[f"{name}+layers"] = kind(layers=lam)
        full = "REGrad*" if name == "REGrad" else f"{name}+layers+smooth"
        rows[full] = kind(layers=lam, smooth=smooth)
    return rows


def lambda_sweep(lambdas: tuple[float, ...] = LAMBDAS) -> dict[str, Method]:
    """Return REGrad+layers(λ) for several λ, by names such as `λ = 0.3`.

    The row `λ → 0` is REGrad without `layers`, as in the paper: the norm over all layers together.
    The row `λ = 0` is the sum of the layers' norms instead.
    """
    rows: dict[str, Method] = {"λ → 0": REGrad()}
    for lam in lambdas:
        name = "λ → ∞" if lam == math.inf else f"λ = {lam:g}"
        rows[name] = REGrad(layers=min(lam, LAST_LAYER))
    return rows


def sigma_sweep(
    dataset: str, sigmas: tuple[float, ...] = SIGMAS, smooth: Smoothing | None = None
) -> dict[str, Method]:
    """Return REGrad+layers+smooth(σ) for several σ, by names such as `σ = 0.02`.

    Args:
        dataset: The name of the dataset, which decides λ as in the paper. For SVHN λ is 0.3, as in
            the paper's table 5; its other tables have 0.2.
        sigmas: Noise levels, in pixels scaled to [0, 1].
        smooth: The smoothing whose number of draws is used; its σ is replaced.
    """
    base = smooth or Smoothing(SIGMA)
    lam = 0.3 if dataset == "svhn" else LAMBDA.get(dataset, 0.3)
    rows: dict[str, Method] = {}
    for sigma in sigmas:
        noise = Smoothing(sigma, base.draws, base.antithetic)
        rows[f"σ = {sigma:g}"] = REGrad(layers=lam, smooth=noise)
    return rows
