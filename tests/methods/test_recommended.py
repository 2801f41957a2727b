"""`recommended` picks a score by what the network is, and says which and why."""

import pytest
import torch
from torch import nn

import qualms
from qualms.models.cnn import mnist_cnn
from qualms.models.vit import vit_tiny


def both(
    model: nn.Module, x: torch.Tensor, other: str
) -> tuple[qualms.Scored, torch.Tensor, torch.Tensor]:
    scored = qualms.Scorer(model, ["recommended", other])(x)
    return scored, scored.scores["recommended"], scored.scores[other]


def test_features_of_free_length_get_heat() -> None:
    torch.manual_seed(0)
    scored, auto, heat = both(mnist_cnn(), torch.rand(4, 1, 28, 28), "heat")
    assert torch.equal(auto, heat)
    want = "recommended picked heat, because the norm of the classifier's features grows with the input."
    assert scored.notes["recommended"] == want


def test_behind_a_normalization_it_is_gen() -> None:
    torch.manual_seed(0)
    scored, auto, gen = both(vit_tiny(3), torch.rand(2, 3, 32, 32), "gen")
    assert torch.equal(auto, gen)
    assert scored.notes["recommended"].startswith(
        "recommended picked gen, because the norm of the classifier's features"
    )


def test_a_model_that_heat_is_not_for_gets_gen_with_the_reason() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3), nn.Tanh())
    scored, auto, gen = both(model, torch.randn(3, 4), "gen")
    assert torch.equal(auto, gen)
    assert "because heat needs logits from a final linear layer" in scored.notes["recommended"]


def test_its_old_name_goes_on_working_with_a_warning() -> None:
    with pytest.warns(FutureWarning, match="'auto' is deprecated; use 'recommended'"):
        assert qualms.methods.parse("auto") == qualms.methods.parse("recommended")
