"""`tolerance`: early layers are left out as long as that cannot be seen in the score."""

import warnings

import pytest
import torch
from torch import Tensor, nn

import qualms
from tests import networks as net


def deep(width: int = 12, depth: int = 20) -> nn.Sequential:
    torch.manual_seed(0)
    hidden = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(*hidden, nn.Linear(width, 5)).double()


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["regrad+layers(0.6)", "exgrad+layers(0.6)+smooth(0.1)"])
@pytest.mark.parametrize("tolerance", [1e-1, 1e-3])
def test_scores_stay_within_the_tolerance(spec: str, tolerance: float) -> None:
    model = deep()
    x = torch.randn(24, 12, dtype=torch.double)
    exact = qualms.score(model, x, spec)
    have = qualms.score(model, x, spec, batch_size=8, tolerance=tolerance)
    assert ((exact - have) / exact <= tolerance).all()
    assert (have <= exact * (1 + 1e-12)).all()
    assert (have < exact * (1 - 1e-12)).all(), "nothing was left out"


@pytest.mark.slow
def test_passes_stop_where_the_late_layers_begin() -> None:
    class Watched(torch.autograd.Function):
        calls = 0

        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, g: Tensor) -> Tensor:
            Watched.calls += 1
            return g

    class Watching(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Watched.apply(x)

    model = nn.Sequential(nn.Linear(12, 12, dtype=torch.double), Watching(), deep())
    x = torch.randn(40, 12, dtype=torch.double)

    def calls(**more: float) -> int:
        Watched.calls = 0
        qualms.score(model, x, "regrad+layers(0.6)", batch_size=8, **more)
        return Watched.calls

    # Plain autograd goes there along two directions, for the first input and one of the others; no
    # chunk does.
    assert calls() > 30
    assert calls(tolerance=1e-2) == 4


def test_tangents_stop_where_the_late_layers_begin() -> None:
    """A sketch with a tolerance perturbs the late weights alone, and ranks inputs as one of all
    weights does.
    """
    model, x = deep(), torch.randn(40, 12, dtype=torch.double)
    spec = "regrad+layers(0.6)"
    whole = qualms.Scorer(model, spec, engine=qualms.Sketch(tangents=64))(x)
    cut = qualms.Scorer(model, spec, engine=qualms.Sketch(tangents=64), tolerance=0.05)(x)
    assert not torch.equal(cut.scores[spec], whole.scores[spec])
    assert (cut.errors[spec] <= 1.2 * whole.errors[spec] + 0.05 * cut.scores[spec]).all()
    torch.testing.assert_close(cut.scores[spec], whole.scores[spec], rtol=0.5, atol=0)
    ranks = torch.stack([cut.scores[spec], whole.scores[spec]]).argsort(1).argsort(1).double()
    assert torch.corrcoef(ranks)[0, 1] > 0.9
    assert torch.equal(
        qualms.score(model, x, spec, engine="sketch", tolerance=0.0),
        qualms.score(model, x, spec, engine="sketch"),
    )


def test_what_is_left_out_does_not_depend_on_the_batches() -> None:
    model, x = deep(), torch.randn(20, 12, dtype=torch.double)
    whole = qualms.score(model, x, "regrad+layers(0.6)", tolerance=0.01)
    scorer = qualms.Scorer(model, "regrad+layers(0.6)", tolerance=0.01)
    parts = [part.scores["regrad+layers(0.6)"] for part in scorer.stream([x[:1], x[1:8], x[8:]])]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-12, atol=0)


def test_what_is_left_out_counts_as_error() -> None:
    model, x = deep(), torch.randn(8, 12, dtype=torch.double)
    exact = qualms.score(model, x, "regrad+layers(0.6)")
    have, error = qualms.score_with_error(model, x, "regrad+layers(0.6)", tolerance=0.02)
    assert ((error > 0) & (error <= 0.02 * have)).all()
    assert (exact - have <= 2 * error).all()


def test_zero_leaves_out_nothing_and_is_the_default() -> None:
    model, x = deep(), torch.randn(20, 12, dtype=torch.double)
    assert torch.equal(
        qualms.score(model, x, "regrad+layers", batch_size=5),
        qualms.score(model, x, "regrad+layers", batch_size=5, tolerance=0.0),
    )


def test_a_score_that_takes_all_layers_alike_is_exact_whatever_the_tolerance() -> None:
    model, x = deep(), torch.randn(20, 12, dtype=torch.double)
    found = qualms.compare(model, x, ["regrad", "regrad+layers"], batch_size=5, tolerance=0.1)
    for spec, have in found.items():
        torch.testing.assert_close(have, qualms.score(model, x, spec), rtol=1e-10, atol=0)


