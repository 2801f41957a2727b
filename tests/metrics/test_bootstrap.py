"""Intervals hold the truth about as often as they say, and are the same under the same seed."""

import numpy as np
import pytest
from scipy.stats import norm

import qualms
from qualms import metrics


@pytest.mark.slow
def test_the_interval_of_auroc_covers_the_truth_about_as_often_as_it_says() -> None:
    truth = norm.cdf(1 / np.sqrt(2))  # P(N(1, 1) > N(0, 1))
    random = np.random.default_rng(0)
    hits = 0
    for trial in range(200):
        inside, outside = random.normal(0, 1, 60), random.normal(1, 1, 40)
        low, high = metrics.interval(
            metrics.auroc, inside, outside, resamples=100, level=0.8, seed=trial
        )
        hits += low <= truth <= high
    assert 0.7 <= hits / 200 <= 0.88


def test_rows_of_paired_samples_stay_together() -> None:
    uncertainty = np.arange(50.0)
    assert metrics.interval(
        lambda a, b: float((a - b).mean()), uncertainty, uncertainty, paired=True
    ) == (0, 0)
    low, high = metrics.interval(lambda a, b: float((a - b).mean()), uncertainty, uncertainty)
    assert low < -1 < 1 < high


def test_the_interval_holds_the_value_on_the_samples_and_grows_with_the_level() -> None:
    random = np.random.default_rng(0)
    uncertainty = random.normal(size=200)
    correct = uncertainty + random.normal(size=200) < 1
    narrow = metrics.interval(
        metrics.raulc, uncertainty, correct, paired=True, level=0.5, resamples=200
    )
    wide = metrics.interval(
        metrics.raulc, uncertainty, correct, paired=True, level=0.99, resamples=200
    )
    assert wide[0] < narrow[0] < metrics.raulc(uncertainty, correct) < narrow[1] < wide[1]


def test_same_seed_same_interval() -> None:
    inside, outside = np.arange(20.0), np.arange(10.0) + 8
    first = metrics.interval(metrics.auroc, inside, outside, seed=3, resamples=50)
    assert first == metrics.interval(metrics.auroc, inside, outside, seed=3, resamples=50)
    assert first != metrics.interval(metrics.auroc, inside, outside, seed=4, resamples=50)


def test_unless_told_there_are_1000_resamples_of_seed_0_and_the_middle_is_95_percent() -> None:
    x = np.random.default_rng(0).normal(size=30)
    want = metrics.interval(np.mean, x, resamples=1000, level=0.95, seed=0)
    assert metrics.interval(np.mean, x) == want
    assert metrics.interval(np.mean, x, resamples=999) != want


def test_a_single_sample_may_be_called_paired() -> None:
    x = np.arange(30.0)
    assert metrics.interval(np.mean, x, paired=True) == metrics.interval(np.mean, x)


def test_tables_of_logits_are_resampled_by_row() -> None:
    logits = np.eye(4)[[0, 1, 2, 3, 3, 3]]
    assert metrics.interval(
        metrics.accuracy, logits, [0, 1, 2, 3, 3, 3], paired=True, resamples=20
    ) == (1, 1)


def test_resamples_without_a_mistake_are_drawn_again() -> None:
    correct = np.arange(30) > 0  # a third of the resamples miss the one mistake
    low, high = metrics.interval(
        metrics.raulc, np.arange(30.0), correct, paired=True, resamples=100
    )
    assert low < high < 0


def test_a_measure_without_a_value_says_why() -> None:
    with pytest.raises(qualms.QualmsError, match="rAULC is undefined"):
        metrics.interval(metrics.raulc, [1.0, 2.0], [True, True], paired=True)


def test_a_measure_that_resamples_leave_undefined_has_no_interval() -> None:
    def only_on_the_sample_itself(x: np.ndarray) -> float:
        if len(set(x)) < 50:
            raise qualms.QualmsError("a value is missing.")
        return 0.0

    with pytest.raises(qualms.QualmsError, match="undefined on nearly all resamples"):
        metrics.interval(only_on_the_sample_itself, np.arange(50.0), resamples=20)


def test_errors() -> None:
    with pytest.raises(qualms.QualmsError, match=r"the samples have \[2, 1\] inputs"):
        metrics.interval(metrics.raulc, [1.0, 2.0], [True], paired=True)
    with pytest.raises(qualms.QualmsError, match=r"the samples have \[\] inputs"):
        metrics.interval(metrics.auroc)
    with pytest.raises(qualms.QualmsError, match="sample 2 is empty"):
        metrics.interval(metrics.auroc, [1.0], [])
    with pytest.raises(qualms.QualmsError, match=r"the samples have \[0, 1\] inputs"):
        metrics.interval(metrics.auroc, 1.0, [2.0])
    with pytest.raises(qualms.QualmsError, match="level=0"):
        metrics.interval(metrics.auroc, [1.0], [2.0], level=0.0)
    with pytest.raises(qualms.QualmsError, match="level=1"):
        metrics.interval(metrics.auroc, [1.0], [2.0], level=1.0)
    with pytest.raises(qualms.QualmsError, match="resamples=0"):
        metrics.interval(metrics.auroc, [1.0], [2.0], resamples=0)
