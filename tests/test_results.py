"""The results page: its numbers are those of the committed rows, and what it makes of them is
right.
"""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

import qualms
from benchmarks.evidence import among_best, by_pair, needs_data, ranking
from qualms.data import Images

ROOT = Path(__file__).parents[1]


@pytest.fixture
def epistemic(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import epistemic

    return epistemic


@pytest.fixture
def ungrad(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import ungrad

    return ungrad


@pytest.fixture
def costs(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import costs

    return costs


def test_every_method_has_a_cost_or_a_reason_on_each_network(costs: ModuleType) -> None:
    """Fails for a new method until `benchmarks/costs.py measure` has run."""
    names = {method.name for method in qualms.list_methods()} | {
        "regrad+layers+smooth",
        "regrad+layers",
    }
    rows = {(row["network"], row["method"]): row for row in costs.read_rows()}
    networks = {network for network, _ in rows}
    assert {"resnet18-10", "imagenet-efficientnet-lite0"} <= networks <= set(costs.NETWORKS)
    assert set(rows) == {(network, name) for network in networks for name in names}
    assert len(rows) == len(costs.read_rows())
    numbers = {"passes", "one", "counted", "seconds", "mib"}
    for key, row in rows.items():
        assert numbers <= set(row) or row["why"], key


def test_a_cost_that_was_not_measured_stands_as_a_count_or_a_reason(costs: ModuleType) -> None:
    measured = {"passes": 12.34, "seconds": 0.0567, "mib": 89.6}
    rows = [
        {"network": "resnet18-10", "method": "entropy", **measured},
        {"network": "vit-b-1000", "method": "entropy", "counted": 101.0, "why": "too long"},
        {"network": "minilm-150", "method": "entropy", "why": "no such layer."},
    ]
    text = costs.costs_table(rows)
    assert (
        "| `entropy` | 12.3 / 0.057 / 90 | – | (101) |" in text
    )  # networks without rows have no column
    assert text.endswith("- `entropy`, MiniLM-L6, 150 classes, 32 tokens: no such layer.")


def test_the_page_and_the_readme_are_what_the_rows_say(tmp_path: Path) -> None:
    for name in ("benchmarks", "docs"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "README.md", tmp_path)
    subprocess.run([sys.executable, "benchmarks/results_page.py"], cwd=tmp_path, check=True)
    for script in ("costs", "thousand"):
        subprocess.run(
            [sys.executable, f"benchmarks/{script}.py", "page"], cwd=tmp_path, check=True
        )
    for page in ("README.md", "docs/results.md", "docs/performance.md"):
        assert (tmp_path / page).read_text() == (ROOT / page).read_text(), (
            f"{page}: run `make results`"
        )


def ood(method: str, out: str, area: float, seed: int = 0) -> dict[str, object]:
    return {
        "row": "ood",
        "in": "a",
        "out": out,
        "method": method,
        "seed": seed,
        "auroc": area,
        "aupr_out": area / 2,
    }


def test_a_pair_counts_once_however_many_seeds_it_has() -> None:
    rows = [ood("gen", "b", 0.9), ood("gen", "b", 0.7, seed=1), ood("gen", "c", 0.6)]
    assert by_pair(rows, "auroc") == {"gen": {"a → b": pytest.approx(0.8), "a → c": 0.6}}


def test_the_ranking_goes_by_means_over_pairs_and_leaves_out_what_was_not_run_on_all() -> None:
    rows = [
        ood(m, out, area)
        for m, out, area in (
            ("gen", "b", 0.9),
            ("gen", "c", 0.5),
            ("msp", "b", 0.8),
            ("msp", "c", 0.8),
            ("odin", "b", 1.0),
        )
    ]
    lift = [{"row": "calibration", "in": "a", "method": "gen", "raulc": 0.4}]
    time = [{"row": "runtime", "method": "msp", "ratio": 1.5}]
    ranked, others = ranking(rows, lift, time)
    assert [(r.method, r.auroc, r.aupr) for r in ranked] == [
        ("msp", pytest.approx(0.8), pytest.approx(0.4)),
        ("gen", pytest.approx(0.7), pytest.approx(0.35)),
    ]
    assert (ranked[1].raulc, ranked[1].cost, ranked[0].raulc, ranked[0].cost) == (
        0.4,
        None,
        None,
        1.5,
    )
    assert (ranked[1].low, ranked[1].high) == (
        0.5,
        0.9,
    )  # a quarter of the draws have the one pair twice
    assert others == ["odin"]


def test_among_the_best_three_means_that_fewer_than_three_are_above() -> None:
    means = np.array([[4.0, 1.0], [3.0, 2.0], [2.0, 3.0], [1.0, 4.0], [0.0, 4.0]])
    assert among_best(means).tolist() == [0.5, 0.5, 1.0, 0.5, 0.5]


def test_chances_are_also_told_among_methods_without_data() -> None:
    areas = {
        "knn": 0.9,
        "vim": 0.8,
        "react": 0.7,
        "gen": 0.6,
        "msp": 0.5,
        "energy": 0.4,
        "odin": 0.3,
    }
    ranked, _ = ranking(
        [ood(m, out, area) for m, area in areas.items() for out in ("b", "c")], [], []
    )
    assert {r.method: (r.best, r.best_without_data) for r in ranked} == {
        "knn": (1, None), "vim": (1, None), "react": (1, None),
        "gen": (0, 1), "msp": (0, 1), "energy": (0, 1), "odin": (0, 0),
    }  # fmt: skip
    assert needs_data("LA")
    assert not needs_data("REGrad*")


def test_a_partial_correlation_is_that_of_what_the_third_quantity_leaves(
    epistemic: ModuleType,
) -> None:
    a, b, given = np.random.default_rng(0).random((3, 200))
    b, a = b + 0.5 * given, a + b + given
    ranks = [np.argsort(np.argsort(v)).astype(float) for v in (a, b, given)]
    line = np.stack([ranks[2], np.ones(200)], axis=1)
    rest = [r - line @ np.linalg.lstsq(line, r, rcond=None)[0] for r in ranks[:2]]
    assert epistemic.partial(a, b, given) == pytest.approx(np.corrcoef(*rest)[0, 1], abs=1e-9)
    assert (
        epistemic.partial(given**3, b, given) is None
    )  # ranks like the third quantity: nothing is left
    assert epistemic.correlation(np.zeros(5), np.arange(5.0)) is None


def test_scores_that_rise_from_network_to_network_are_ordered(epistemic: ModuleType) -> None:
    one, two, three = np.array([0.0, 0.0]), np.array([1.0, 0.0]), np.array([2.0, -1.0])
    # Pairs: (one, two) 1 and a tie; (one, three) 1 and 0; (two, three) 1 and 0.
    assert epistemic.ordered([one, two, three]) == pytest.approx((0.75 + 0.5 + 0.5) / 3)


def digits(count: int) -> Images:
    """Each as bright as its class."""
    labels = torch.arange(count) % 10
    return Images(
        "mnist", (20 * labels).to(torch.uint8)[:, None, None, None].repeat(1, 1, 2, 2), labels
    )


def test_a_score_that_follows_knowledge_passes_the_check_of_size_and_noise(
    epistemic: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One score is of few images, one of these and of wrong labels; one is constant."""
    monkeypatch.setattr(epistemic, "trained", lambda name, *_: name)

    def scored(
        network: str, train: Images, parts: list[Images], seed: int, methods: dict[str, object]
    ) -> list[dict[str, object]]:
        wrong = float((train.pixels[:, 0, 0, 0] != 20 * train.labels).double().mean())
        level = {"Entropy": 1 / len(train) + wrong, "REGrad": 1 / len(train)}
        return [
            {name: np.full(len(part), level.get(name, 0.0)) for name in methods} for part in parts
        ]

    monkeypatch.setattr(epistemic, "scored", scored)
    rows = epistemic.size(digits(60_000), digits(20), 0, tmp_path)
    assert {name: rows[name]["falls_with_size"] for name in ("Entropy", "REGrad", "gen")} == {
        "Entropy": 1.0, "REGrad": 1.0, "gen": 0.5,
    }  # fmt: skip
    assert rows["REGrad"]["rises_with_noise"] == 0.5
    assert rows["Entropy"]["rises_with_noise"] == 1.0
    assert "knn" not in rows  # what it sees would change too


def test_a_score_that_knows_the_unknown_passes_the_check_of_ambiguity(
    epistemic: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    away = [Images(name, digits(30).pixels, None) for name in ("omniglot", "fashion-mnist")]
    monkeypatch.setattr(epistemic, "trained", lambda name, *_: name)
    monkeypatch.setattr(epistemic, "unknown", lambda: away)
    monkeypatch.setattr(epistemic, "load", lambda *_: digits(1000))
    monkeypatch.setattr(epistemic, "root", lambda: tmp_path)
    seen = {"mnist": 0.0, "mixtures": 0.0, "omniglot": 1.0, "fashion-mnist": 1.0}
    doubts = {"mnist": 0.0, "mixtures": 1.0, "omniglot": 1.0, "fashion-mnist": 1.0}

    def scored(
        network: str, train: Images, parts: list[Images], *_: object
    ) -> list[dict[str, object]]:
        levels = {name: doubts if name == "Entropy" else seen for name in epistemic.every_method()}
        return [
            {name: np.full(len(part), level[part.name]) for name, level in levels.items()}
            for part in parts
        ]

    monkeypatch.setattr(epistemic, "scored", scored)
    rows = epistemic.ambiguous(digits(1000), digits(20), 0, tmp_path)
    assert rows["REGrad"] == {
        "unknown_over_ambiguous": 1.0,
        "ambiguous_over_clear": 0.5,
        "unknown_over_clear": 1.0,
    }
    assert rows["Entropy"] == {
        "unknown_over_ambiguous": 0.5,
        "ambiguous_over_clear": 1.0,
        "unknown_over_clear": 1.0,
    }


def test_half_of_the_ambiguous_training_set_are_mixtures(epistemic: ModuleType) -> None:
    every = digits(1000)
    found = epistemic.half_mixtures(every, seed=0)
    plain = (found.pixels[:, 0, 0, 0] == 20 * found.labels).double().mean()
    assert len(found) == 1000
    assert float(plain) == pytest.approx(
        0.5, abs=0.01
    )  # a mixture's brightness is between its two digits'


def test_variants_of_ungrad_are_what_autograd_says(ungrad: ModuleType) -> None:
    torch.manual_seed(0)
    body = [
        torch.nn.Conv2d(1, 3, 3, bias=False),
        torch.nn.BatchNorm2d(3),
        torch.nn.Tanh(),
        torch.nn.Flatten(),
    ]
    model = torch.nn.Sequential(*body, torch.nn.Linear(12, 4)).double().eval()
    x, (first, *_, weight, bias) = 3 * torch.randn(3, 1, 4, 4).double(), model.parameters()
    found = qualms.class_gradient_gram(model, x, layers="tensor")
    variants = dict(ungrad.variants(found.gram, found.logits, found.layers))

    def by_autograd(
        of: Callable[[torch.Tensor], torch.Tensor], params: list[torch.Tensor]
    ) -> list[float]:
        """The mean over classes of the norm of ∇ of(logits)_c."""
        means = []
        for one in x:
            outputs = of(model(one[None])[0])
            grads = [torch.autograd.grad(output, params, retain_graph=True) for output in outputs]
            flat = [torch.cat([g.flatten() for g in grad]) for grad in grads]
            means.append(float(torch.stack([g.norm() for g in flat]).mean()))
        return means

    every, least = list(model.parameters()), float(np.finfo(np.float32).eps)
    cases: dict[str, list[float]] = {
        "UNGrad": by_autograd(lambda z: z.log_softmax(0), every),
        "first layer alone": by_autograd(lambda z: z.log_softmax(0), [first]),
        "last layer alone": by_autograd(lambda z: z.log_softmax(0), [weight, bias]),
        "of unnormalized logits": by_autograd(lambda z: z, every),
        "log softmax of the softmax": by_autograd(lambda z: z.softmax(0).log_softmax(0), every),
        "of p_c (the weights of ExGrad)": by_autograd(lambda z: z.softmax(0), every),
        "log(p_c + 0.01)": by_autograd(lambda z: (z.softmax(0) + 0.01).log(), every),
        "p_c clamped as by torch.distributions": by_autograd(
            lambda z: z.softmax(0).clamp(least, 1 - least).log(), every
        ),
    }
    for name, expected in cases.items():
        assert variants[name].tolist() == pytest.approx(expected, rel=1e-8), name


def test_label_noise_replaces_its_share_by_other_classes(epistemic: ModuleType) -> None:
    images = Images(
        "digits", torch.zeros(10_000, 1, 2, 2, dtype=torch.uint8), torch.arange(10_000) % 10
    )
    assert images.labels is not None
    moved = (epistemic.noisy(images, 0.4, seed=0).labels - images.labels) % 10
    assert float((moved > 0).float().mean()) == pytest.approx(0.4, abs=0.02)
    assert set(moved.tolist()) == set(range(10))  # to each of the other classes


def test_mixtures_are_of_two_classes_and_have_the_label_of_either(epistemic: ModuleType) -> None:
    mixed = epistemic.mixtures(digits(1000), 500, seed=0)
    sums = 2 * mixed.pixels[:, 0, 0, 0].int() // 20  # the two digits' sum
    other = sums - mixed.labels
    assert bool(((other >= 0) & (other <= 9) & (other != mixed.labels)).all())
    assert float((other > mixed.labels).float().mean()) == pytest.approx(0.5, abs=0.1)
