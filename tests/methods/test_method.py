"""What the rest of qualms may ask of any method, and the names that users reach methods by."""

import importlib
import pkgutil
import subprocess
import sys
from dataclasses import FrozenInstanceError, dataclass, fields

import pytest
import torch
from torch import Tensor, nn

import qualms
from qualms.gradients.settings import Engine, Settings, Sketch, Smoothing
from qualms.methods import MCAA, METHODS, GradientScore, Method, PerturbX, REGrad, parse
from qualms.methods.context import BatchContext, ModelContext


@dataclass(frozen=True)
class Margin(Method):
    """p of the runner-up minus p of the winner."""

    power: float = 1.0

    name = "margin"
    paper = "Scheffer et al., 2001"
    needs = ("logits",)
    cost = "1"

    def score(self, passes: BatchContext) -> Tensor:
        top = passes.probs.topk(2).values
        return -((top[:, 0] - top[:, 1]) ** self.power)


@dataclass(frozen=True)
class Likely(GradientScore):
    """The gradient of the likeliest class alone."""

    name = "likely"
    paper = "none"
    cost = "3, and C backward"
    direction = "classes"

    def weights(self, probs: Tensor) -> Tensor:
        return (probs == probs.amax(-1, keepdim=True)).to(probs)


@dataclass(frozen=True)
class Mixture(Method):
    """Made of two scores that nobody else asked for."""

    name = "mixture"
    paper = "none"
    needs = ("gradients",)
    cost = "many"

    def score(self, passes: BatchContext) -> Tensor:
        return parse("gradnorm").score(passes) + 2 * parse("regrad+layers(2)").score(passes)


@dataclass(frozen=True)
class OfLogits(GradientScore):
    """Σ_c ‖∇θ z_c‖."""

    name = "of-logits"
    paper = "none"
    cost = "2, and C backward"
    direction = "logits"

    def weights(self, probs: Tensor) -> Tensor:
        return torch.ones_like(probs)


def setting() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)), torch.randn(6, 5)


def doubled(sigma: float) -> tuple[float, ...]:
    return (2 * sigma, 3 * sigma)


def test_a_method_of_ones_own_goes_everywhere_that_others_go() -> None:
    model, x = setting()
    p = model(x).softmax(-1).sort().values.detach()
    out = qualms.compare(model, x, [Margin(), "entropy", Likely(layers=0.5)])
    assert list(out) == ["margin", "entropy", "likely+layers(0.5)"]
    torch.testing.assert_close(out["margin"], p[:, -2] - p[:, -1])
    g = qualms.class_gradient_norms(model, x)
    first = g.norms[torch.arange(6), g.probs.argmax(1)] @ torch.tensor([-0.5, 0]).exp()
    torch.testing.assert_close(out["likely+layers(0.5)"], first)
    assert len(qualms.select(model, x, 2, Likely(), diversity=2)) == 2
    with pytest.raises(qualms.QualmsError, match="margin is not one"):
        qualms.select(model, x, 2, Margin(), diversity=2)
    assert Margin(2.0).in_units(doubled).quick() == Margin(2.0)


@pytest.mark.parametrize("engine", ["exact", "sketch"])
def test_a_method_may_be_made_of_scores_that_nobody_asked_for(engine: str) -> None:
    model, x = setting()
    parts = qualms.compare(model, x, ["gradnorm", "regrad+layers(2)"], engine=engine)
    for others in ([], ["exgrad"], ["exgrad", "negrad", "regrad+layers(2)"]):
        have = qualms.compare(model, x, [Mixture(), *others], engine=engine, tolerance=0.2)[
            "mixture"
        ]
        torch.testing.assert_close(have, parts["gradnorm"] + 2 * parts["regrad+layers(2)"])


def test_a_score_and_its_error_are_one_estimate() -> None:
    model, x = setting()
    context = BatchContext(ModelContext(model, Settings(Sketch(32))), x)
    estimate = parse("regrad").estimate(context)
    assert estimate.errors is not None
    torch.testing.assert_close(parse("regrad").score(context), estimate.values)
    with pytest.warns(DeprecationWarning, match=r"Method.error .*Method.estimate"):
        torch.testing.assert_close(parse("regrad").error(context), estimate.errors)
    exact = parse("entropy").estimate(context)
    assert exact.errors is None
    assert not exact.errors_as(exact.values.float()).any()


def test_gradients_of_the_logits_are_one_for_each_class() -> None:
    model, x = setting()
    gram = qualms.class_gradient_gram(model, x).gram.sum(1)
    have = qualms.compare(model, x, [OfLogits(), "exgrad", "gradnorm"])["of-logits"]
    torch.testing.assert_close(have, gram.diagonal(dim1=1, dim2=2).sqrt().sum(1))


def test_what_is_not_said_is_as_in_the_paper() -> None:
    said = {
        "perturb-x": "0.008,100",
        "perturb-theta": "0.008,100",
        "mc-aa": "0.0001,100",
        "inserted-dropout": "0.4,100",
    }
    for name, parameters in said.items():
        assert parse(name) == parse(f"{name}({parameters})")


