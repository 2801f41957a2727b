"""What scores cost is counted before they are computed, and a long run is told of before it starts."""

import time
import warnings

import pytest
import torch
from torch import nn

import qualms
from qualms.methods import pricing


def wide(classes: int = 600) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, classes)
    )


def passes(spec: str, **how: object) -> float:
    return qualms.Scorer(wide(), spec, **how).price(torch.randn(2, 16)).forward_passes


def test_a_price_follows_the_classes_the_draws_and_the_engine() -> None:
    assert passes("entropy") == 1
    assert passes("perturb-x(0.1,10)") == 11
    assert 600 < passes("regrad", engine="exact") < 1300
    assert passes("regrad") < 40
    assert passes("regrad+smooth(0.1,8)", engine="exact") > 8 * passes("regrad", engine="exact")
    assert passes("regrad", tolerance=0.3) < passes("regrad", tolerance=0.01)
    assert passes("coherence") < passes("regrad", engine="exact") / 5
    assert passes("regrad", engine="sketch") == 1 + 3 * 16
    # Plain autograd: a forward pass, and for each class a backward pass with weight gradients.
    assert passes("regrad", engine="reference") == 1 + 1 + 2 * 600


def test_scores_that_share_a_pass_are_paid_once() -> None:
    both = (
        qualms.Scorer(wide(), ["regrad", "exgrad", "entropy"])
        .price(torch.randn(2, 16))
        .forward_passes
    )
    assert both < 1.5 * passes("regrad")


def test_a_price_has_seconds_bytes_and_how_it_is_known() -> None:
    found = qualms.Scorer(wide(), "regrad", budget=2**28).price(torch.randn(2, 16))
    assert 0 < found.seconds < 60
    assert found.nbytes == 2**28
    assert found.known == "counted"


def test_a_long_run_is_told_of_before_it_starts_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pricing, "LONG_SECONDS", 1e-6)
    scorer, x = (
        qualms.Scorer(wide(40), "regrad+layers+smooth(0.1,2)", engine="exact"),
        torch.randn(2, 16),
    )
    with pytest.warns(
        qualms.SlowWarning,
        match="scoring 2 inputs will take about .* minutes .* forward passes each",
    ):
        scorer(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scorer(x)


class Slow(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(1e-3)
        return super().forward(x)


def test_a_long_sketch_of_few_classes_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its passes follow the tangents: 1536 here, where all classes would take 12 at most."""
    monkeypatch.setattr(pricing, "LONG_SECONDS", 0.3)
    scorer = qualms.Scorer(Slow(4, 3), "regrad", engine=qualms.Sketch(512))
    with pytest.warns(qualms.SlowWarning, match="scoring 2 inputs will take"):
        scorer(torch.randn(2, 4))


@pytest.mark.filterwarnings("ignore::qualms.SlowWarning")
def test_inner_products_that_would_be_computed_over_and_over_are_an_error_that_says_what_they_take() -> (
    None
):
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4000))
    with pytest.raises(
        qualms.QualmsError,
        match=r"8 of 58 gradients of one input need about .* MiB.* larger `budget`",
    ):
        qualms.score(model, torch.randn(2, 8), "coherence", budget=2**22)
    assert qualms.score(model, torch.randn(2, 8), "coherence", budget=2**28).isfinite().all()
