"""One plot for each proposition, from the numbers that `examples/theory.py` prints."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from propositions import bound, posterior, vanishing


def draw(results: dict[str, Any], folder: Path) -> None:
    """Write `theory-*.svg` to the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    style: dict[Any, Any] = {
        "svg.hashsalt": "qualms",
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    with plt.rc_context(style):
        for name, plot in PLOTS.items():
            figure, axes = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
            plot(results[name], *axes)
            for each in axes:
                each.grid(alpha=0.3)
                each.legend(frameon=False, fontsize=8)
            figure.savefig(folder / f"theory-{name}.svg", metadata={"Date": None})
            plt.close(figure)


def of_posterior(r: dict[str, Any], left: Any, right: Any) -> None:
    """Distances to the posterior as data grows; ranks of the inputs by U."""
    sizes = posterior.SIZES
    left.loglog(sizes, r["isotropic"]["distance"], "-s", color="C1", label="N(θ*, σ²I), best σ")
    left.loglog(
        sizes, r["separable"]["laplace"], "-^", color="C3", label="Laplace, separable labels"
    )
    left.loglog(
        sizes,
        r["standardized"]["distance"],
        "--s",
        color="C2",
        label="N(θ*, σ²I), standardized inputs",
    )
    left.loglog(sizes, r["growing"]["laplace"], "-o", color="C0", label="Laplace")
    left.loglog(sizes, [0.5 / n**0.5 for n in sizes], ":", color="gray", label="1 / (2 √n)")
    left.set(xlabel="labels n", ylabel="total variation to the posterior")
    right.semilogx(sizes, r["isotropic"]["rank_laplace"], "-o", color="C0", label="covariance -H⁻¹")
    right.semilogx(
        sizes, r["standardized"]["rank"], "--s", color="C2", label="σ²I, standardized inputs"
    )
    right.semilogx(sizes, r["isotropic"]["rank"], "-s", color="C1", label="σ²I")
    right.set(
        xlabel="labels n", ylabel="rank correlation of perturb-theta with U", ylim=(-1.05, 1.05)
    )


def of_exchange(r: dict[str, Any], left: Any, right: Any) -> None:
    """What no change of the input gives, by width; by outputs."""
    widths = r["widths"]
    left.plot(
        widths,
        [max(0.0, 1 - 20 / w) ** 0.5 for w in widths],
        ":",
        color="gray",
        label="sqrt(1 - 20 / width)",
    )
    left.plot(widths, r["missed"], "o", label="measured")
    left.axvline(20, color="black", linewidth=0.8, label="width = inputs")
    left.set(xlabel="width of the first layer, 20 inputs", ylabel="share of ΔW x that no Δx gives")
    names = list(r["outputs"])
    right.barh(
        names[::-1],
        [max(r["outputs"][n]["residual"], 1e-16) for n in names[::-1]],
        label="residual",
    )
    right.set(xscale="log", xlim=(1e-16, 2), xlabel="part of the change of output that no Δx gives")


def of_vanishing(r: dict[str, Any], left: Any, right: Any) -> None:
    """Scores at known points as training goes on, and scores of inputs ever further away."""
    for name, marker in (("exgrad", "o"), ("regrad", "s"), ("ungrad", "^")):
        left.loglog(vanishing.STEPS, r["training"][name], f"-{marker}", label=name)
    left.set(xlabel="training steps", ylabel="median score at fresh known points")
    shown = [i for i, value in enumerate(r["far"]["exgrad"]) if value > 1e-60]
    for name, marker in (("exgrad", "o"), ("regrad", "s")):
        right.loglog(
            [vanishing.DISTANCES[i] for i in shown],
            [r["far"][name][i] for i in shown],
            f"-{marker}",
            label=name,
        )
    right.axhline(r["far"]["known"][0], color="gray", linestyle=":", label="exgrad at known points")
    right.set(xlabel="distance, in those of the clusters", ylabel="median score far away")


def of_bound(r: dict[str, Any], left: Any, right: Any) -> None:
    """The divergence against the bound, and against its second-order value."""
    for name, found in r.items():
        left.loglog(bound.SIGMAS, found["sweep"]["share"], "-o", label=name)
        right.loglog(bound.SIGMAS, found["sweep"]["second"], "-o", label=name)
    left.axhline(1, color="black", linewidth=0.8, label="the bound")
    left.set(xlabel="σ", ylabel="divergence / (ExGrad · E‖Δθ‖)")
    right.axhline(1, color="black", linewidth=0.8, label="second order")
    right.set(xlabel="σ", ylabel="divergence / (σ²T / 2)")


PLOTS = {
    "posterior": of_posterior,
    "exchange": of_exchange,
    "vanishing": of_vanishing,
    "bound": of_bound,
}
