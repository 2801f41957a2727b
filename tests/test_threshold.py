"""Selective prediction."""

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import qualms
from qualms import Threshold


def test_coverage_accepts_at_least_that_share_and_no_more_than_needed() -> None:
    scores = torch.arange(100.0).flip(0)
    t = Threshold.from_scores(scores, coverage=0.95)
    assert int(t.accept(scores).sum()) == 95
    assert t.samples == 100
    assert int(Threshold.from_scores(scores, coverage=1.0).accept(scores).sum()) == 100


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40), st.floats(0.01, 1))
def test_coverage_with_ties(values: list[int], coverage: float) -> None:
    scores = torch.tensor(values, dtype=torch.float)
    t = Threshold.from_scores(scores, coverage)
    accepted = t.accept(scores)
    assert accepted.float().mean() >= coverage - 1e-6
    fewer = scores < t.value
    assert fewer.float().mean() < coverage


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=40), st.floats(0, 0.9))
def test_risk_is_kept_and_nothing_larger_would_keep_it(pairs: list[tuple[int, bool]], risk: float) -> None:
    scores = torch.tensor([float(s) for s, _ in pairs])
    correct = torch.tensor([c for _, c in pairs])
    t = Threshold.from_labels(scores, correct, risk)
    accepted = t.accept(scores)
    if accepted.any():
        assert (~correct[accepted]).double().mean() <= risk + 1e-9
    for value in scores[~accepted].unique():
        assert (~correct[scores <= value]).double().mean() > risk


def test_nothing_is_accepted_when_even_the_most_certain_are_wrong(tmp_path: Path) -> None:
    t = Threshold.from_labels([1.0, 2.0], [False, True], risk=0.1)
    assert t.value == -math.inf
    assert not t.accept(torch.tensor([-1e30])).any()
    t.save(tmp_path / "t.json")
    assert Threshold.load(tmp_path / "t.json") == t


def test_save_and_load(tmp_path: Path) -> None:
    t = Threshold.from_scores(torch.rand(50), 0.9)
    t.save(tmp_path / "t.json")
    assert Threshold.load(tmp_path / "t.json") == t
    assert json.loads((tmp_path / "t.json").read_text())["samples"] == 50


def test_float32_scores_accept_themselves() -> None:
    scores = torch.rand(1000, dtype=torch.float32)
    assert int(Threshold.from_scores(scores, 0.5).accept(scores).sum()) == 500


def test_errors(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(qualms.QualmsError, match="is not a threshold file"):
        Threshold.load(tmp_path / "bad.json")
    with pytest.raises(qualms.QualmsError, match="no threshold file"):
        Threshold.load(tmp_path / "none.json")
    with pytest.raises(qualms.QualmsError, match="coverage is 2"):
        Threshold.from_scores([1.0], 2.0)
    with pytest.raises(qualms.QualmsError, match="empty"):
        Threshold.from_scores([], 0.5)
    with pytest.raises(qualms.QualmsError, match="2 scores and 1 outcomes"):
        Threshold.from_labels([1.0, 2.0], [True])
    with pytest.raises(qualms.QualmsError, match="risk is 1"):
        Threshold.from_labels([1.0], [True], risk=1.0)
