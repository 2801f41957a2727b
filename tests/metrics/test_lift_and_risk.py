"""rAULC and selective risk: every sample a step, ties as the average over all their orders."""

import itertools
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import qualms
from qualms import metrics

Pairs = list[tuple[int, bool]]
PAIRS = st.lists(st.tuples(st.integers(-4, 4), st.booleans()), min_size=2, max_size=40)
FEW = st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=2, max_size=7)


def columns(pairs: Pairs) -> tuple[list[int], list[bool]]:
    return [u for u, _ in pairs], [right for _, right in pairs]


def orders(pairs: Pairs) -> Iterator[list[bool]]:
    """The outcomes in every order that uncertainty allows."""
    ties = [[right for u, right in pairs if u == value] for value in sorted({u for u, _ in pairs})]
    for combination in itertools.product(*(itertools.permutations(tie) for tie in ties)):
        yield [right for tie in combination for right in tie]


def plain_raulc(outcomes: list[bool]) -> float:
    def aulc(ordered: list[bool]) -> float:
        overall = sum(ordered) / len(ordered)
        lifts = [sum(ordered[:i]) / i / overall for i in range(1, len(ordered) + 1)]
        return sum(lifts) / len(lifts) - 1

    return aulc(outcomes) / aulc(sorted(outcomes, reverse=True))


def mixed(pairs: Pairs) -> None:
    assume(0 < sum(right for _, right in pairs) < len(pairs))


@given(FEW)
def test_raulc_is_the_average_over_all_orders_of_the_ties(pairs: Pairs) -> None:
    mixed(pairs)
    want = np.mean([plain_raulc(outcomes) for outcomes in orders(pairs)])
    assert metrics.raulc(*columns(pairs)) == pytest.approx(want, abs=1e-12)


@given(FEW)
def test_risk_at_every_coverage_is_the_average_over_all_orders_of_the_ties(pairs: Pairs) -> None:
    n = len(pairs)
    want = np.mean([[1 - sum(o[:i]) / i for i in range(1, n + 1)] for o in orders(pairs)], axis=0)
    np.testing.assert_allclose(metrics.risk_coverage(*columns(pairs)), want, atol=1e-12)
    assert metrics.aurc(*columns(pairs)) == pytest.approx(want.mean())
    for i in range(1, n + 1):
        assert metrics.selective_risk(*columns(pairs), coverage=i / n) == pytest.approx(want[i - 1])


@given(FEW)
def test_the_lift_curve_ends_at_one(pairs: Pairs) -> None:
    mixed(pairs)
    curve = metrics.lift_curve(*columns(pairs))
    assert len(curve) == len(pairs)
    assert curve[-1] == pytest.approx(1)


@given(PAIRS)
def test_raulc_is_one_for_the_ideal_order_and_never_more(pairs: Pairs) -> None:
    mixed(pairs)
    uncertainty, correct = columns(pairs)
    assert metrics.raulc(uncertainty, correct) <= 1
    assert metrics.raulc(~np.array(correct), correct) == 1
    assert metrics.raulc(correct, correct) < 0  # mistakes first


@given(st.lists(st.booleans(), min_size=2, max_size=40), st.floats(-1e3, 1e3))
def test_a_score_that_is_the_same_everywhere_lifts_nothing(
    correct: list[bool], value: float
) -> None:
    assume(0 < sum(correct) < len(correct))
    same = [value] * len(correct)
    assert metrics.raulc(same, correct) == pytest.approx(0, abs=1e-12)
    np.testing.assert_allclose(metrics.lift_curve(same, correct), 1)
    np.testing.assert_allclose(
        metrics.risk_coverage(same, correct), 1 - np.mean(correct), atol=1e-12
    )


@given(PAIRS, st.randoms(use_true_random=False))
def test_only_the_order_of_the_scores_counts(pairs: Pairs, random: np.random.Generator) -> None:
    mixed(pairs)
    cubed = [(u**3 + u - 7, right) for u, right in pairs]  # whole numbers: nothing merges
    shuffled = random.sample(pairs, len(pairs))
    for measure in (metrics.raulc, metrics.aurc):
        assert measure(*columns(pairs)) == measure(*columns(cubed)) == measure(*columns(shuffled))


def test_coverage_rounds_up_to_whole_inputs_as_a_threshold_does() -> None:
    uncertainty, correct = np.arange(100.0), np.arange(100) != 94
    accepted = qualms.Threshold.from_scores(uncertainty, coverage=0.95).accept(uncertainty).numpy()
    assert (
        metrics.selective_risk(uncertainty, correct, 0.95) == (~correct[accepted]).mean() == 1 / 95
    )
    assert metrics.selective_risk(uncertainty, correct, 0.941) == 1 / 95
    assert metrics.selective_risk(uncertainty, correct, 0.94) == 0
    assert metrics.selective_risk(uncertainty, correct, 1e-12) == 0


@pytest.mark.parametrize(
    "measure", [metrics.raulc, metrics.lift_curve, metrics.risk_coverage, metrics.aurc]
)
def test_errors(measure: Callable[..., object]) -> None:
    with pytest.raises(
        qualms.QualmsError, match="2 scores in uncertainty and 1 outcomes in correct"
    ):
        measure([1.0, 2.0], [True])
    with pytest.raises(qualms.QualmsError, match="correct has values other than 0 and 1"):
        measure([1.0, 2.0], [3, 1])
    with pytest.raises(qualms.QualmsError, match="uncertainty is empty"):
        measure([], [])
    with pytest.raises(qualms.QualmsError, match="uncertainty is NaN or infinite for input 0"):
        measure([float("nan"), 1.0], [True, False])


@pytest.mark.parametrize("right", [True, False])
def test_there_is_no_raulc_when_all_predictions_are_alike(right: bool) -> None:
    with pytest.raises(qualms.QualmsError, match=f"accuracy is {int(right)}.* rAULC is undefined"):
        metrics.raulc([1.0, 2.0], [right, right])


def test_more_errors() -> None:
    with pytest.raises(qualms.QualmsError, match="accuracy is 0 and lift is undefined"):
        metrics.lift_curve([1.0, 2.0], [False, False])
    for coverage in (0.0, 1.1, float("nan")):
        with pytest.raises(qualms.QualmsError, match=r"coverage=.* is invalid"):
            metrics.selective_risk([1.0, 2.0], [False, True], coverage)
