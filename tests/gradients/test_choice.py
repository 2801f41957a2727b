"""`engine="auto"`, the default, is exact where that is affordable and says which it was; counts
decide, no clock.
"""

import logging

import pytest
import torch
from torch import nn

import qualms
from qualms.gradients.directions import Directions
from qualms.gradients.engines import choice
from qualms.gradients.engines.choice import MAX_EXACT_PASSES, TOLERANCE
from qualms.gradients.isolation import preserve_state
from qualms.gradients.plan_cache import PlanCache
from qualms.gradients.request import GradientRequest
from qualms.gradients.settings import Settings
from tests import networks as net


def wide(classes: int = 600) -> nn.Sequential:
    """Many classes from as many features: the exact engine needs a pass for each."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, classes)
    )


def test_few_classes_are_all_measured_by_default() -> None:
    model, x = net.mnist_cnn(), torch.randn(6, 1, 12, 12)
    assert torch.equal(qualms.score(model, x), qualms.score(model, x, engine="exact"))
    assert torch.equal(qualms.score(model, x), qualms.score(model, x, engine="auto"))


@pytest.mark.parametrize(
    "spec", ["regrad", "regrad+layers", "fisher", "exgrad+layers+smooth(0.1,2)"]
)
def test_of_many_classes_some_are_measured_within_three_percent(spec: str) -> None:
    model, x = wide(), torch.randn(6, 16)
    scorer = qualms.Scorer(model, spec)
    scored = scorer(x)
    assert (scorer.settings.engine, scorer.settings.tolerance) == ("exact", TOLERANCE)
    error = scored.errors[spec] / scored.scores[spec]
    assert ((error > 0) & (error <= TOLERANCE)).all()
    exact = qualms.score(model, x, spec, engine="exact")
    assert ((scored.scores[spec] / exact - 1).abs() < 3 * TOLERANCE).all()


def test_a_named_engine_and_a_given_tolerance_are_kept() -> None:
    model, x = wide(), torch.randn(2, 16)
    exact = qualms.Scorer(model, "regrad", engine="exact")(x)
    assert not exact.errors["regrad"].any()
    assert torch.equal(qualms.score(model, x, "regrad", tolerance=0.0), exact.scores["regrad"])
    loose = qualms.Scorer(model, "regrad", tolerance=0.1)
    loose(x)
    assert (loose.settings.engine, loose.settings.tolerance) == ("exact", 0.1)
    sketched = qualms.Scorer(model, "regrad", engine="sketch")
    sketched(x)
    assert sketched.settings.engine == "sketch"


def counted(model: nn.Module, x: torch.Tensor, classes: int) -> float:
    with preserve_state(model) as inner:
        job = GradientRequest(inner, x, range(len(x)), Settings(), Directions(("classes",)))
        return choice.count_exact_passes(job, classes, PlanCache())


def test_work_is_counted_from_the_shapes_of_the_layers() -> None:
    """Linear layers on vectors: a backward pass takes what a forward pass takes, the norms ‖δ‖‖a‖
    at most as much.
    """
    passes = counted(wide(600), torch.randn(4, 16), 600)
    assert 2 + 600 <= passes <= 2 + 2 * 600
    assert counted(wide(600), torch.randn(4, 16), 600) == passes
    few = nn.Sequential(
        nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 600)
    )  # a pass for each feature instead
    assert counted(few, torch.randn(4, 16), 600) < MAX_EXACT_PASSES


def test_norms_of_every_class_and_layer_are_sketched_where_they_are_too_many_and_the_user_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, x = wide(), torch.randn(2, 16)
    assert qualms.class_gradient_norms(model, x, engine="auto").engine == "sketch"
    (told,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "engine='auto' picked sketch" in told.getMessage()
    assert (
        qualms.class_gradient_norms(
            net.mnist_cnn(), torch.randn(2, 1, 12, 12), engine="auto"
        ).engine
        == "exact"
    )
