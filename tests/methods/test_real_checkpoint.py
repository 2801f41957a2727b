"""Every method on a real CIFAR-10 ResNet-20 that others trained, against real SVHN."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import spearmanr
from torch import Tensor, nn

import qualms
from qualms.data import load
from qualms.methods.gradients import REGrad
from qualms.methods.registry import METHODS
from qualms.metrics import auroc
from qualms.models import load_model
from qualms.models.zoo import ZOO
from tests.helpers.engines import assert_norms_equal

pytestmark = [
    pytest.mark.data,
    pytest.mark.slow,
    pytest.mark.skipif(
        "QUALMS_DATA" not in os.environ, reason="QUALMS_DATA is not set: no real data here"
    ),
]
ROOT = Path(os.environ.get("QUALMS_DATA", "."))
ENTRY = ZOO["cifar10-resnet20"]
INPUTS = 48


def resnet20() -> nn.Module:
    return load_model("cifar10-resnet20", ROOT / "weights" / str(ENTRY.file))


def normalized(name: str, count: int, split: str = "test") -> Tensor:
    assert ENTRY.normalization is not None
    return ENTRY.normalization.apply(load(name, ROOT, split).pixels[:count])


@pytest.fixture(scope="module")
def scores() -> dict[str, Tensor]:
    model = resnet20()
    assert ENTRY.normalization is not None
    sigma = ENTRY.normalization.in_model_units(0.02)
    every: list[Any] = [
        kind() for kind in METHODS if kind.name != "mc-dropout"
    ]  # the network has none
    methods = [replace(m, draws=10) if hasattr(m, "draws") else m for m in every]
    methods += ["regrad+layers(0.2)", REGrad(layers=0.2, smooth=qualms.Smoothing(sigma))]
    train = normalized("cifar10", 512, "train").split(128)
    other = resnet20()
    with torch.no_grad():
        for p in other.parameters():
            p += (
                0.02
                * p.abs().mean()
                * torch.randn(p.shape, generator=torch.Generator().manual_seed(0))
            )
    both = torch.cat([normalized("cifar10", INPUTS), normalized("svhn", INPUTS)])
    return qualms.compare(model, both, methods, train=list(train), models=[other])


def detected(values: Tensor) -> float:
    return auroc(values[:INPUTS], values[INPUTS:])


def test_every_method_runs_and_gives_a_finite_score(scores: dict[str, Tensor]) -> None:
    assert len(scores) == len(METHODS) + 1
    for name, values in scores.items():
        assert values.shape == (2 * INPUTS,), name
        assert torch.isfinite(values).all(), name


def test_the_papers_method_finds_svhn(scores: dict[str, Tensor]) -> None:
    starred = next(name for name in scores if "smooth" in name)
    assert detected(scores[starred]) > 0.9
    assert detected(scores[starred]) > detected(scores["regrad"])
    assert detected(scores["entropy"]) > 0.8


def test_heat_finds_more_of_svhn_than_the_entropy_it_is_made_of(scores: dict[str, Tensor]) -> None:
    assert detected(scores["heat"]) > detected(scores["entropy"]) + 0.01
    assert detected(scores["heat-geometric"]) > detected(scores["entropy"]) + 0.01
    assert torch.equal(scores["recommended"], scores["heat"])


def test_the_sketch_ranks_real_inputs_like_the_exact_engine(scores: dict[str, Tensor]) -> None:
    x = torch.cat([normalized("cifar10", INPUTS), normalized("svhn", INPUTS)])
    found, error = qualms.score_with_error(resnet20(), x, "regrad+layers(0.2)", engine="sketch")
    assert spearmanr(found, scores["regrad+layers(0.2)"])[0] > 0.985
    assert (error < 0.3 * found).all()


def test_the_exact_engine_is_the_reference_on_it() -> None:
    model, x = resnet20(), normalized("cifar10", 2)
    have = qualms.class_gradient_norms(model.double(), x.double())
    want = qualms.class_gradient_norms(model.double(), x.double(), engine="reference")
    assert have.layers == want.layers
    assert have.general == []
    assert_norms_equal(have.norms, want.norms)
