"""Whatever a method may not be given is refused when it is made, in a sentence that names the
method.
"""

import math
from contextlib import suppress
from dataclasses import fields
from typing import Any

import jaxtyping
import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import qualms
from qualms.methods import METHODS, GradientScore, Method, parse
from qualms.methods.gradient_score import SMOOTHING
from qualms.methods.registry import BY_NAME, MODIFIERS
from qualms.parameters import (
    FINITE_OR_NONE,
    NOISE,
    NOT_NEGATIVE,
    PERCENTILE,
    POSITIVE,
    SHARE,
    Rule,
    whole,
)

NO_NUMBERS = (None, "0.1", True, [0.1], math.nan, math.inf, -math.inf, torch.tensor(0.1))
NOT_POSITIVE = (*NO_NUMBERS, 0, 0.0, -0.1)
NOT_POSITIVE_NOISE = (*NOT_POSITIVE, (), (0.1, 0.0), (0.1, -1.0), (math.nan,), ("a",), (True,))
NOT_WHOLE = (*NO_NUMBERS, 0, -3, 2.7, 2.0, (4,))
# By what a rule allows: a new parameter has its cases by its rule.
BAD: dict[str, tuple[Any, ...]] = {
    POSITIVE.allowed: (*NOT_POSITIVE, (0.1,)),
    NOT_NEGATIVE.allowed: (*NO_NUMBERS, -0.1, (0.1,)),
    SHARE.allowed: (*NOT_POSITIVE, 1, 1.0, 2.0),
    PERCENTILE.allowed: (*NOT_POSITIVE, 100, 100.0, 101, (85.0,)),
    NOISE.allowed: NOT_POSITIVE_NOISE,
    whole(0).allowed: (*NO_NUMBERS, -3, 2.7, (4,)),
    whole(1).allowed: NOT_WHOLE,
    whole(2).allowed: (*NOT_WHOLE, 1),
    FINITE_OR_NONE.allowed: (
        *("0.3", True, [0.3], (0.3,), math.nan, math.inf, -math.inf),
        10**400,
    ),
    SMOOTHING.allowed: (0.02, (0.02, 8), True, "0.02", math.nan),
}
# The rule of each parameter, written out: a looser one would loosen the cases as well.
RULES: dict[str, dict[str, Rule]] = {
    "perturb-x": {"sigma": NOISE, "draws": whole(1)},
    "perturb-theta": {"sigma": POSITIVE, "draws": whole(1)},
    "mc-aa": {"a": NOISE, "draws": whole(2)},
    "inserted-dropout": {"p": SHARE, "draws": whole(2)},
    "laplace": {"prior_precision": POSITIVE, "draws": whole(2)},
    "gen": {"gamma": POSITIVE, "top": whole(1)},
    "mc-dropout": {"draws": whole(2)},
    "mc-batchnorm": {"draws": whole(2)},
    "scale": {"percentile": PERCENTILE},
    "ash-s": {"percentile": PERCENTILE},
    "lts": {"percentile": PERCENTILE},
    "odin": {"temperature": POSITIVE, "epsilon": NOISE},
    "knn": {"k": whole(1)},
    "vim": {"dimensions": whole(0)},
    "react": {"quantile": SHARE},
    "quam": {
        "steps": whole(2),
        "penalty": POSITIVE,
        "growth": POSITIVE,
        "every": whole(1),
        "rate": POSITIVE,
        "weight_decay": NOT_NEGATIVE,
        "temperature": POSITIVE,
    },
    **{
        kind.name: {"layers": FINITE_OR_NONE, "smooth": SMOOTHING}
        for kind in METHODS
        if issubclass(kind, GradientScore)
    },
}
CASES = [
    (kind.name, parameter, value)
    for kind in METHODS
    for parameter, rule in kind.rules.items()
    for value in BAD[rule.allowed]
]
# The mutual information of one draw is zero, and so is the divergence of the given model, QUAM's
# first.
SEVERAL = {
    *("mc-aa", "inserted-dropout", "laplace", "mc-dropout", "mc-batchnorm"),
    "quam",
}
BAD_SMOOTHING = ("0", "-1", "nan", "inf", "0.02,0", "0.02,-2", "0.02,2.5", "0.02,inf", "0.02,nan")
GOOD: list[tuple[str, dict[str, Any]]] = [
    ("perturb-x", {"sigma": np.float32(0.5), "draws": np.int64(3)}),
    ("perturb-x", {"sigma": (np.float64(0.5), 1)}),
    ("perturb-theta", {"sigma": 2, "draws": 1}),
    ("gen", {"gamma": np.float16(0.5), "top": np.uint8(1)}),
    ("inserted-dropout", {"p": 0.999, "draws": 2}),
    ("laplace", {"draws": 10**9}),
    ("scale", {"percentile": np.float32(99.5)}),
    ("odin", {"temperature": 1, "epsilon": (np.float64(0.5), 1)}),
    ("vim", {"dimensions": 0}),
    ("quam", {"steps": np.int16(2), "weight_decay": 0}),
    ("regrad", {"layers": np.float32(-0.5)}),
]


@pytest.fixture(autouse=True)
def _as_users_meet_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Annotations are enforced in tests, and would answer before qualms does."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


