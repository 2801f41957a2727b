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
from qualms.threshold import Provenance


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


@given(
    st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=40),
    st.floats(0, 0.9),
)
def test_risk_is_kept_and_nothing_larger_would_keep_it(
    pairs: list[tuple[int, bool]], risk: float
) -> None:
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
    with pytest.raises(qualms.QualmsError, match=r"coverage=2.* is invalid"):
        Threshold.from_scores([1.0], 2.0)
    with pytest.raises(qualms.QualmsError, match="empty"):
        Threshold.from_scores([], 0.5)
    with pytest.raises(qualms.QualmsError, match="2 scores and 1 outcomes"):
        Threshold.from_labels([1.0, 2.0], [True])
    with pytest.raises(qualms.QualmsError, match=r"risk=1.* is invalid"):
        Threshold.from_labels([1.0], [True], risk=1.0)


# With a confidence.


def labeled(n: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores of n inputs, and whether each is right: the higher the score, the less often."""
    scores = torch.rand(n, generator=generator, dtype=torch.double)
    return scores, torch.rand(n, generator=generator, dtype=torch.double) >= 0.4 * scores**3


def true_risk(value: float) -> float:
    """How often inputs below a score are wrong, on average over all there are."""
    return 0.1 * min(1.0, max(0.0, value)) ** 3


def test_the_risk_is_exceeded_less_often_than_the_confidence_allows() -> None:
    """The plug-in rule, set on the same inputs, exceeds it about every second time."""
    generator, risk, confidence = torch.Generator().manual_seed(0), 0.05, 0.9
    exceeded, plug_in, accepted = 0, 0, []
    for _ in range(400):
        scores, right = labeled(800, generator)
        plug_in += true_risk(Threshold.from_labels(scores, right, risk).value) > risk
        try:
            t = Threshold.from_labels(scores, right, risk, confidence)
        except qualms.QualmsError:
            continue
        exceeded += true_risk(t.value) > risk
        accepted.append(float(t.accept(scores).double().mean()))
    assert plug_in > 0.3 * 400
    assert exceeded <= (1 - confidence) * 400
    assert len(accepted) > 380
    assert (
        sum(accepted) / len(accepted) > 0.4
    )  # it would be easy to keep any promise by accepting nothing


def test_scores_that_tell_nothing_are_rarely_lucky() -> None:
    """Each input is wrong a little more often than allowed, whatever its score, so accepting any
    breaks the promise.
    """
    generator, lucky = torch.Generator().manual_seed(2), 0
    for _ in range(400):
        scores, right = (torch.rand(800, generator=generator) for _ in range(2))
        try:
            Threshold.from_labels(scores, right >= 0.051, 0.05, 0.9)
        except qualms.QualmsError:
            continue
        lucky += 1
    assert 0 < lucky <= 40


def test_equal_scores_keep_the_promise_too() -> None:
    generator = torch.Generator().manual_seed(1)
    exceeded = 0
    for _ in range(300):
        scores, right = labeled(400, generator)
        coarse = (10 * scores).ceil() / 10
        try:
            t = Threshold.from_labels(coarse, right, 0.05, 0.9)
        except qualms.QualmsError:
            continue
        exceeded += true_risk(math.floor(10 * t.value + 1e-9) / 10) > 0.05
    assert exceeded <= 30


def test_too_few_inputs_are_told_how_many_it_takes() -> None:
    right = torch.ones(300, dtype=torch.bool)
    assert (
        int(
            Threshold.from_labels(torch.arange(300.0), right, 0.01, 0.95)
            .accept(torch.arange(300.0))
            .sum()
        )
        == 299
    )
    with pytest.raises(
        qualms.QualmsError,
        match=r"at most 1 % among .* with 95 % confidence, requires 300 .* there are only 299; add 1",
    ):
        Threshold.from_labels(torch.arange(299.0), right[:299], 0.01, 0.95)
    right[[5, 280]] = False
    with pytest.raises(
        qualms.QualmsError,
        match=r"requires about \d+ labeled inputs, as 2 of the 299 most certain are wrong",
    ):
        Threshold.from_labels(torch.arange(300.0), right, 0.01, 0.95)
    with pytest.raises(
        qualms.QualmsError,
        match=r"cannot be guaranteed: of the \d+ most certain of 300 labeled inputs \d+ are wrong",
    ):
        Threshold.from_labels(torch.arange(300.0), torch.arange(300) % 3 > 0, 0.01, 0.95)
    with pytest.raises(qualms.QualmsError, match="all have the same score"):
        Threshold.from_labels(torch.zeros(300), right, 0.01, 0.95)
    with pytest.raises(qualms.QualmsError, match="both must be above 0"):
        Threshold.from_labels([1.0], [True], 0.0, 0.95)


# What it remembers.


def test_percentiles_of_many_scores_are_good_to_a_tenth_of_a_percent() -> None:
    scores = (
        torch.randn(20_000, generator=torch.Generator().manual_seed(0), dtype=torch.double) ** 3
    )
    t = Threshold.from_scores(scores)
    assert len(t.reference) == 1001
    at = torch.tensor([-100.0, -1.0, 0.0, 0.5, 4.0, 100.0], dtype=torch.double)
    want = [100 * float((scores < one).double().mean()) for one in at]
    assert t.percentile(at).tolist() == pytest.approx(want, abs=0.11)
    with pytest.raises(qualms.QualmsError, match="does not include the scores"):
        Threshold(1.0, 0, "given").percentile([1.0])


def test_what_made_it_is_saved_and_files_of_the_old_form_are_read(tmp_path: Path) -> None:
    provenance = Provenance("Entropy()", "0123", seed=3)
    t = Threshold.from_scores(torch.rand(50), 0.9, provenance=provenance)
    t.save(tmp_path / "t.json")
    assert Threshold.load(tmp_path / "t.json") == t
    (tmp_path / "old.json").write_text('{"value": 1.5, "samples": 7, "rule": "coverage 0.9"}\n')
    assert Threshold.load(tmp_path / "old.json") == Threshold(1.5, 7, "coverage 0.9")
    for broken in (
        '{"value": 1, "samples": 7, "rule": "", "provenance": {"nobody": 1}}',
        "[1]",
        '{"value": "x"}',
    ):
        (tmp_path / "bad.json").write_text(broken)
        with pytest.raises(qualms.QualmsError, match="is not a threshold file"):
            Threshold.load(tmp_path / "bad.json")
    with pytest.raises(qualms.QualmsError, match="cannot be read"):
        Threshold.load(tmp_path)
