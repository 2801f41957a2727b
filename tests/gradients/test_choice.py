"""`engine="auto"` takes the cheaper engine and says so."""

import logging
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import qualms
from qualms.gradients import choice
from tests import networks as net

pytestmark = pytest.mark.usefixtures("undisturbed")


def wide() -> nn.Sequential:
    """Many classes from as many features: the exact engine needs a pass for each."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 600))


def test_few_classes_are_done_exactly(caplog: pytest.LogCaptureFixture) -> None:
    model, x = net.mnist_cnn(), torch.randn(6, 1, 12, 12)
    with caplog.at_level(logging.INFO, logger="qualms"):
        have = qualms.score(model, x, engine="auto")
    assert torch.equal(have, qualms.score(model, x))
    assert "engine='auto' picked exact" in caplog.text


def test_many_classes_are_sketched_and_the_user_is_told(caplog: pytest.LogCaptureFixture) -> None:
    model, x = wide(), torch.randn(6, 16)
    have = qualms.score(model, x, "regrad+layers", engine="auto")
    assert torch.equal(have, qualms.score(model, x, "regrad+layers", engine="sketch"))
    (told,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "engine='auto' picked sketch" in told.getMessage()


def test_the_choice_follows_the_measured_times(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = net.mlp(), torch.randn(4, 3, 4, 4)
    for exact, sketch, engine in ((1.0, 0.6, "exact"), (1.0, 0.4, "sketch"), (1.0, float("inf"), "exact")):
        monkeypatch.setattr(choice, "_exact_seconds", lambda *_, seconds=exact: seconds)
        monkeypatch.setattr(choice, "_sketch_seconds", lambda *_, seconds=sketch: seconds)
        assert qualms.class_gradient_norms(model, x, engine="auto").engine == engine


@pytest.mark.parametrize(("seconds", "runs"), [(1.0, 2), (0.008, 3), (0.001, choice.RUNS)])
def test_short_runs_are_timed_more_often_and_the_quickest_counts(
    seconds: float, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, done = 0.0, 0

    def run() -> None:
        nonlocal now, done
        done += 1
        now += seconds if done == 2 else 1.5 * seconds

    monkeypatch.setattr(choice, "time", SimpleNamespace(perf_counter=lambda: now))
    assert choice._seconds(run) == pytest.approx(seconds)
    assert done == runs


def test_few_classes_make_the_exact_engine_cheap() -> None:
    model, x = wide(), torch.randn(6, 16)
    model[4].weight.data *= 40  # few classes are likely, so few have to be run
    for tolerance, engine in ((0.0, "sketch"), (0.05, "exact"), (1e-6, "sketch")):
        assert qualms.Scorer(model, "regrad", engine="auto", tolerance=tolerance).choose_engine(x) == engine


@pytest.mark.slow
def test_a_model_that_cannot_be_sketched_is_done_exactly() -> None:
    class Rounds(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.round()

        @staticmethod
        def backward(ctx: object, g: torch.Tensor) -> torch.Tensor:
            return g

    class Quantised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = wide()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body[4](Rounds.apply(self.body[:4](x)))

    model, x = Quantised(), torch.randn(2, 16)
    assert torch.equal(qualms.score(model, x, "exgrad", engine="auto"), qualms.score(model, x, "exgrad"))