def test_inputs_unlike_the_first_run_in_full() -> None:
    """The first inputs hardly reach the early layers' weights; later ones do."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.early, self.late = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.late(x + (x[:, :1] > 0) * 100 * self.early(x) + 1e-9 * self.early(x))

    torch.manual_seed(0)
    model, x = Gated().double(), torch.rand(12, 4, dtype=torch.double)
    x[:4, 0] = -1
    have = qualms.score(model, x, "regrad+layers", batch_size=4, tolerance=1e-3)
    torch.testing.assert_close(have, qualms.score(model, x, "regrad+layers"), rtol=1e-3, atol=0)


def test_directions_that_are_no_class_are_looked_at_themselves() -> None:
    """What all logits have in common moves no probability, but it moves the confounding label."""

    class Common(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.early, self.late = nn.Linear(4, 1), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.late(x) + (x[:, :1] > 0) * 100 * self.early(x)

    torch.manual_seed(0)
    model, x = Common().double(), torch.rand(12, 4, dtype=torch.double)
    x[:4, 0] = -1
    have = qualms.score(model, x, "confounding-label+layers", batch_size=4, tolerance=1e-3)
    torch.testing.assert_close(
        have, qualms.score(model, x, "confounding-label+layers"), rtol=1e-3, atol=0
    )


def test_a_bad_tolerance_is_named() -> None:
    for bad in (-0.1, 1.0):
        with pytest.raises(qualms.QualmsError, match="tolerance"):
            qualms.score(net.mlp(), torch.randn(2, 3, 4, 4), tolerance=bad)


def test_models_whose_path_depends_on_the_input_leave_out_nothing() -> None:
    """The first input does not visit the early layer, whose share is therefore unknown; the others
    do.
    """

    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.early, self.late = deep(12, 1)[0], deep()

        def forward(self, x: Tensor) -> Tensor:
            h = x.clone()
            some = x[:, 0] > 0
            if bool(some.any()):
                h[some] = x[some] + self.early(x[some]).tanh()
            z: Tensor = self.late(h)
            return z

    torch.manual_seed(0)
    model, x = Branching().double(), torch.randn(8, 12, dtype=torch.double)
    x[:, 0] = x[:, 0].abs()
    x[0, 0] = -1
    spec = "regrad+layers(0.6)"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", qualms.SlowWarning)
        have = qualms.score(model, x, spec, tolerance=0.02)
        torch.testing.assert_close(have, qualms.score(model, x, spec), rtol=1e-10, atol=0)


def test_an_input_that_uses_no_parameter_that_counts_has_no_share_to_check() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.other = deep(), nn.Linear(12, 5)

        def forward(self, x: Tensor) -> Tensor:
            gate = (x[:, :1] > 0).double()
            z: Tensor = gate * self.inner(x) + self.other(x)
            return z

    torch.manual_seed(0)
    model, x = Experts().double(), torch.randn(40, 12, dtype=torch.double)
    x[:20, 0] = 1
    x[20:, 0] = -1
    spec, params = "regrad+layers(0.6)", "inner.*"
    have = qualms.score(model, x, spec, tolerance=0.02, params=params)
    exact = qualms.score(model, x, spec, params=params)
    assert not have[20:].any()
    assert ((exact - have).abs() <= 0.02 * exact).all()


def test_classes_that_were_measured_with_too_few_layers_are_measured_again() -> None:
    """Classes are added up in turns. A check in the second turn finds that early layers matter: all
    begin anew.
    """

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.early, self.late = nn.Linear(16, 16), nn.Linear(16, 400)

        def forward(self, x: Tensor) -> Tensor:
            far = (x[:, :1] > 0).double()
            z: Tensor = self.late((x + (1e-9 + far) * self.early(x)).tanh())
            return z

    torch.manual_seed(0)
    model, x = (
        Gated().double(),
        torch.rand(1, 16, dtype=torch.double) + 0.1 * torch.rand(14, 16, dtype=torch.double),
    )
    x[:, 0] = 0.1
    x[0, 0] = -0.1  # its early layer adds nothing
    spec = "regrad+layers(0.3)"
    exact = qualms.score(model, x, spec, engine="exact")
    have, error = qualms.score_with_error(model, x, spec, tolerance=0.01)
    assert ((have - exact).abs() <= 4 * error).all()
