"""AUROC, AUPR and FPR95: as scikit-learn has them, ties fair, directions as documented."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import auc, average_precision_score, roc_auc_score, roc_curve

import qualms
from qualms import metrics

# Few distinct values, so that ties are the rule.
TIED = st.lists(st.integers(-3, 3), min_size=1, max_size=30)
UNTIED = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30)
SCORES = TIED | UNTIED


def labeled(inside: list[float], outside: list[float]) -> tuple[np.ndarray, np.ndarray]:
    return np.r_[np.zeros(len(inside)), np.ones(len(outside))], np.array(
        [*inside, *outside], dtype=float
    )


@given(SCORES, SCORES)
def test_auroc_and_aupr_are_those_of_scikit_learn(
    inside: list[float], outside: list[float]
) -> None:
    is_out, scores = labeled(inside, outside)
    assert metrics.auroc(inside, outside) == pytest.approx(roc_auc_score(is_out, scores))
    assert metrics.aupr(inside, outside) == pytest.approx(average_precision_score(is_out, scores))
    assert metrics.aupr(inside, outside, positive="in") == pytest.approx(
        average_precision_score(1 - is_out, -scores)
    )


@given(SCORES, SCORES)
def test_the_roc_curve_is_that_of_scikit_learn(inside: list[float], outside: list[float]) -> None:
    want_fpr, want_tpr, _ = roc_curve(*labeled(inside, outside), drop_intermediate=False)
    fpr, tpr = metrics.roc(inside, outside)
    np.testing.assert_allclose(fpr, want_fpr)
    np.testing.assert_allclose(tpr, want_tpr)
    assert auc(fpr, tpr) == pytest.approx(metrics.auroc(inside, outside))


@given(SCORES, SCORES)
def test_fpr95_is_read_off_the_roc_curve_in_both_conventions(
    inside: list[float], outside: list[float]
) -> None:
    is_out, scores = labeled(inside, outside)
    for positive, labels, s in (("out", is_out, scores), ("in", 1 - is_out, -scores)):
        fpr, tpr, _ = roc_curve(labels, s, drop_intermediate=False)
        assert metrics.fpr95(inside, outside, positive) == pytest.approx(
            fpr[tpr >= 0.95 - 1e-9].min()
        )


def test_fpr95_says_how_many_known_inputs_are_flagged_when_95_of_100_unknown_ones_are() -> None:
    outside = np.arange(100.0)  # 95 of them are at 5 or above
    assert metrics.fpr95([4.9, 4.9, 4.9, 5.0], outside) == 0.25
    assert metrics.fpr95([4.9, 4.9, 4.9, 4.9], outside) == 0
    # The other way round: 95 of 100 known inputs pass at 94 or below, and so do three of the
    # unknown ones.
    assert metrics.fpr95(outside, [94.0, 94.1, 3.0, 0.0], positive="in") == 0.75


@given(TIED, TIED)
def test_swapping_the_roles_mirrors_auroc(a: list[float], b: list[float]) -> None:
    assert metrics.auroc(a, b) == pytest.approx(1 - metrics.auroc(b, a))


@given(TIED, TIED)
def test_swapping_roles_and_sign_swaps_the_conventions(a: list[int], b: list[int]) -> None:
    minus_a, minus_b = [-s for s in a], [-s for s in b]
    assert metrics.aupr(a, b, positive="in") == metrics.aupr(minus_b, minus_a)
    assert metrics.fpr95(a, b, positive="in") == metrics.fpr95(minus_b, minus_a)


@given(st.integers(1, 20), st.integers(1, 20), st.floats(-1e3, 1e3))
def test_a_score_that_is_the_same_everywhere_is_worth_nothing(
    n_in: int, n_out: int, value: float
) -> None:
    inside, outside = [value] * n_in, [value] * n_out
    assert metrics.auroc(inside, outside) == 0.5
    assert metrics.aupr(inside, outside) == n_out / (n_in + n_out)
    assert metrics.aupr(inside, outside, positive="in") == n_in / (n_in + n_out)
    assert metrics.fpr95(inside, outside) == 1


def test_a_perfect_score() -> None:
    inside, outside = [0.0, 1.0, 2.0], [3.0, 4.0]
    assert metrics.auroc(inside, outside) == metrics.aupr(inside, outside) == 1
    assert metrics.aupr(inside, outside, positive="in") == 1
    assert metrics.fpr95(inside, outside) == metrics.fpr95(inside, outside, positive="in") == 0


@given(TIED, TIED, st.randoms(use_true_random=False))
def test_only_the_order_of_the_scores_counts(
    a: list[int], b: list[int], random: np.random.Generator
) -> None:
    cubed = ([s**3 + s - 7 for s in a], [s**3 + s - 7 for s in b])  # whole numbers: nothing merges
    shuffled = (random.sample(a, len(a)), random.sample(b, len(b)))
    for measure in (metrics.auroc, metrics.aupr, metrics.fpr95):
        assert measure(a, b) == measure(*cubed) == measure(*shuffled)


def test_tensors_with_a_graph_and_in_low_precision_are_taken() -> None:
    inside = torch.tensor([0.0, 1.0, 2.0], requires_grad=True) * 2
    outside = torch.tensor([3.0, 5.0], dtype=torch.bfloat16)
    assert metrics.auroc(inside, outside) == 5 / 6


@pytest.mark.parametrize("measure", [metrics.auroc, metrics.aupr, metrics.fpr95, metrics.roc])
def test_errors(measure: Callable[..., object]) -> None:
    with pytest.raises(qualms.QualmsError, match="in_scores is empty"):
        measure([], [1.0])
    with pytest.raises(qualms.QualmsError, match="out_scores is NaN or infinite for input 1"):
        measure([1.0], [1.0, float("nan")])
    with pytest.raises(qualms.QualmsError, match="out_scores is NaN or infinite for input 0"):
        measure([1.0], [float("inf")])
    with pytest.raises(qualms.QualmsError, match=r"in_scores has shape \(1, 2\)"):
        measure([[1.0, 2.0]], [1.0])
    with pytest.raises(qualms.QualmsError, match="in_scores is not an array of numbers"):
        measure(["a"], [1.0])
    with pytest.raises(qualms.QualmsError, match="in_scores is not an array of numbers"):
        measure([[1.0], [1.0, 2.0]], [1.0])


@pytest.mark.parametrize("measure", [metrics.aupr, metrics.fpr95])
def test_an_unknown_positive_class_is_refused(measure: Callable[..., object]) -> None:
    with pytest.raises(qualms.QualmsError, match="positive='ood' is invalid; choose 'out' or 'in'"):
        measure([1.0], [2.0], positive="ood")
