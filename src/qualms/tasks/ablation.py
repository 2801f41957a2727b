"""Ablation of REGrad*: what each of its parts adds, and how much its two parameters matter.

These functions return methods, which `qualms.tasks.ood` compares.
"""

import math

from qualms.gradients.settings import Smoothing
from qualms.methods.gradients import ExGrad, REGrad, UNGrad
from qualms.methods.method import Method
from qualms.tasks.paper_numbers import DEFAULT_LAMBDA, LAMBDA, SIGMA

LAMBDAS = (0.0, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, math.inf)
SIGMAS = (0.01, 0.015, 0.02, 0.025, 0.03, 0.05)
# In place of λ → ∞: the layer before the last has the weight exp(-50), far below rounding.
MAX_LAMBDA = 50.0


def components(dataset: str, smooth: Smoothing | None = None) -> dict[str, Method]:
    """Return UNGrad, ExGrad and REGrad, each plain, with weighted layers, and also smoothed.

    These are the rows of tables 4 and 6 of the paper.

    Args:
        dataset: The name of the dataset, which decides λ as in the paper.
        smooth: The smoothing; by default with the paper's σ.

    Returns:
        The methods by names such as `ExGrad`, `ExGrad+layers` and `ExGrad+layers+smooth`; the last
        variant of REGrad is called `REGrad*`, as in the paper.
    """
    lam = LAMBDA.get(dataset, DEFAULT_LAMBDA)
    smooth = smooth or Smoothing(SIGMA)
    methods: dict[str, Method] = {}
    for method_class in (UNGrad, ExGrad, REGrad):
        name = method_class.__name__
        smoothed_name = "REGrad*" if method_class is REGrad else f"{name}+layers+smooth"
        methods[name] = method_class()
        methods[f"{name}+layers"] = method_class(layers=lam)
        methods[smoothed_name] = method_class(layers=lam, smooth=smooth)
    return methods


def lambda_sweep(lambdas: tuple[float, ...] = LAMBDAS) -> dict[str, Method]:
    """Return REGrad+layers(λ) for several λ, by names such as `λ = 0.3`.

    λ is how fast the weight of a layer's norm falls with its distance from the output. REGrad
    without `layers`, one norm of all layers together, has the paper's name `λ → 0`, although it is
    not the limit of the others: at λ = 0 the norms of the layers are added up.
    """
    methods: dict[str, Method] = {"λ → 0": REGrad()}
    for lam in lambdas:
        name = "λ → ∞" if lam == math.inf else f"λ = {lam:g}"
        # At MAX_LAMBDA only the last layer counts, as for infinity, which REGrad does not take.
        methods[name] = REGrad(layers=min(lam, MAX_LAMBDA))
    return methods


def sigma_sweep(
    dataset: str, sigmas: tuple[float, ...] = SIGMAS, smooth: Smoothing | None = None
) -> dict[str, Method]:
    """Return REGrad+layers+smooth(σ) for several σ, by names such as `σ = 0.02`.

    Args:
        dataset: The name of the dataset, which decides λ as in the paper. For SVHN λ is 0.3, as in
            the paper's table 5; its other tables have 0.2.
        sigmas: Noise levels, in pixels scaled to [0, 1].
        smooth: The smoothing to vary; all but its σ is kept.
    """
    settings = smooth or Smoothing(SIGMA)
    lam = 0.3 if dataset == "svhn" else LAMBDA.get(dataset, DEFAULT_LAMBDA)
    methods: dict[str, Method] = {}
    for sigma in sigmas:
        smoothing = Smoothing(sigma, settings.draws, settings.antithetic)
        methods[f"σ = {sigma:g}"] = REGrad(layers=lam, smooth=smoothing)
    return methods
