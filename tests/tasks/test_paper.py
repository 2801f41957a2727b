"""The paper's settings and numbers are those of the paper."""

import pytest

from qualms.gradients.settings import Smoothing
from qualms.methods.registry import parse
from qualms.tasks.paper_numbers import (
    ACTIVE,
    LAMBDA,
    OOD,
    RAULC,
    RUNTIME,
    SWEEPS,
    VIT,
    comparison_methods,
    paper_methods,
    paper_row,
)
from qualms.tasks.presets import CPU, PAPER, PRESETS


def test_every_pair_has_every_row() -> None:
    assert list(OOD) == [
        "mnist→omniglot", "mnist→fashion-mnist", "cifar10→svhn", "cifar10→lsun",
        "svhn→cifar10", "svhn→cifar100", "cifar100→svhn", "cifar100→lsun",
    ]  # fmt: skip
    names = list(paper_methods("mnist"))
    for column in (*OOD.values(), *RAULC.values()):
        assert list(column) == names
    assert list(RUNTIME) == names


@pytest.mark.parametrize(
    ("number", "want"),
    [
        (OOD["mnist→omniglot"]["NEGrad"], (41.99, 43.49)),
        (OOD["cifar10→lsun"]["Inserted Dropout"], (88.18, 86.93)),
        (OOD["svhn→cifar10"]["LA"], (80.73, 87.46)),
        (OOD["cifar100→lsun"]["REGrad*"], (79.11, 74.39)),
        (RAULC["svhn"]["NEGrad"], -0.861),
        (RAULC["cifar100"]["Entropy"], 0.863),
        (ACTIVE["mnist"]["REGrad*"], (75.31, 1.808)),
        (ACTIVE["cifar100"]["LA"], (12.59, 4.505)),
        (VIT["cifar10→svhn"]["REGrad*"], (96.62, 95.69)),
        (SWEEPS["svhn→cifar10"]["λ = 0.35"], (90.80, 88.82)),
        (RUNTIME["REGrad*"] / RUNTIME["Entropy"], pytest.approx(24.9, abs=0.05)),
    ],
)
def test_numbers_stand_where_they_stand_in_the_paper(number: object, want: object) -> None:
    assert number == want


def test_numbers_that_tables_share_agree() -> None:
    for pair, rows in SWEEPS.items():
        dataset = pair.split("→")[0]
        assert rows["λ → 0"] == OOD[pair]["REGrad"]
        assert rows["σ = 0.02"] == OOD[pair]["REGrad*"]
        lam = (
            0.3 if dataset == "svhn" else LAMBDA[dataset]
        )  # table 5 speaks of 0.3, the appendix of 0.2
        assert rows[f"λ = {lam:g}"] == OOD[pair]["REGrad+layers"]


def test_settings_follow_the_dataset() -> None:
    many, few = paper_methods("cifar100"), paper_methods("svhn")
    assert many["Perturb x"] == parse("perturb-x(0.02)")
    assert few["Perturb x"] == parse("perturb-x(0.008)")
    assert many["Perturb θ"] == parse("perturb-theta(0.0003)")
    assert many["MC-AA"] == parse("mc-aa(0.0005)")
    assert many["REGrad*"] == parse("regrad+layers(0.4)+smooth(0.02)")
    assert few["REGrad+layers"] == parse("regrad+layers(0.2)")
    assert paper_methods("mnist", Smoothing(0.02, 100))["REGrad*"] == parse(
        "regrad+layers(0.3)+smooth(0.02,100)"
    )


@pytest.mark.parametrize("name", list(paper_methods("mnist")))
def test_a_method_is_found_among_the_papers_rows(name: str) -> None:
    assert paper_row(paper_methods("mnist")[name]) == name


@pytest.mark.parametrize("spec", ["exgrad+layers", "regrad+smooth", "ungrad+smooth", "energy"])
def test_what_is_not_in_the_paper_gets_no_number_of_it(spec: str) -> None:
    assert paper_row(parse(spec)) not in OOD["mnist→omniglot"]


