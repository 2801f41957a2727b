"""`load_model`: every form of source gives a network ready to be scored, or one sentence."""

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qualms
from qualms.models import ZOO, load_model, normalization_of
from qualms.models.cnn import mnist_cnn_5x5
from qualms.models.zoo import IMAGENET
from tests.helpers.errors import refusal

# What factories of these tests are found under.
HERE = __name__


class TakesClasses(nn.Linear):
    def __init__(self, num_classes: int = 4) -> None:
        super().__init__(3, num_classes)


class Networks:
    @staticmethod
    def named_classes(classes: int = 4) -> nn.Module:
        return nn.Sequential(nn.Linear(3, classes), nn.Dropout())

    @staticmethod
    def hands_on(**keywords: Any) -> nn.Module:
        return TakesClasses(**keywords)

    @staticmethod
    def fixed() -> nn.Module:
        return nn.Linear(3, 4)


def gives_a_dict() -> dict[str, int]:
    return {}


def raises() -> nn.Module:
    raise RuntimeError("no weights today\nand more lines")


def holds(model: nn.Module, state: dict[str, Tensor]) -> bool:
    return all(torch.equal(v, state[k]) for k, v in model.state_dict().items())


refused = partial(refusal, load_model)


def test_a_name_of_the_zoo_with_and_without_weights(tmp_path: Path) -> None:
    model = load_model("mnist-cnn")
    assert not any(m.training for m in model.modules())
    torch.save(
        {"state_dict": {f"module.{k}": v for k, v in model.state_dict().items()}}, tmp_path / "w.pt"
    )
    again = load_model("mnist-cnn", str(tmp_path / "w.pt"))
    assert holds(again, model.state_dict())
    assert not again.training
    assert load_model("vit-tiny", classes=3)(torch.rand(2, 3, 32, 32)).shape == (2, 3)
    assert normalization_of("mnist-cnn", model) is None
    assert normalization_of("cifar10-resnet20", model) == IMAGENET


def test_a_zoo_network_takes_the_authors_names_and_its_own(tmp_path: Path) -> None:
    model = load_model("cifar10-resnet20")
    own = model.state_dict()
    for i, state in enumerate((own, {k.replace("fc.", "linear."): v for k, v in own.items()})):
        torch.save(state, tmp_path / f"{i}.th")
        assert holds(load_model("cifar10-resnet20", tmp_path / f"{i}.th"), own)


@pytest.mark.data
@pytest.mark.skipif(
    "QUALMS_DATA" not in os.environ, reason="QUALMS_DATA is not set: no real data here"
)
@pytest.mark.parametrize(
    "name", [n for n, entry in ZOO.items() if entry.file and not entry.package]
)
def test_published_weights_load_by_the_networks_name(name: str) -> None:
    path = Path(os.environ["QUALMS_DATA"]) / "weights" / str(ZOO[name].file)
    model = load_model(name, path)
    x = torch.rand(8, 1, 28, 28) if name.startswith("mnist") else torch.rand(8, 3, 32, 32)
    fresh = load_model(name)
    # Trained weights are far from their beginning, so they tell inputs apart by more than chance
    # would.
    assert model(x).softmax(1).max(1).values.mean() > 1.5 * fresh(x).softmax(1).max(1).values.mean()


@pytest.mark.data
@pytest.mark.skipif(
    "QUALMS_DATA" not in os.environ, reason="QUALMS_DATA is not set: no real data here"
)
def test_published_weights_of_another_network_are_refused() -> None:
    path = Path(os.environ["QUALMS_DATA"]) / "weights" / str(ZOO["svhn-cnn-4-dropout"].file)
    # All but the last bias, which has ten numbers in both.
    assert "does not fit svhn-cnn-4: 11 keys with a different shape" in refused("svhn-cnn-4", path)