def made(name: str, given: dict[str, Any]) -> Method:
    kind: Any = BY_NAME[name]
    return kind(**given)


def sayable(name: str, parameter: str, value: Any) -> bool:
    """A spec has numbers only, 2.0 counts as two in it, and smoothing has a table of its own."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return (
        number
        and parameter != "smooth"
        and not (parameter in ("draws", "top", "k", "steps", "every") and value == 2)
    )


def test_every_parameter_of_every_method_has_a_rule() -> None:
    for kind in METHODS:
        assert {f.name for f in fields(kind)} == set(kind.rules), kind.name


def test_the_rules_are_as_strict_as_they_were() -> None:
    for name, rules in RULES.items():
        have = {parameter: rule.allowed for parameter, rule in BY_NAME[name].rules.items()}
        assert have == {parameter: rule.allowed for parameter, rule in rules.items()}, name


def test_what_one_draw_would_make_zero_needs_two() -> None:
    several = {
        kind.name
        for kind in METHODS
        if whole(2).allowed in [rule.allowed for rule in kind.rules.values()]
    }
    assert several == SEVERAL


@pytest.mark.parametrize(("name", "parameter", "value"), CASES)
def test_a_bad_parameter_is_refused(name: str, parameter: str, value: Any) -> None:
    with pytest.raises(qualms.QualmsError, match=rf"^{name} has {parameter} .*; it must be .*\.$"):
        made(name, {parameter: value})


@pytest.mark.parametrize(("name", "parameter", "value"), [case for case in CASES if sayable(*case)])
def test_a_bad_number_in_a_spec_is_refused(name: str, parameter: str, value: float) -> None:
    text = "inf" if value == 10**400 else str(value)
    own = {f.name: str(f.default) for f in fields(BY_NAME[name])}
    before = list(own.values())[: list(own).index(parameter)]
    spec = (
        f"{name}+layers({text})"
        if parameter == "layers"
        else f"{name}({','.join([*before, text])})"
    )
    with pytest.raises(qualms.QualmsError, match=f"^{name} has {parameter} "):
        parse(spec)


@pytest.mark.parametrize("name", [kind.name for kind in METHODS if issubclass(kind, GradientScore)])
@pytest.mark.parametrize("inside", BAD_SMOOTHING)
def test_bad_smoothing_in_a_spec_is_refused(name: str, inside: str) -> None:
    with pytest.raises(
        qualms.QualmsError, match=rf"'{name}\+smooth.*smoothing has (sigma|draws) .*; it must be"
    ):
        parse(f"{name}+smooth({inside})")


@pytest.mark.parametrize(
    "given", [{"sigma": v} for v in NOT_POSITIVE_NOISE] + [{"draws": v} for v in NOT_WHOLE]
)
def test_bad_smoothing_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(qualms.QualmsError, match=r"^smoothing has (sigma|draws) .*; it must be"):
        qualms.Smoothing(**given)


@pytest.mark.parametrize(("name", "given"), GOOD)
def test_numpys_numbers_become_pythons(name: str, given: dict[str, Any]) -> None:
    method = made(name, given)
    for parameter, value in given.items():
        kept = vars(method)[parameter]
        assert kept == value
        assert all(
            type(one) in (int, float) for one in (kept if isinstance(kept, tuple) else [kept])
        )
    assert repr(qualms.Smoothing(np.float32(0.5), np.int32(2))) == repr(qualms.Smoothing(0.5, 2))


NUMBERS = st.one_of(
    st.sampled_from(
        [
            "0",
            "1",
            "2",
            "8",
            "0.5",
            "nan",
            "inf",
            "-inf",
            "-1",
            "1e400",
            "1e+2",
            "-0",
            "",
            "a",
            "1_0",
            "(1",
        ]
    ),
    st.floats().map(repr),
    st.integers().map(str),
)
WORDS = st.sampled_from([*BY_NAME, *MODIFIERS, "", "regard", "PERTURB_X"])
PARTS = st.builds(
    lambda name, inside: name if inside is None else f"{name}({','.join(inside)})",
    WORDS,
    st.none() | st.lists(NUMBERS, max_size=3),
)
TEXTS = st.one_of(
    st.lists(PARTS, min_size=1, max_size=4).map("+".join), st.text("regad+(),.0123 -eninf\n")
)


@given(TEXTS)
@example("inserted-dropout(1.0,4)")
@example("inserted-dropout(2.0,4)")
@example("perturb-x(0.1,2.7)")
@example("perturb-x(0.1,nan)")
@example("regrad+smooth(0.02,inf)")
@example("gen(5,-3)")
def test_any_text_is_a_method_or_an_error_in_a_sentence(text: str) -> None:
    with suppress(qualms.QualmsError):
        assert isinstance(parse(text), Method)


def test_levels_per_channel_must_fit_the_input() -> None:
    model, x = (
        torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 3)),
        torch.rand(2, 3, 2, 2),
    )
    assert qualms.score(model, x, qualms.methods.MCAA((0.1, 0.2, 0.3), 4)).shape == (2,)
    for method in (qualms.methods.MCAA((0.1, 0.2), 4), qualms.methods.PerturbX((0.1, 0.2), 4)):
        with pytest.raises(qualms.QualmsError, match=r"2 values of"):
            qualms.score(model, x, method)
