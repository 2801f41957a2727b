"""The networks that others trained do as well here as their authors say, on their whole test sets."""

import os
from pathlib import Path

import pytest

from qualms.data import load
from qualms.models import load_model
from qualms.models.zoo import ZOO
from qualms.stream.network import Network

pytestmark = [
    pytest.mark.data,
    pytest.mark.slow,
    pytest.mark.skipif(
        "QUALMS_DATA" not in os.environ, reason="QUALMS_DATA is not set: no real data here"
    ),
]
ROOT = Path(os.environ.get("QUALMS_DATA", "."))


@pytest.mark.parametrize(
    ("name", "data", "share"),
    [
        ("cifar10-resnet20", "cifar10", 0.9173),
        ("cifar100-resnet56", "cifar100", 0.7263),
        ("mnist-cnn-5x5", "mnist", 0.9906),
        # Re-cropped images: the first 10,000 of the test set.
        ("svhn-cnn-4", "svhn", 0.8979),
        ("svhn-cnn-4-dropout", "svhn", 0.9155),
    ],
)
def test_the_whole_test_set(name: str, data: str, share: float) -> None:
    entry = ZOO[name]
    assert entry.normalization is not None
    network = Network(
        name, load_model(name, ROOT / "weights" / str(entry.file)), entry.normalization
    )
    images = load(data, ROOT)
    assert len(images) == 10_000
    assert network.accuracy(images) == pytest.approx(share, abs=0.0005)
