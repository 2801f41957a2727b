"""A spec names a method with its modifiers; a misspelt one is answered with what is close."""

import jaxtyping
import pytest
import torch
from torch import nn

import qualms
from qualms.methods.gradients import REGrad
from qualms.methods.logits import GEN
from qualms.methods.perturb_inputs import PerturbX
from qualms.methods.registry import METHODS, parse
from qualms.models.cnn import mnist_cnn

GOOD = {
    "regrad": REGrad(),
    "regrad+layers": REGrad(layers=0.3),
    "regrad+layers+smooth": REGrad(layers=0.3, smooth=qualms.Smoothing(0.02, 8)),
    "regrad+smooth+layers(0.4)": REGrad(layers=0.4, smooth=qualms.Smoothing()),
    "RegRad + layers( 0.4 ) + smooth(1e-2, 16)": REGrad(
        layers=0.4, smooth=qualms.Smoothing(0.01, 16)
    ),
    "regrad+layers(0)": REGrad(layers=0.0),
    "perturb_x(0.02)": PerturbX(sigma=0.02),
    "gen(0.5, 20)": GEN(0.5, 20),
}
BAD = {
    "regard": "did you mean regrad",
    "enrgy": "did you mean energy",
    "xyz": "choose one of regrad, exgrad",
    "regrad+layer": "did you mean layers",
    "regrad+smoth(0.1)": "did you mean smooth",
    "regrad+layers(a)": "pass a name with numbers in parentheses",
    "regrad+layers(0.1": "pass a name with numbers in parentheses",
    "regrad+layers(1,2)": "takes at most 1",
    "regrad+smooth(0.1,2.5)": "draws 2.5; it must be a whole number",
    "regrad+smooth+smooth": "twice",
    "regrad+layers(0.1)+layers(0.1)": "twice",
    "entropy+layers": "applies only to gradient scores",
    "entropy(3)": "takes no parameters",
    "regrad+smooth(-1)": "positive number",
    "": "is not a method",
}


@pytest.mark.parametrize("spec", GOOD)
def test_a_spec_is_a_method(spec: str) -> None:
    assert parse(spec) == GOOD[spec]


@pytest.mark.parametrize("spec", BAD)
def test_a_misspelt_spec_gets_help(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        jaxtyping.config, "jaxtyping_disable", True
    )  # it would answer before qualms does
    with pytest.raises(qualms.QualmsError, match=BAD[spec]):
        parse(spec)


def test_every_name_parses_to_its_own_method_and_back() -> None:
    for kind in METHODS:
        assert parse(kind.name) == kind()
        assert kind().spec == kind.name
    assert parse("regrad+layers(0.4)+smooth(0.1,4)").spec == "regrad+layers(0.4)+smooth(0.1,4)"


def test_objects_and_specs_give_the_same_scores() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(4, 3), torch.randn(5, 4)
    by_object = qualms.score(model, x, REGrad(layers=0.3, smooth=qualms.Smoothing(0.02, 8)))
    assert torch.equal(by_object, qualms.score(model, x))
    out = qualms.compare(model, x, ["entropy", REGrad(layers=0.4)])
    assert list(out) == ["entropy", "regrad+layers(0.4)"]


def test_the_order_of_methods_and_a_progress_report() -> None:
    told: list[int] = []
    x = torch.randn(3, 4)
    out = qualms.compare(nn.Linear(4, 3), [x, x[:2]], ["msp", "entropy"], progress=told.append)
    assert list(out) == ["msp", "entropy"]
    assert told == [3, 5]


def test_missing_needs_are_named() -> None:
    model, x = nn.Linear(4, 3), torch.randn(3, 4)
    for name, says in {
        "laplace": "laplace needs training data; pass train=",
        "ensemble": "ensemble needs several models",
        "mc-dropout": "needs a dropout layer",
        "mc-batchnorm": "needs batch normalization",
    }.items():
        with pytest.raises(qualms.QualmsError, match=says):
            qualms.score(model, x, name)
    with pytest.raises(qualms.QualmsError, match="needs logits from a final linear layer"):
        qualms.score(nn.Sequential(nn.Linear(4, 3), nn.Tanh()), x, "inserted-dropout")
    with pytest.raises(qualms.QualmsError, match="methods is empty"):
        qualms.compare(model, x, [])


def test_methods_may_have_names_of_ones_own() -> None:
    model, x = mnist_cnn(), torch.rand(2, 1, 28, 28)
    named = qualms.compare(model, x, {"few": "perturb-x(0.1, 4)", "many": PerturbX(0.1, 8)})
    assert list(named) == ["few", "many"]
    assert not torch.equal(named["few"], named["many"])


def test_two_methods_of_one_name_are_refused_and_the_same_one_twice_is_not() -> None:
    model, x = mnist_cnn(), torch.rand(2, 1, 28, 28)
    with pytest.raises(qualms.QualmsError, match="two methods are called 'perturb-x'"):
        qualms.compare(model, x, [PerturbX(0.1), PerturbX(0.2)])
    assert list(qualms.compare(model, x, ["entropy", "entropy"])) == ["entropy"]
