"""The real files."""

import os

import pytest
import torch

from qualms.data import DATASETS, Images, load

pytestmark = [
    pytest.mark.data,
    pytest.mark.skipif(
        "QUALMS_DATA" not in os.environ, reason="QUALMS_DATA is not set: no real data here"
    ),
]


def means(images: Images) -> torch.Tensor:
    return images.pixels.double().mean((0, 2, 3)) / 255


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10", "cifar100", "svhn"])
def test_ten_thousand_test_images_of_every_class(name: str) -> None:
    found, row = load(name), DATASETS[name]
    assert tuple(found.pixels.shape) == (10000, row.channels, row.size, row.size)
    assert found.labels is not None
    assert found.labels.unique().tolist() == list(range(row.classes or 0))
    assert len(found.classes) == row.classes


@pytest.mark.parametrize("name", ["mnist", "cifar10", "cifar100"])
@pytest.mark.parametrize("split", ["train", "test"])
def test_the_usual_normalization_is_that_of_the_images(name: str, split: str) -> None:
    x = DATASETS[name].normalization.apply(load(name, split=split).subset(5000).pixels)
    assert x.mean((0, 2, 3)).abs().max() < 0.05
    assert (x.std((0, 2, 3)) - 1).abs().max() < 0.05


def test_mnist_is_the_published_one() -> None:
    train = load("mnist", split="train")
    assert len(train) == 60000
    assert float(means(train)) == pytest.approx(0.1307, abs=5e-5)
    assert train.labels is not None
    assert train.labels[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]


def test_cifar_stands_upright() -> None:
    # Skies are blue and above: in the airplanes and ships, the upper half is brighter and bluer
    # than the lower.
    found = load("cifar10")
    assert found.labels is not None
    ships = (
        found.take((found.labels == found.classes.index("ship")).nonzero()[:, 0])
        .pixels.double()
        .mean(0)
    )
    assert ships[2, :8].mean() > ships[2, -8:].mean() + 10
    assert ships[2, :8].mean() > ships[0, :8].mean()


def test_svhn_has_more_ones_than_nines_and_its_zeros() -> None:
    labels = load("svhn").labels
    assert labels is not None
    counts = labels.bincount()
    assert counts[1] > 2 * counts[9]
    assert counts[0] > 300


@pytest.mark.slow
def test_omniglots_ink_is_bright_on_dark() -> None:
    found = load("omniglot")
    assert tuple(found.pixels.shape) == (13180, 1, 28, 28)
    assert len(found.classes) == 659
    assert found.labels is not None
    assert found.labels.bincount().tolist() == [20] * 659
    assert 0.02 < float(means(found)) < 0.2
    edge = found.pixels[:, 0, 0].double().mean() / 255
    assert edge < 0.02


@pytest.mark.slow
def test_a_folder_of_real_photographs() -> None:
    found = load("tiny-imagenet-32")
    assert tuple(found.pixels.shape) == (5000, 3, 32, 32)
    assert len(found.classes) == 200
    assert ((means(found) > 0.3) & (means(found) < 0.6)).all()