def test_an_exported_network_scores_as_the_original_does(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = mnist_cnn_5x5().eval()
    x = torch.rand(5, 1, 28, 28)
    program = torch.export.export(model, (x[:2],), dynamic_shapes=({0: torch.export.Dim("batch")},))
    torch.export.save(program, tmp_path / "m.pt2")
    loaded = load_model(tmp_path / "m.pt2")
    assert not any(m.training for m in loaded.modules())
    for spec in ("regrad+layers+smooth", "entropy"):
        torch.testing.assert_close(
            qualms.score(loaded, x, spec), qualms.score(model, x, spec), rtol=1e-4, atol=1e-7
        )
    assert normalization_of(tmp_path / "m.pt2", loaded) is None


def test_an_exported_network_carries_its_own_weights_and_classes(tmp_path: Path) -> None:
    assert "carries its own weights and classes" in refused("m.pt2", "w.pt")
    assert "carries its own weights and classes" in refused("m.pt2", classes=3)
    assert "there is no file" in refused(tmp_path / "m.pt2")
    (tmp_path / "m.pt2").write_bytes(b"PK but no archive")
    assert "is damaged or not an exported network" in refused(tmp_path / "m.pt2")
    torch.save({"a": torch.zeros(1)}, tmp_path / "m.pt2")
    assert "is damaged or not an exported network" in refused(tmp_path / "m.pt2")


@pytest.mark.parametrize(
    "layer",
    [nn.Dropout(), nn.BatchNorm1d(4), nn.TransformerEncoderLayer(4, 1, 8)],
    ids=lambda m: type(m).__name__,
)
def test_a_network_exported_in_training_mode_is_refused(layer: nn.Module, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), layer, nn.Linear(4, 2))
    for training in (True, False):
        program = torch.export.export(model.train(training), (torch.rand(2, 3),))
        torch.export.save(program, tmp_path / f"{training}.pt2")
    assert "was exported in training mode (aten." in refused(tmp_path / "True.pt2")
    assert not load_model(tmp_path / "False.pt2").training


def test_a_factory_is_found_by_its_import_path(tmp_path: Path) -> None:
    assert load_model(f"{HERE}:TakesClasses").out_features == 4
    assert load_model(f"{HERE}:TakesClasses", classes=6).out_features == 6
    assert load_model(f"{HERE}:Networks.hands_on", classes=6).out_features == 6
    model = load_model(f"{HERE}:Networks.named_classes", classes=6)
    assert model(torch.rand(1, 3)).shape == (1, 6)
    assert not any(m.training for m in model.modules())
    torch.save({"model": model.state_dict()}, tmp_path / "w.pt")
    again = load_model(f"{HERE}:Networks.named_classes", tmp_path / "w.pt", classes=6)
    assert holds(again, model.state_dict())
    assert normalization_of(f"{HERE}:TakesClasses", model) is None


def test_what_is_wrong_with_a_factory_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_here.py").write_text("import nowhere_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert "no_such_package in no_such_package:f cannot be imported" in refused("no_such_package:f")
    assert "No module named 'nowhere_at_all'" in refused("broken_here:f")
    assert "cannot be imported" in refused(":f")
    assert f"there is no 'nothing' in {HERE}.Networks" in refused(f"{HERE}:Networks.nothing")
    assert "is a str; name a function or class" in refused(f"{HERE}:HERE")
    assert "returned a dict; it must return a torch.nn.Module" in refused(f"{HERE}:gives_a_dict")
    assert "raised RuntimeError when it was called: no weights today." in refused(f"{HERE}:raises")
    assert "accepts neither classes nor num_classes" in refused(f"{HERE}:Networks.fixed", classes=3)
    assert "accepts neither classes nor num_classes" in refused("builtins:dict", classes=3)


def test_anything_else_gets_the_nearest_names_and_the_forms_there_are() -> None:
    said = refused("cifar10-resnet2")
    assert "did you mean cifar10-resnet20" in said
    for form in ("timm:NAME", "hf:NAME_OR_FOLDER", "FILE.pt2", "package.module:factory"):
        assert form in said
    assert all(name in refused("zzz") for name in ZOO)
    assert "pass weights='best.pth'" in refused("best.pth")
    assert "classes is 1" in refused("mnist-cnn", classes=1)
    assert "there is no checkpoint file" in refused("mnist-cnn", "none.pt")


def test_without_timm_an_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    assert "timm:resnet18 needs timm" in refused("timm:resnet18")
    assert "pip install timm torchvision" in refused("timm:resnet18")


def test_the_page_on_models_lists_the_whole_zoo() -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    for name, entry in ZOO.items():
        assert f"`{name}`" in page, name
        assert entry.file is None or f"`{entry.file}`" in page, name
