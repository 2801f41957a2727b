"""The networks that have a name: what goes in and out, and how many weights they have."""

import pytest
import torch
from torch import nn

from qualms.models import ZOO
from qualms.models.cifar_resnet import Block, resnet20

# Weights and biases added up by hand; ResNets and transformers also from the literature.
PARAMETERS = {
    "mnist-cnn": 16 * 32 + 32 + 32 * 32 * 16 + 32 + 32 * 11 * 11 * 128 + 128 + 128 * 10 + 10,
    "svhn-cnn": 3 * 16 * 32
    + 32
    + 32 * 32 * 16
    + 32
    + 32 * 13 * 13 * 128
    + 128
    + 128 * 128
    + 128
    + 128 * 10
    + 10,
    "digits-cnn": 16 * 32 + 32 + 32 * 32 * 16 + 32 + 32 * 1 * 1 * 128 + 128 + 128 * 10 + 10,
    "cnn-32": 3 * 16 * 32 + 32 + 32 * 32 * 16 + 32 + 32 * 13 * 13 * 128 + 128 + 128 * 10 + 10,
    "resnet18": 11_173_962,
    "resnet50": 23_520_842,
    "resnet152": 58_341_028,
    "vit-small": 2_693_578,
    "vit-tiny": 4 * (12 * 96**2 + 13 * 96) + 48 * 96 + 96 + 96 + 65 * 96 + 2 * 96 + 96 * 10 + 10,
    "mnist-cnn-5x5": 250 + 10 + 5000 + 20 + 320 * 50 + 50 + 500 + 10,
    "cifar10-resnet20": 269_722,
    # 9 blocks a stage, and 1x1 convolutions with their normalization on two shortcuts
    "cifar100-resnet56": 432
    + 18 * 9 * (16**2 + 32**2 + 64**2)
    - 9 * (16 * 32 + 32 * 64)
    + (16 * 32 + 64 + 32 * 64 + 128)
    + 32
    + 18 * 2 * (16 + 32 + 64)
    + 6500,
    "svhn-cnn-4": 9 * (3 * 32 + 32 * 64 + 64 * 128 + 128 * 256) + 480 + 1024 * 64 + 64 + 640 + 10,
    "svhn-cnn-4-dropout": 9 * (3 * 16 + 16 * 32 + 32 * 64 + 64 * 128)
    + 240
    + 512 * 256
    + 256
    + 2560
    + 10,
    "imagenet-efficientnet-lite0": 4_652_008,
    "imagenet-efficientnet-lite1": 5_416_680,
    "imagenet-efficientnet-lite2": 6_092_072,
    "imagenet-mobilenet-v2": 3_504_872,
}


def images(name: str) -> torch.Tensor:
    if name == "digits-cnn":
        return torch.rand(2, 1, 8, 8)
    return torch.rand(2, 1, 28, 28) if name.startswith("mnist") else torch.rand(2, 3, 32, 32)


def test_every_network_of_the_zoo_is_counted() -> None:
    assert set(PARAMETERS) == set(ZOO)


@pytest.mark.parametrize("name", ZOO)
def test_a_network_has_the_size_of_its_paper_and_as_many_outputs_as_classes(name: str) -> None:
    entry = ZOO[name]
    model = entry.build(entry.classes).eval()
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]
    assert model(images(name)).shape == (2, entry.classes)


@pytest.mark.parametrize("name", [n for n in ZOO if n != "resnet152"])
def test_the_number_of_classes_is_a_choice(name: str) -> None:
    assert ZOO[name].build(7).eval()(images(name)).shape == (2, 7)


def test_published_weights_come_with_their_normalization_for_each_channel() -> None:
    for name, entry in ZOO.items():
        assert (entry.file is None) == (entry.normalization is None), name
        if entry.normalization is not None:
            assert len(entry.normalization.mean) == images(name).shape[1], name


def test_a_shortcut_without_weights_takes_every_second_pixel_and_adds_channels_on_both_sides() -> (
    None
):
    block = Block(16, 32, has_shortcut_weights=False).eval()
    nn.init.zeros_(block.conv2.weight)  # leaves the shortcut alone
    x = torch.rand(2, 16, 8, 8)
    out = block(x)
    assert torch.equal(out[:, 8:24], x[:, :, ::2, ::2])
    assert not out[:, :8].any()
    assert not out[:, 24:].any()


def test_a_projected_shortcut_has_weights_only_where_the_shape_changes() -> None:
    names = [
        n for n, _ in resnet20(has_shortcut_weights=True).named_parameters() if "downsample" in n
    ]
    assert sorted({n.split(".downsample")[0] for n in names}) == ["layer2.0", "layer3.0"]
