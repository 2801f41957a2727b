"""Digits in every format, and a small network for them."""

import pytest
import torch

import qualms
from qualms.data import DATASETS, Images, load
from qualms.models import load_model
from qualms.scale.shards import ScoreImages
from qualms.stream.image_scorer import ImageScorer
from qualms.stream.network import Network
from tests.helpers.stores import COUNT, METHODS


@pytest.fixture(scope="module")
def digits() -> Images:
    return load("digits").take(slice(0, COUNT))


@pytest.fixture(scope="module")
def network() -> Network:
    torch.manual_seed(0)
    return Network("digits-cnn", load_model("digits-cnn"), DATASETS["digits"].normalization)


@pytest.fixture
def score(network: Network) -> ScoreImages:
    methods = {name: network.scale_noise(qualms.methods.parse(name)) for name in METHODS}
    return ImageScorer(network, qualms.Scorer(network.model, methods)).score
