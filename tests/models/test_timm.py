"""Real networks of timm, with weights that these tests save: nothing is fetched.

`make test-timm` runs them beside a copy of timm, and sets QUALMS_NEEDS_TIMM: there, a timm that
does not import is an error. Elsewhere they run if timm is installed.
"""

import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import qualms
from qualms.data import Normalization
from qualms.models import ZOO, load_model, normalization_of, preprocessing_of
from qualms.models.imagenet import imagenet_classes, imagenet_ids
from tests.helpers.errors import refusal


def imported() -> Any:
    needed = "QUALMS_NEEDS_TIMM" in os.environ
    if needed:
        # torchvision's compiled operators do not load beside a CPU build of torch, and its Python
        # asks for these two.
        for operator in ("nms", "qnms"):
            torch.library.define(
                f"torchvision::{operator}", "(Tensor boxes, Tensor scores, float overlap) -> Tensor"
            )
    try:
        import timm
    except Exception as error:  # a torchvision for another torch raises more than ImportError
        if needed:
            raise
        pytest.skip(f"timm does not import here: {error}", allow_module_level=True)
    return timm


timm = imported()

# Name and pixels: residual, with convolutions of one filter for each channel (two kinds), and
# attention.
NETWORKS = [
    ("resnet18", 32),
    ("efficientnet_lite0", 32),
    ("convnext_atto", 32),
    ("vit_tiny_patch16_224", 224),
]

refused = partial(refusal, load_model)