def test_the_full_preset_is_the_papers_protocol() -> None:
    full = PRESETS["paper"]
    assert {s.seeds for s in (*full.setups.values(), *full.active.values())} == {(0, 1, 2)}
    assert (full.smooth.sigma, full.smooth.draws, full.smooth.antithetic) == (0.02, 100, False)
    assert {learning.smooth for learning in full.active.values()} == {full.smooth}
    assert full.draws == 100
    assert {name: (s.network, s.recipe.epochs) for name, s in full.setups.items()} == {
        "mnist": ("mnist-cnn", 30), "cifar10": ("resnet18", 100), "svhn": ("svhn-cnn", 50),
        "cifar100": ("resnet152", 120),
    }  # fmt: skip
    plans = {name: learning.plan for name, learning in full.active.items()}
    assert {name: (p.start, p.more, p.cycles, p.recipe.epochs) for name, p in plans.items()} == {
        "mnist": (20, 20, 10, 200), "cifar10": (500, 100, 10, 200), "svhn": (500, 100, 10, 200),
        "cifar100": (1000, 500, 10, 200),
    }  # fmt: skip
    assert all(s.images is None and s.train is None for s in full.setups.values())


def test_the_small_preset_keeps_the_papers_networks_for_digits_and_its_labels_for_active_learning() -> (
    None
):
    for dataset in ("mnist", "svhn"):
        assert CPU.setups[dataset].recipe == PAPER.setups[dataset].recipe
        assert CPU.setups[dataset].seeds == PAPER.setups[dataset].seeds
    assert {n: (a.plan.start, a.plan.more) for n, a in CPU.active.items()}.items() <= {
        n: (a.plan.start, a.plan.more) for n, a in PAPER.active.items()
    }.items()
    assert CPU.active["mnist"].plan.cycles == 10


def test_the_small_preset_tells_its_numbers() -> None:
    sizes = [str(CPU.setups[name].images) for name in ("mnist", "cifar10", "svhn", "cifar100")]
    assert (
        f"{', '.join(sizes[:3])} and {sizes[3]} test images of each dataset (for MNIST, CIFAR-10, SVHN"
        in CPU.cuts
    )
    assert f"{CPU.smooth.draws} antithetic draws instead of 100" in CPU.cuts
    assert f"{CPU.draws} draws instead of 100 for Perturb x" in CPU.cuts
    for dataset, name in (("mnist", "MNIST"), ("cifar10", "CIFAR-10")):
        assert f"{name} ({CPU.vit[dataset].recipe.epochs} epochs)" in CPU.cuts
    mnist, svhn = CPU.active["mnist"].plan, CPU.active["svhn"].plan
    assert CPU.active["mnist"].seeds == (0, 1)
    assert f"MNIST with two seeds, a pool of {mnist.pool}, {mnist.recipe.epochs} epochs" in CPU.cuts
    assert CPU.active["svhn"].seeds == CPU.active["cifar10"].seeds == (0,)
    assert (
        f"with one seed, a pool of {svhn.pool}, {svhn.cycles} cycles, {svhn.recipe.epochs} epochs"
        in CPU.cuts
    )
    assert (
        f"batches of {svhn.recipe.batch}, and {len(CPU.active['svhn'].methods or ())} methods"
        in CPU.cuts
    )
    assert f"{mnist.validation} validation images, {CPU.active_test} test images" in CPU.cuts
    assert f"costs on {CPU.timed} images" in CPU.cuts


@pytest.mark.parametrize("dataset", ["mnist", "cifar100"])
def test_what_stands_beside_the_papers_methods_is_none_of_them(dataset: str) -> None:
    beside = comparison_methods(dataset)
    assert {"heat", "coherence", "scale", "odin", "knn", "vim"} <= set(beside)
    assert ("quam" in beside) == (dataset == "mnist")  # a hundred heads to search
    assert not {type(method) for method in beside.values()} & {
        type(m) for m in paper_methods(dataset).values()
    }