def test_noise_in_pixels_is_converted_once() -> None:
    smooth = Smoothing(0.5, 3, antithetic=False)
    assert REGrad(0.3, smooth).in_units(doubled) == REGrad(
        0.3, Smoothing((1.0, 1.5), 3, antithetic=False)
    )
    assert PerturbX(0.5, 7).in_units(doubled) == PerturbX((1.0, 1.5), 7)
    assert MCAA(0.5, 7).in_units(doubled) == MCAA((1.0, 1.5), 7)
    for kind in METHODS:
        once = kind().in_units(doubled)
        assert once.in_units(doubled) == once
        assert (once == kind()) == (kind.name not in ("perturb-x", "mc-aa", "odin"))


def test_quick_methods_have_two_draws_at_most_and_are_otherwise_the_same() -> None:
    for kind in METHODS:
        quick = kind().quick()
        changed = {f.name for f in fields(kind) if vars(quick)[f.name] != f.default}
        fewer = {
            "vim": {"dimensions"},
            "quam": {"steps"},
        }  # what it takes for them to run on little
        assert changed == fewer.get(kind.name, {"draws"} & set(vars(quick))), kind.name
        assert vars(quick).get("draws", 2) == 2
    assert PerturbX(0.1, 1).quick() == PerturbX(0.1, 1)
    assert REGrad(0.3, Smoothing(0.1, 8)).quick() == REGrad(0.3, Smoothing(0.1, 2))
    assert REGrad(0.3, Smoothing(0.1, 1)).quick() == REGrad(0.3, Smoothing(0.1, 1))


def test_only_gradient_scores_have_directions_and_modifiers() -> None:
    for method in qualms.list_methods():
        assert (method.direction is not None) == isinstance(method, GradientScore), method.name
        assert method.layers is None
        assert method.smooth is None
    starred = parse("exgrad+layers(0.4)+smooth(0.1,4)")
    assert (starred.layers, starred.smooth) == (0.4, Smoothing(0.1, 4))


def test_methods_are_values() -> None:
    for kind in METHODS:
        assert kind() == kind()
        assert hash(kind()) == hash(kind())
        for name in ("layers", "draws", "name"):
            with pytest.raises(FrozenInstanceError):
                setattr(kind(), name, 3)


def test_the_weights_have_one_column_for_each_gradient() -> None:
    probs = torch.tensor([[0.25, 0.25, 0.5]])
    columns = {"classes": 3, "uniform": 1, "expected": 1, "confounding": 1}
    for kind in METHODS:
        if issubclass(kind, GradientScore):
            assert kind().weights(probs).shape == (1, columns[kind.direction]), kind.name


def test_methods_are_reached_by_package_and_by_module() -> None:
    assert qualms.methods.REGrad is REGrad
    assert {kind.__name__ for kind in METHODS} <= set(qualms.methods.__all__)
    assert all(hasattr(qualms.methods, name) for name in qualms.methods.__all__)
    for module in pkgutil.iter_modules(qualms.methods.__path__):
        importlib.import_module(f"qualms.methods.{module.name}")
    assert qualms.methods.gradients.REGrad is REGrad


@dataclass(frozen=True)
class Half(REGrad):
    name = "half"

    def score(self, context: BatchContext) -> Tensor:
        return super().score(context) / 2


@dataclass(frozen=True)
class WithOldError(Method):
    name = "with-old-error"
    paper = "none"
    needs = ("logits",)
    cost = "1"

    def score(self, context: BatchContext) -> Tensor:
        return -context.probs.amax(-1)

    def error(self, context: BatchContext) -> Tensor:
        return torch.full((len(context.probs),), 0.25)


@pytest.mark.parametrize("engine", ["exact", "sketch"])
def test_a_subclass_may_override_the_score_of_a_gradient_score(engine: Engine) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(4, 3).double(), torch.randn(5, 4).double()
    whole, errors = qualms.score_with_error(model, x, "regrad", engine=engine)
    half, same = qualms.score_with_error(model, x, Half(), engine=engine)
    torch.testing.assert_close(half, whole / 2)
    torch.testing.assert_close(same, errors)


def test_an_overridden_error_is_used_with_a_warning() -> None:
    model, x = nn.Linear(4, 3), torch.randn(5, 4)
    with pytest.warns(DeprecationWarning, match=r"use WithOldError\.estimate"):
        errors = qualms.score_with_error(model, x, WithOldError())[1]
    assert errors.tolist() == [0.25] * 5


@pytest.mark.slow
@pytest.mark.parametrize(
    "first", ["qualms.methods.gradients", "qualms.methods.context", "qualms.gradients.settings"]
)
def test_any_module_may_be_imported_first(first: str) -> None:
    subprocess.run([sys.executable, "-c", f"import {first}"], check=True, timeout=120)
