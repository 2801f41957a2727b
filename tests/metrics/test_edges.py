"""Measures of arrays at the edges: ties, one class only, no numbers, numbers that are none, and
very many.
"""

from collections.abc import Callable
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch

from qualms import QualmsError
from qualms.metrics import (
    accuracy,
    aupr,
    aurc,
    auroc,
    fpr95,
    interval,
    lift_curve,
    nll,
    pixel_metrics,
    prr,
    raulc,
    risk_coverage,
    roc,
)

RANKINGS: list[Callable[..., Any]] = [auroc, aupr, fpr95, roc]
PAIRED: list[Callable[..., Any]] = [raulc, lift_curve, aurc, risk_coverage, prr]
BAD = {
    "NaN": [0.1, np.nan],
    "infinite": [0.1, np.inf],
    "empty": [],
    "two axes": [[0.1, 0.2]],
    "text": ["a", "b"],
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("measure", [*RANKINGS, *PAIRED])
def test_scores_that_are_no_numbers_are_told(measure: Callable[..., Any], name: str) -> None:
    for arguments in ((BAD[name], [0.0, 1.0]), ([0.0, 1.0], BAD[name])):
        with pytest.raises(QualmsError):
            measure(*arguments)


def test_constant_scores_are_chance_however_many_there_are() -> None:
    n = 1_000_000
    known, unknown = np.full(n, 0.3, np.float16), np.full(3 * n, 0.3, np.float16)
    assert auroc(known, unknown) == 0.5
    assert aupr(known, unknown) == 0.75
    assert fpr95(known, unknown) == 1
    right = np.arange(n) % 4 > 0
    assert abs(raulc(known, right)) < 1e-9
    assert abs(prr(known, right)) < 1e-9
    assert aurc(known, right) == pytest.approx(0.25, abs=1e-12)


def test_arrays_of_16_bits_rank_as_the_same_numbers_in_64() -> None:
    noise = np.random.default_rng(0)
    known, unknown = (noise.normal(at, 1, 500).astype(np.float16) for at in (0, 1))
    right = noise.random(500) < 0.7
    for measure in (auroc, aupr, fpr95):
        assert measure(known, unknown) == measure(known.astype(float), unknown.astype(float))
        assert measure(torch.tensor(known), torch.tensor(unknown)) == measure(known, unknown)
    for measure in (raulc, aurc):
        assert measure(known, right) == measure(known.astype(float), right)


@pytest.mark.parametrize("tiny", [1e-320, 1e-45, 1.0, 1e308])
def test_the_unit_of_scores_and_qualities_does_not_matter(tiny: float) -> None:
    u, q = np.array([0.1, 0.4, 0.2, 0.9]), np.array([0.75, 0.25, 0.5, -0.5])
    assert auroc(u[:2] * tiny, u[2:] * tiny) == auroc(u[:2], u[2:])
    assert prr(u, q * tiny) == pytest.approx(prr(u, q), rel=1e-2 if tiny < 1e-308 else 1e-12)
    assert prr(u, q + 1e9) == pytest.approx(prr(u, q), rel=1e-5)


def test_one_class_only_has_no_ranking() -> None:
    for measure in (raulc, prr):
        for outcome in (True, False):
            with pytest.raises(QualmsError, match="equally good"):
                measure([0.1, 0.2], [outcome, outcome])
    with pytest.raises(QualmsError, match="AUROC is undefined"):
        pixel_metrics(np.zeros((1, 2, 2)), np.zeros((1, 2, 2), int), unknown=7)
    assert aurc([0.1, 0.2], [True, True]) == 0
    assert aurc([0.1, 0.2], [False, False]) == 1


@pytest.mark.parametrize("margin", [1.0, 20.0, 40.0, 200.0, 700.0])
def test_the_likelihood_of_a_certain_and_right_prediction_keeps_its_digits(margin: float) -> None:
    want = (1 + 2 * (-Decimal(margin)).exp()).ln() if margin < 50 else 2 * (-Decimal(margin)).exp()
    assert nll([[margin, 0.0, 0.0]], [0]) == pytest.approx(float(want), rel=1e-12)
    assert nll([[margin, 0.0, 0.0]], [1]) == pytest.approx(margin + float(want), rel=1e-12)
    assert accuracy([[margin, 0.0, 0.0]], [0]) == 1


def test_equal_logits_have_the_likelihood_of_chance() -> None:
    assert nll(np.full((3, 8), 1e4, np.float32), [0, 3, 7]) == pytest.approx(np.log(8), rel=1e-15)


def test_an_interval_of_constant_scores_is_a_point() -> None:
    assert interval(auroc, np.full(50, 0.1), np.full(20, 0.1), resamples=20) == (0.5, 0.5)
