"""A small trained network on the bundled digits, and images that it does not know."""

import pytest
import torch

from qualms.data import DATASETS, Images, load
from qualms.models import load_model
from qualms.stream.network import Network
from qualms.training import RECIPES, fit


@pytest.fixture(scope="package")
def network() -> Network:
    torch.manual_seed(0)
    model = load_model("digits-cnn")
    normalization = DATASETS["digits"].normalization
    fit(model, load("digits", split="train"), RECIPES["digits"].shortened(4), normalization)
    return Network("digits-cnn", model, normalization)


@pytest.fixture(scope="package")
def known() -> Images:
    return load("digits").subset(100)


@pytest.fixture(scope="package")
def strange() -> Images:
    """Unknown images: digits upside down and inverted."""
    images = load("digits").subset(80, seed=1)
    return Images("strange", 255 - images.pixels.flip(2), None)
