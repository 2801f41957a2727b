"""Pixels of unknown objects: all images in one ranking, ignored pixels left out, nothing else."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve

import qualms
from qualms import metrics

UNKNOWN, IGNORED = 254, 255


def maps(seed: int, levels: int) -> tuple[np.ndarray, np.ndarray]:
    """Three images with pixels of all kinds, and scores with many ties."""
    random = np.random.default_rng(seed)
    labels = random.choice([0, 1, 2, UNKNOWN, IGNORED], (3, 5, 7))
    labels[0, 0, :2] = 0, UNKNOWN
    return random.integers(0, levels, labels.shape) + 2.0 * (labels == UNKNOWN), labels


@given(st.integers(0, 10_000), st.sampled_from([3, 10, 10_000]))
def test_all_pixels_that_count_are_in_one_ranking_as_scikit_learn_ranks(
    seed: int, levels: int
) -> None:
    scores, labels = maps(seed, levels)
    counts = labels != IGNORED
    positive, flat = labels[counts] == UNKNOWN, scores[counts]
    found = metrics.pixel_metrics(np.where(counts, scores, np.nan), labels, UNKNOWN)
    assert found["auroc"] == pytest.approx(roc_auc_score(positive, flat))
    assert found["aupr"] == pytest.approx(average_precision_score(positive, flat))
    fpr, tpr, _ = roc_curve(positive, flat, drop_intermediate=False)
    assert found["fpr95"] == pytest.approx(fpr[tpr >= 0.95 - 1e-9].min())


def test_images_are_not_averaged() -> None:
    """Each image alone is ranked perfectly; together they are not."""
    scores, labels = (
        torch.tensor([[[0.1, 0.2]], [[0.5, 0.6]]]),
        torch.tensor([[[0, UNKNOWN]], [[0, UNKNOWN]]]),
    )
    for image in range(2):
        assert metrics.pixel_metrics(scores[image], labels[image], UNKNOWN)["auroc"] == 1
    assert metrics.pixel_metrics(scores, labels, UNKNOWN) == {
        "auroc": 0.75,
        "aupr": pytest.approx(1 / 2 + 1 / 2 * 2 / 3),
        "fpr95": 0.5,
    }


def test_several_labels_may_be_unknown_and_another_one_ignored() -> None:
    scores = np.array([[0.1, 0.9, 0.8, np.nan]])
    labels = np.array([[1, 7, 8, -100]], dtype=np.int64)
    assert metrics.pixel_metrics(scores, labels, {7, 8}, ignore_index=-100)["auroc"] == 1
    assert metrics.pixel_metrics(scores, labels, 7, ignore_index=-100)["fpr95"] == 0
    assert metrics.pixel_metrics(-scores, labels, [7], ignore_index=-100)["auroc"] == 0


def test_a_pixel_without_a_score_that_is_not_ignored_is_told() -> None:
    scores, labels = np.zeros((2, 3, 3)), np.zeros((2, 3, 3), np.uint8)
    labels[0, 0] = UNKNOWN
    scores[1, 2, 0] = np.nan
    with pytest.raises(
        qualms.QualmsError,
        match=r"pixel \(1, 2, 0\) is NaN or infinite, and its label 0 is not ign",
    ):
        metrics.pixel_metrics(scores, labels, UNKNOWN)
    labels[1, 2, 0] = IGNORED
    assert metrics.pixel_metrics(scores, labels, UNKNOWN)["auroc"] == 0.5


def test_errors() -> None:
    labels = np.array([[0, UNKNOWN]])
    with pytest.raises(
        qualms.QualmsError, match=r"scores have shape \(2,\), and labels have shape \(1, 2\)"
    ):
        metrics.pixel_metrics([1.0, 2.0], labels, UNKNOWN)
    with pytest.raises(
        qualms.QualmsError, match=r"scores have shape \(1, 1\), and labels have shape \(1, 2\)"
    ):
        metrics.pixel_metrics([[1.0]], labels, UNKNOWN)
    with pytest.raises(
        qualms.QualmsError, match="type float64; pass one score and one integer class"
    ):
        metrics.pixel_metrics(labels.astype(float), labels.astype(float), UNKNOWN)
    with pytest.raises(qualms.QualmsError, match="label 255 is both unknown and ignored"):
        metrics.pixel_metrics(labels, labels, {254, 255})
    with pytest.raises(qualms.QualmsError, match=r"no pixels labeled \[3\], so AUROC is undefined"):
        metrics.pixel_metrics(labels, labels, 3)
    with pytest.raises(qualms.QualmsError, match="no known pixels"):
        metrics.pixel_metrics(labels, labels, {0, 254})
