"""The paper's tables: what is compared with what, and by which methods."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from qualms.data import Images
from qualms.methods.logits import Entropy
from qualms.methods.registry import parse
from qualms.models import load_model
from qualms.tasks import paper_tables
from qualms.tasks.paper_tables import Workspace
from qualms.tasks.presets import CPU, PAPER, Setup
from qualms.training import RECIPES


def made_up(dataset: str, root: Path, split: str = "test") -> Images:
    """Make noise images in the shape of a dataset; SVHN has more images than the others."""
    count = 30 if dataset == "svhn" else 20
    noise, shape = (
        torch.Generator().manual_seed(count),
        (1, 28, 28) if dataset == "mnist" else (3, 32, 32),
    )
    pixels = torch.randint(0, 256, (count, *shape), generator=noise, dtype=torch.uint8)
    return Images(dataset, pixels, torch.arange(count) % 10)


@pytest.fixture(autouse=True)
def no_real_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paper_tables, "_load", made_up)


def test_ood_is_measured_on_as_many_images_of_both_datasets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paper_tables, "IMAGES_OF_EACH", 20)
    setup = Setup("svhn-cnn", RECIPES["svhn"].shortened(1), seeds=(0,))
    preset, at = replace(PAPER, setups={"svhn": setup}), Workspace(tmp_path, tmp_path)
    monkeypatch.setattr(paper_tables, "table_methods", lambda *_: {"Entropy": Entropy()})
    rows = [row for row in paper_tables.table1(preset, at) if row["row"] == "ood"]
    assert [(row["out"], row["n_in"], row["n_out"]) for row in rows] == [
        ("cifar10", 20, 20),
        ("cifar100", 20, 20),
    ]
    calibrated = [row for row in paper_tables.table2(preset, at) if row["row"] == "calibration"]
    assert [row["n"] for row in calibrated] == [30]


def test_each_seed_has_a_network_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paper_tables, "table_methods", lambda *_: {"Entropy": Entropy()})
    setup = Setup("svhn-cnn", RECIPES["svhn"].shortened(1), seeds=(0, 1))
    rows = list(
        paper_tables.table1(replace(PAPER, setups={"svhn": setup}), Workspace(tmp_path, tmp_path))
    )
    areas = {
        row["seed"]: row["auroc"] for row in rows if row["row"] == "ood" and row["out"] == "cifar10"
    }
    assert set(areas) == {0, 1}
    assert areas[0] != areas[1]


def test_a_transformer_for_color_images_learns_gray_ones_in_its_own_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paper_tables, "paper_methods", lambda *_: {"Entropy": Entropy()})
    monkeypatch.setattr(
        paper_tables, "comparison_methods", lambda *_: {"gen": parse("gen"), "vim": parse("vim")}
    )
    setup = replace(CPU.vit["mnist"], recipe=RECIPES["vit"].shortened(1), images=10)
    rows = list(paper_tables.vit(replace(CPU, vit={"mnist": setup}), Workspace(tmp_path, tmp_path)))
    found = {(row["out"], row["method"]) for row in rows if row["row"] == "ood"}
    assert found == {
        (out, method) for out in ("omniglot", "fashion-mnist") for method in ("Entropy", "gen")
    }


def test_active_learning_leaves_out_negrad_alone() -> None:
    """Its scores are all zero, so it would take the pool in the order of its file."""
    learning = PAPER.active["mnist"]
    methods = paper_tables.active_methods("mnist", learning, PAPER)
    assert methods["Random"] is None
    assert set(paper_tables.paper_methods("mnist")) - set(methods) == {"NEGrad"}
    assert list(paper_tables.active_methods("svhn", CPU.active["svhn"], CPU)) == list(
        CPU.active["svhn"].methods or ()
    )


def test_tables_have_the_papers_methods_with_the_draws_of_the_preset_and_others_beside_them() -> (
    None
):
    methods = paper_tables.table_methods("svhn", CPU)
    assert repr(methods["Perturb x"]) == "PerturbX(sigma=0.008, draws=20)"
    assert (
        repr(paper_tables.table_methods("svhn", PAPER)["Perturb x"])
        == "PerturbX(sigma=0.008, draws=100)"
    )
    assert {"REGrad*", "heat", "coherence", "odin", "knn"} <= set(methods)


def test_costs_are_those_of_the_methods_of_the_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = {
        name: paper_tables.table_methods("cifar10", CPU)[name]
        for name in ("Entropy", "LA", "MC-AA")
    }
    asked = []
    monkeypatch.setattr(paper_tables, "table_methods", lambda *given: asked.append(given) or chosen)
    monkeypatch.setattr(paper_tables, "MAX_TRAIN_IMAGES", 20)
    built = []
    monkeypatch.setattr(
        paper_tables, "load_model", lambda name: built.append(name) or load_model("svhn-cnn")
    )
    preset = replace(CPU, timed=2)
    rows = list(paper_tables.runtime(preset, Workspace(tmp_path, tmp_path)))
    assert asked == [("cifar10", preset)]
    assert built == ["resnet18"]
    assert [(row["row"], row["method"], row["n"]) for row in rows] == [
        ("runtime", name, 2) for name in chosen
    ]
    assert "draws=20" in rows[2]["exactly"]
