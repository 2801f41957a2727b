"""Every method on a real CIFAR-10 ResNet-20 that others trained, against real SVHN."""

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.io import loadmat
from scipy.stats import spearmanr
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

import qualms
from qualms.methods.registry import METHODS
from tests.gradients.test_engines_agree import assert_norms_equal
from tests.networks import ResNet

pytestmark = [
    pytest.mark.data,
    pytest.mark.slow,
    pytest.mark.skipif("QUALMS_DATA" not in os.environ, reason="QUALMS_DATA is not set: no real data here"),
]
ROOT = Path(os.environ.get("QUALMS_DATA", "."))
MEAN, STD = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
INPUTS = 48


def resnet20() -> nn.Module:
    model = ResNet((16, 32, 64), 3, 10, padded_shortcut=True)
    path = ROOT / "weights" / "cifar10_akamaster_resnet20-12fca82f.th"
    state = torch.load(path, weights_only=True, map_location="cpu")["state_dict"]
    names = {k: k.removeprefix("module.") for k in state}
    for i in range(3):
        names = {k: v.replace(f"layer{i + 1}.", f"stages.{i}.") for k, v in names.items()}
    model.load_state_dict({names[k]: v for k, v in state.items()})
    return model.eval()


def normalised(images: np.ndarray) -> Tensor:
    """[n, h, w, 3] of bytes."""
    x = torch.tensor(images).permute(0, 3, 1, 2).float() / 255
    return (x - MEAN[:, None, None]) / STD[:, None, None]


def cifar(name: str, count: int) -> tuple[Tensor, Tensor]:
    with open(ROOT / "cifar-10-batches-py" / name, "rb") as file:
        found = pickle.load(file)
    images = np.asarray(found["data"])[:count].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return normalised(images), torch.tensor(found["labels"][:count])


def svhn(count: int) -> Tensor:
    return normalised(loadmat(ROOT / "test_32x32.mat")["X"].transpose(3, 0, 1, 2)[:count])


@pytest.fixture(scope="module")
def scores() -> dict[str, Tensor]:
    torch.set_num_threads(2)
    model = resnet20()
    x, y = cifar("test_batch", 1000)
    with torch.no_grad():
        assert (model(x).argmax(1) == y).float().mean() > 0.9
    sigma = tuple((0.02 / STD).tolist())
    methods: list[object] = [kind() for kind in METHODS if kind.name != "mc-dropout"]  # the network has none
    methods += ["regrad+layers(0.2)", qualms.methods()[0].__class__(layers=0.2, smooth=qualms.Smoothing(sigma))]
    train = cifar("data_batch_1", 512)[0].split(128)
    other = resnet20()
    with torch.no_grad():
        for p in other.parameters():
            p += 0.02 * p.abs().mean() * torch.randn(p.shape, generator=torch.Generator().manual_seed(0))
    both = torch.cat([x[:INPUTS], svhn(INPUTS)])
    found = qualms.compare(model, both, methods, train=list(train), models=[other])
    torch.set_num_threads(1)
    return found


def auroc(values: Tensor) -> float:
    return float(roc_auc_score(torch.arange(2 * INPUTS) >= INPUTS, values))


def test_every_method_runs_and_gives_a_finite_score(scores: dict[str, Tensor]) -> None:
    assert len(scores) == len(METHODS) + 1
    for name, values in scores.items():
        assert values.shape == (2 * INPUTS,), name
        assert torch.isfinite(values).all(), name


def test_the_papers_method_finds_svhn(scores: dict[str, Tensor]) -> None:
    starred = next(name for name in scores if "smooth" in name)
    assert auroc(scores[starred]) > 0.9
    assert auroc(scores[starred]) > auroc(scores["regrad"])
    assert auroc(scores["entropy"]) > 0.8


def test_the_sketch_ranks_real_inputs_like_the_exact_engine(scores: dict[str, Tensor]) -> None:
    x = torch.cat([cifar("test_batch", INPUTS)[0], svhn(INPUTS)])
    found, error = qualms.score_with_error(resnet20(), x, "regrad+layers(0.2)", engine="sketch")
    assert spearmanr(found, scores["regrad+layers(0.2)"])[0] > 0.985
    assert (error < 0.3 * found).all()


def test_the_exact_engine_is_the_reference_on_it() -> None:
    model, x = resnet20(), cifar("test_batch", 2)[0]
    have = qualms.class_gradient_norms(model.double(), x.double())
    want = qualms.class_gradient_norms(model.double(), x.double(), engine="reference")
    assert have.layers == want.layers
    assert have.general == []
    assert_norms_equal(have.norms, want.norms)