@pytest.mark.parametrize(("name", "size"), NETWORKS)
def test_a_network_with_saved_weights_scores_as_the_reference_does(
    name: str, size: int, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    trained = timm.create_model(name, num_classes=3)
    for module in trained.modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            module.running_mean.normal_(std=0.1)
            module.running_var.uniform_(0.5, 2)
    torch.save(
        {"state_dict": {f"module.{k}": v for k, v in trained.state_dict().items()}},
        tmp_path / "w.pth",
    )
    model = load_model(f"timm:{name}", tmp_path / "w.pth", classes=3)
    assert not any(m.training for m in model.modules())
    x = torch.randn(2, 3, size, size)
    assert torch.equal(model(x), trained.eval()(x))
    model, x = model.double(), x.double()
    specs = ["regrad+layers", "exgrad"]
    expected = qualms.compare(model, x, specs, engine="reference")
    torch.testing.assert_close(qualms.compare(model, x, specs), expected, rtol=1e-9, atol=1e-12)


def test_normalization_is_timms() -> None:
    resnet, vit = (timm.create_model(n) for n in ("resnet18", "vit_tiny_patch16_224"))
    expected = Normalization((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    assert normalization_of("timm:resnet18", resnet) == expected
    assert normalization_of("timm:vit_tiny_patch16_224", vit) == Normalization(
        (0.5,) * 3, (0.5,) * 3
    )


def test_published_weights_that_cannot_be_fetched_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    said = refused("timm:resnet18")
    assert said.startswith("timm:resnet18 could not be created with its published weights:")
    assert said.endswith("pass weights=, a checkpoint file.")


def test_what_cannot_be_a_classifier_as_asked_is_told() -> None:
    assert "did you mean resnet18" in refused("timm:resnt18")
    assert "Invalid pretrained tag" in refused("timm:resnet18.nobody_in1k")
    assert "have 1000 classes, so a last layer for 3 would be initialized randomly" in refused(
        "timm:resnet18", classes=3
    )


def test_a_network_without_a_classifier_is_told(tmp_path: Path) -> None:
    name = "vit_small_patch14_dinov2"
    assert timm.get_pretrained_cfg(name).num_classes == 0
    (tmp_path / "w.pt").write_bytes(b"")
    assert "outputs features, not logits" in refused(f"timm:{name}", tmp_path / "w.pt")


def with_statistics(model: torch.nn.Module) -> torch.nn.Module:
    """With random batch statistics, in float64 and in evaluation mode."""
    for module in model.modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            module.running_mean.normal_(std=0.1)
            module.running_var.uniform_(0.5, 2)
    return model.double().eval()


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("imagenet-efficientnet-lite0", "tf_efficientnet_lite0"),
        ("imagenet-efficientnet-lite1", "tf_efficientnet_lite1"),
        ("imagenet-efficientnet-lite2", "tf_efficientnet_lite2"),
        ("imagenet-mobilenet-v2", "mobilenetv2_100"),
    ],
)
def test_imagenets_networks_are_timms(ours: str, theirs: str) -> None:
    torch.manual_seed(0)
    entry = ZOO[ours]
    model = with_statistics(entry.build(entry.classes))
    expected = timm.create_model(theirs).double().eval()
    mine = model.state_dict().values()
    names = expected.state_dict()
    expected.load_state_dict(
        dict(zip(names, mine, strict=True))
    )  # the same tensors in the same order
    for size in (entry.size, 75):  # an odd size as well: there, padding is the same on both sides
        x = torch.randn(1, 3, size, size, dtype=torch.float64)
        torch.testing.assert_close(model(x), expected(x), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_images_for_efficientnet_lite_are_cut_as_timm_does(number: int) -> None:
    name = f"tf_efficientnet_lite{number}"
    timms = preprocessing_of(f"timm:{name}", timm.create_model(name))
    ours = f"imagenet-efficientnet-lite{number}"
    assert preprocessing_of(ours, ZOO[ours].build(1000)) == timms  # class names too


def test_mobilenet_v2_is_torchvisions() -> None:
    from torchvision.models import mobilenet_v2

    torch.manual_seed(0)
    model = with_statistics(ZOO["imagenet-mobilenet-v2"].build(1000))
    expected = mobilenet_v2().double().eval()
    expected.load_state_dict(model.state_dict())
    x = torch.randn(1, 3, 64, 64, dtype=torch.float64)
    torch.testing.assert_close(model(x), expected(x), rtol=1e-9, atol=1e-9)


def test_class_names_of_imagenet_are_known_of_timms_networks() -> None:
    from timm.data import ImageNetInfo

    expected = tuple(words.split(",")[0] for words in ImageNetInfo().label_descriptions())
    assert imagenet_classes() == expected
    assert imagenet_ids() == tuple(ImageNetInfo().label_names())
    assert preprocessing_of("timm:resnet18", timm.create_model("resnet18")).class_names == expected
    assert (
        preprocessing_of("timm:resnet18", timm.create_model("resnet18", num_classes=5)).class_names
        == ()
    )
    large = timm.create_model(
        "mixer_s32_224", num_classes=0
    )  # stands for a network of 21,843 classes
    large.pretrained_cfg = {"tag": "augreg_in21k", "num_classes": 21_843}
    large.num_classes = 21_843
    assert preprocessing_of("timm:large", large).class_names[:2] == ("organism", "benthos")


@pytest.mark.parametrize("name", ["resnet18", "vit_tiny_patch16_224", "convnext_atto"])
def test_images_are_fitted_as_timm_does(name: str) -> None:
    model = timm.create_model(name)
    said = preprocessing_of(f"timm:{name}", model)
    assert said.transform is not None
    assert said.normalization is not None
    pixels = torch.randint(0, 256, (9, 12, 3), generator=torch.Generator().manual_seed(0)).to(
        torch.uint8
    )
    photo = Image.fromarray(pixels.numpy()).resize((640, 480), Image.Resampling.BICUBIC)
    expected = timm.data.create_transform(**timm.data.resolve_data_config({}, model=model))(photo)
    fitted = torch.from_numpy(np.array(said.transform.apply_to_image(photo))).permute(2, 0, 1)[None]
    torch.testing.assert_close(said.normalization.apply(fitted)[0], expected, rtol=0, atol=1e-5)
