"""Test the paper's propositions numerically: what holds, and where it stops holding.

    python examples/theory.py
    python examples/theory.py --plots docs/plots

Each proposition has a file in `examples/propositions`, whose functions return what is printed here.
All in float64, from fixed seeds, on small networks that are trained in the run; under a minute on
one core.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from propositions import bound, exchange, posterior, vanishing

Results = dict[str, Any]
Row = tuple[str, str, str]  # holds or stops, what, the numbers
HOLDS, STOPS = "holds", "stops"


def of_posterior() -> Results:
    """Proposition 1."""
    return {
        "growing": posterior.growing_data(),
        "isotropic": posterior.isotropic(),
        "standardized": posterior.isotropic(view=posterior.STANDARDIZED),
        "separable": posterior.separable(),
        "misspecified": posterior.misspecified(),
        "dimension": {power: posterior.growing_dimension(power) for power in (1, 2, 3)},
    }


def posterior_rows(r: Results) -> list[Row]:
    """What Proposition 1 comes to."""
    sizes, growing, iso = posterior.SIZES, r["growing"], r["isotropic"]
    gaps = {name: posterior.slope(sizes, growing[name]) for name in ("laplace", "density", "gap")}
    by_power = {power: series(rows["hellinger"]) for power, rows in r["dimension"].items()}
    linear = r["dimension"][1]["gap"]
    return [
        ("", "labels n", series(sizes)),
        (
            HOLDS,
            f"TV(posterior, Laplace) falls as n^{gaps['laplace']:.2f}",
            series(growing["laplace"]),
        ),
        (
            HOLDS,
            f"relative error of U under Laplace falls as n^{gaps['gap']:.2f}",
            series(growing["gap"]),
        ),
        (
            HOLDS,
            "rank correlation of that U with exact U, least of six datasets",
            series(growing["rank"]),
        ),
        (
            STOPS,
            f"sup |difference of the densities| grows as n^{gaps['density']:.2f}",
            series(growing["density"]),
        ),
        (STOPS, "TV(posterior, N(θ*, σ²I)) at the best σ stays", series(iso["distance"])),
        ("", "... that σ", series(iso["sigma"])),
        (STOPS, "rank correlation of perturb-theta at that σ with exact U", series(iso["rank"])),
        ("", "... of perturb-theta made to draw from N(θ*, -H⁻¹)", series(iso["rank_laplace"])),
        ("", "... place of x = 2.5, the data's middle, of 21 by exact U", series(iso["place"])),
        (STOPS, "... by perturb-theta", series(iso["place_equal"])),
        (
            STOPS,
            "the same with standardized inputs: TV stays",
            series(r["standardized"]["distance"]),
        ),
        ("", "... rank correlation of perturb-theta", series(r["standardized"]["rank"])),
        (
            STOPS,
            "separable labels: TV(posterior, Laplace) stays",
            series(r["separable"]["laplace"]),
        ),
        ("", "... θ* moves away", series(r["separable"]["mode"])),
        ("", "... U under Laplace / exact U", series(r["separable"]["ratio"])),
        (
            HOLDS,
            "wrong model: TV(posterior, Laplace) falls all the same",
            series(r["misspecified"]["laplace"]),
        ),
        (STOPS, "... and U goes to 0 where", series(r["misspecified"]["level"])),
        ("", "... the probability is wrong by", series(r["misspecified"]["error"])),
        (HOLDS, "n = 32 d³, d = 4, 16, 64, 256: Hellinger distance falls", by_power[3]),
        (STOPS, "n = 32 d²: it stays", by_power[2]),
        (STOPS, "n = 32 d: it grows", by_power[1]),
        (HOLDS, "... but the relative error of U does not", series(linear)),
    ]


def of_exchange() -> Results:
    """Proposition 2."""
    shapes = {
        "20-64-5": (20, 64, 5),
        "4-64-5": (4, 64, 5),
        "3-64-5": (3, 64, 5),
        "20-2-5": (20, 2, 5),
    }
    outputs = {
        name: exchange.same_output(exchange.network(*shape), exchange.normal(3)(shape[0]))
        for name, shape in shapes.items()
    }
    outputs["20-64-5 saturated"] = exchange.same_output(
        exchange.network(20, 64, 5), 1e3 * exchange.normal(3)(20)
    )
    widths = (5, 10, 20, 25, 40, 80, 160)
    return {
        "weights": {zeros: exchange.weights_for_input(20, 50, 1.0, zeros) for zeros in (0.0, 0.5)},
        "widths": widths,
        "missed": [exchange.input_for_weights(20, width) for width in widths],
        "convolution": exchange.convolution(),
        "cnn_rank": exchange.first_layer_rank(
            bound.networks()["CNN"], bound.digits()[0][:20], "0.*"
        ),
        "outputs": outputs,
        "expectations": {decades: exchange.expectations(decades) for decades in (0, 1)},
    }


def exchange_rows(r: Results) -> list[Row]:
    """What Proposition 2 comes to."""
    dense, sparse = r["weights"][0.0], r["weights"][0.5]
    rows = [
        (HOLDS, "given Δx: residual of ΔW = W Δx xᵀ/‖x‖²", f"{dense['residual']:.0e}"),
        (
            STOPS,
            "... of the elementwise condition where half of x is 0",
            f"{sparse['elementwise']:.2f}",
        ),
        ("", "given ΔW: width of the first layer, 20 inputs", series(r["widths"])),
        (STOPS, "... share of ΔW x that no Δx gives", series(r["missed"])),
        (
            STOPS,
            "3x3 convolution, 8 channels: given Δx, missed",
            f"{r['convolution']['weights_for_input']:.2f}",
        ),
        (STOPS, "... given Δkernel, missed", f"{r['convolution']['input_for_weights']:.2f}"),
        (HOLDS, "... rank of ∂ log p / ∂(first convolution), 10 classes", str(r["cnn_rank"])),
    ]
    for name, found in r["outputs"].items():
        verdict = HOLDS if found["residual"] < 1e-9 else STOPS
        numbers = f"residual {found['residual']:.2g}, rank {found['rank']:.0f}, ‖Δx‖/‖Δθ‖ {found['ratio']:.2g}"
        rows.append((verdict, f"same output of {name} for Δθ on all layers", numbers))
    for decades, found in r["expectations"].items():
        rows += [
            (
                HOLDS,
                f"E KL, matched Δx = W⁺ΔW x, ‖x‖ over {decades} decades",
                f"difference {found['matched']:.0e}",
            ),
            (
                STOPS,
                "... Δx ~ N(0, s²I)",
                f"ratios vary {found['spread']:.1f}-fold, rank {found['rank']:.2f}",
            ),
        ]
    return rows


def of_vanishing() -> Results:
    """Proposition 3."""
    return {
        "training": vanishing.training_goes_on(),
        "ambiguous": vanishing.ambiguous(),
        "small": vanishing.too_small(),
        "wrong": vanishing.wrong_labels(),
        "far": vanishing.far_away(),
    }


def vanishing_rows(r: Results) -> list[Row]:
    """What Proposition 3 comes to."""
    training, unsure, wrong, far = r["training"], r["ambiguous"], r["wrong"], r["far"]
    return [
        ("", "training steps", series(vanishing.STEPS)),
        (HOLDS, "‖∂ log p_y / ∂θ‖ at fresh points goes toward 0", series(training["label"])),
        (HOLDS, "... 0.2 away from them", series(training["near"])),
        (HOLDS, "ExGrad", series(training["exgrad"])),
        (HOLDS, "REGrad", series(training["regrad"])),
        (STOPS, "UNGrad grows", series(training["ungrad"])),
        ("", "‖θ‖ grows", series(training["weights"])),
        (
            "",
            "30 % of a cluster's labels another class; labels n",
            series(vanishing.AMBIGUOUS_SIZES),
        ),
        (HOLDS, "... the mean gradient over the training data falls", series(unsure["mean"])),
        (HOLDS, "... p nears the true (0.7, 0.3, 0); largest error", series(unsure["error"])),
        (STOPS, "... ‖∂ log p_y / ∂θ‖ there stays", series(unsure["label"])),
        (STOPS, "... ExGrad there stays", series(unsure["exgrad"])),
        ("", "... its lower bound Σ_c p_c ‖e_c - p‖", series(unsure["least"])),
        ("", "... ExGrad where the labels are sure", series(unsure["clean"])),
        (STOPS, "too small a model: mean gradient, and a single one", series(r["small"].values())),
        (
            STOPS,
            "memorized wrong labels: gradient of wrong, of true label",
            series([wrong["wrong"], wrong["true"]]),
        ),
        (
            STOPS,
            "... 1 away from wrong, from right ones",
            series([wrong["near_wrong"], wrong["near_right"]]),
        ),
        ("", "distance from the data's center, in cluster distances", series(vanishing.DISTANCES)),
        (STOPS, f"ExGrad there (known points: {far['known'][0]:.1e})", series(far["exgrad"])),
        (STOPS, "... share of directions below the known points", series(far["below"])),
    ]


def of_bound() -> Results:
    """Proposition 4."""
    models, x = bound.trained()
    return {
        name: {
            "first": bound.first_order(model, x),
            "sweep": bound.sweep(model, x),
            "sandwich": bound.sandwich(model, x),
            "small": bound.ranking(model, x, 0.003),
            "large": bound.ranking(model, x, 0.3),
        }
        for name, model in models.items()
    }


def bound_rows(r: Results) -> list[Row]:
    """What Proposition 4 comes to."""
    rows: list[Row] = [("", "σ", series(bound.SIGMAS))]
    for name, found in r.items():
        sweep, between = found["sweep"], found["sandwich"]
        below = f"{between['exgrad_least']:.1g} to {between['exgrad_most']:.2f}"
        above = f"{between['regrad_least']:.2f} to {between['regrad_most']:.2f}"
        rows += [
            (HOLDS, f"{name}: first-order term / UNGrad", f"{found['first']:.0e}"),
            (HOLDS, "... divergence / bound, median over inputs", series(sweep["share"])),
            (STOPS, "... share of inputs above the bound", series(sweep["broken"])),
            (HOLDS, "... divergence / (σ²T/2), 1 as σ → 0", series(sweep["second"])),
            (HOLDS, "... perturb-theta / (σ²T/2), 1 as σ → 0", series(sweep["forward"])),
            (HOLDS, "... ExGrad²/T, and REGrad²/T, over inputs", f"{below}, and {above}"),
            (
                HOLDS,
                "... rank of perturb-theta(0.003) with T, ExGrad, REGrad",
                ranks(found["small"]),
            ),
            (STOPS, "... of perturb-theta(0.3)", ranks(found["large"])),
        ]
    return rows


def ranks(found: dict[str, float]) -> str:
    """Three rank correlations."""
    return "  ".join(f"{found[name]:.2f}" for name in ("trace", "exgrad", "regrad"))


def series(values: Any) -> str:
    """Numbers in a row, three digits each."""
    return "  ".join(str(v) if isinstance(v, int) else f"{v:.3g}" for v in values)


PARTS = {
    "posterior": (
        "1. Gaussian noise on the weights approximates the posterior",
        of_posterior,
        posterior_rows,
    ),
    "exchange": (
        "2. Changes of weights and of inputs can be exchanged",
        of_exchange,
        exchange_rows,
    ),
    "vanishing": ("3. Gradients vanish where the model knows", of_vanishing, vanishing_rows),
    "bound": ("4. Gradient norms bound what perturbations find", of_bound, bound_rows),
}


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, and draw if asked."""
    parser = argparse.ArgumentParser(description="The paper's propositions, put to numbers.")
    parser.add_argument("--plots", type=Path, help="a folder to write the plots to")
    folder = parser.parse_args(arguments).plots
    torch.set_num_threads(1)  # the matrices are small: threads would only wait for each other
    results = {}
    for name, (title, measure, rows) in PARTS.items():
        results[name] = measure()
        print(f"\nProposition {title}\n")
        for verdict, what, numbers in rows(results[name]):
            print(f"{verdict:6} {what:66} {numbers}")
    if folder:
        from propositions.plots import draw  # matplotlib is needed for this alone

        draw(results, folder)


if __name__ == "__main__":
    main()
