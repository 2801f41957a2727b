"""Accuracy and likelihood, against scikit-learn and torch."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, log_loss

import qualms
from qualms import metrics

LOGITS = 3 * torch.randn(200, 10, generator=torch.Generator().manual_seed(0))
LABELS = torch.randint(10, (200,), generator=torch.Generator().manual_seed(1))


def test_accuracy_and_nll_are_those_of_scikit_learn() -> None:
    probs = LOGITS.double().softmax(1).numpy()
    assert metrics.accuracy(LOGITS, LABELS) == accuracy_score(LABELS, probs.argmax(1))
    assert metrics.nll(LOGITS, LABELS) == pytest.approx(log_loss(LABELS, probs, labels=range(10)))


def test_nll_softmax_twice_is_torchs_loss_on_probabilities() -> None:
    want = torch.nn.functional.cross_entropy(LOGITS.double().softmax(1), LABELS)
    assert metrics.nll_softmax_twice(LOGITS, LABELS) == pytest.approx(float(want))


def test_nll_softmax_twice_has_the_bounds_that_its_docstring_gives() -> None:
    certain = 1000 * torch.eye(10)
    assert metrics.nll_softmax_twice(certain, range(10)) == pytest.approx(
        -math.log(math.e / (math.e + 9))
    )
    assert metrics.nll_softmax_twice(certain, range(10)) == pytest.approx(1.461, abs=5e-4)
    assert metrics.nll_softmax_twice(torch.zeros(10, 10), range(10)) == pytest.approx(math.log(10))
    assert metrics.nll_softmax_twice(LOGITS, LABELS) > 1.461


def test_nll_keeps_its_digits_where_probabilities_are_nearly_one_or_zero() -> None:
    assert metrics.nll([[30.0, 0.0]], [0]) == pytest.approx(math.log1p(math.exp(-30)), rel=1e-2)
    assert metrics.nll([[0.0, 5000.0]], [0]) == 5000
    assert metrics.nll(torch.tensor([[10.0, 0.0]], dtype=torch.float16), [0]) == pytest.approx(
        math.log1p(math.exp(-10)), rel=1e-9
    )


def test_a_shift_of_all_logits_changes_nothing() -> None:
    shifted = LOGITS.double() + 1024
    assert metrics.nll(shifted, LABELS) == pytest.approx(metrics.nll(LOGITS, LABELS))


@pytest.mark.parametrize("measure", [metrics.accuracy, metrics.nll, metrics.nll_softmax_twice])
def test_errors(measure: Callable[..., object]) -> None:
    two = np.zeros((2, 3))
    for labels, match in (
        ([0, 3], "label 3 is not one of the 3 classes"),
        ([0, 40], "label 40 is not one of the 3 classes"),
        ([-1, 0], "label -1 is not one of the 3 classes"),
        ([0], "2 rows in logits and 1 labels"),
        ([0.0, 1.0], "labels has shape .* and type float64"),
        ([[0], [1]], "labels has shape"),
        (1, "labels has shape"),
        ([], "labels is empty"),
    ):
        with pytest.raises(qualms.QualmsError, match=match):
            measure(two, labels)
    with pytest.raises(qualms.QualmsError, match=r"logits has shape \(2,\)"):
        measure([0.0, 1.0], [0, 1])
    with pytest.raises(qualms.QualmsError, match="logits is NaN or infinite for input 1"):
        measure([[0.0, 1.0], [float("nan"), 0.0]], [0, 1])


def test_labels_of_two_classes_may_be_true_and_false() -> None:
    logits = [[2.0, 1.0], [0.0, 3.0], [1.0, 0.0]]
    assert (
        metrics.accuracy(logits, [False, True, True])
        == metrics.accuracy(logits, [0, 1, 1])
        == 2 / 3
    )
