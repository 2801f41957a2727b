"""The report's numbers are those of qualms.metrics, and what is thinned or cut is thinned for drawing alone."""

from dataclasses import replace

import numpy as np
import pytest

import qualms
from qualms import metrics
from qualms.report import numbers
from qualms.report.content import Content, Group, LayerContributions
from qualms.report.gallery import ends, pictures
from tests.report.contents import CLASSES, bare, cycles, full, group


def test_every_method_is_judged_by_the_metrics_best_mean_auroc_first() -> None:
    content = full()
    found = numbers.at_a_glance(content, resamples=50)
    assert sorted(j.method for j in found) == sorted(content.methods)
    means = [
        np.mean([metrics.auroc(content.known.scores[j.method], g.scores[j.method]) for g in content.unknown])
        for j in found
    ]
    assert means == sorted(means, reverse=True)
    assert [j.mean_auroc for j in found] == pytest.approx(means)
    for j in found:
        known, letters = content.known.scores[j.method], content.unknown[0].scores[j.method]
        assert j.aupr[0] == metrics.aupr(known, letters)
        assert (j.auroc[0].low, j.auroc[0].high) == metrics.interval(metrics.auroc, known, letters, resamples=50)
        assert j.raulc is not None
        assert j.raulc.value == metrics.raulc(known, content.known.correct)
        assert j.cost == content.costs.get(j.method)


def test_equal_scores_are_chance() -> None:
    flat = next(j for j in numbers.at_a_glance(full(), resamples=20) if j.method == "flat")
    assert flat.auroc[0] == numbers.WithInterval(0.5, 0.5, 0.5)
    assert flat.raulc == numbers.WithInterval(0.0, 0.0, 0.0)


def test_without_unknown_groups_the_best_raulc_comes_first() -> None:
    content = replace(full(), unknown=(), layers=None)
    values = [j.raulc.value for j in numbers.at_a_glance(content, resamples=20) if j.raulc is not None]
    assert len(values) == 4
    assert values == sorted(values, reverse=True)


def test_without_labels_or_without_mistakes_there_is_no_raulc() -> None:
    assert {j.raulc for j in numbers.at_a_glance(bare(), resamples=20)} == {None}
    known = full().known
    always_right = Content("t", replace(known, labels=known.predicted))
    assert {j.raulc for j in numbers.at_a_glance(always_right, resamples=20)} == {None}


def test_one_mistake_among_few_images_has_a_value_even_if_hardly_an_interval() -> None:
    known = group("digits", 40, 0)
    one_wrong = replace(known, labels=np.where(np.arange(40) == 3, 9, known.predicted))
    found = numbers.at_a_glance(Content("t", one_wrong), resamples=20)
    assert {j.method: j.raulc.value for j in found if j.raulc is not None} == {
        m: metrics.raulc(s, one_wrong.correct) for m, s in known.scores.items()
    }


@pytest.mark.parametrize("method", ["exact", "tied", "wide", "flat"])
def test_every_score_is_in_a_bin(method: str) -> None:
    scores = [g.scores[method] for g in full().groups]
    found = numbers.bins(scores)
    assert found.logarithmic == (method == "wide")
    assert (np.diff(found.edges) > 0).all()
    assert [found.shares(s).sum() for s in scores] == pytest.approx([1, 1, 1])


def test_zeros_are_in_the_first_bin_of_a_logarithmic_histogram() -> None:
    scores = np.concatenate([np.zeros(10), np.geomspace(1e-3, 1, 30)])
    found = numbers.bins([scores])
    assert found.logarithmic
    assert found.shares(scores)[0] >= 0.25


def test_a_thinned_curve_keeps_its_ends_and_its_shape() -> None:
    random = np.random.default_rng(0)
    fpr, tpr = metrics.roc(random.normal(0, 1, 4000), random.normal(1, 1, 3000))
    x, y = numbers.thinned(fpr, tpr)
    assert len(x) <= numbers.POINTS < len(fpr)
    assert (x[0], y[0], x[-1], y[-1]) == (0, 0, 1, 1)
    assert np.abs(np.interp(fpr, x, y) - tpr).max() < 0.01
    assert numbers.thinned(x, y)[0] is x


def test_shares_of_layers_sum_to_one_and_inputs_are_ordered_by_score() -> None:
    content = full()
    assert content.layers is not None
    first, second = numbers.layer_shares(content, content.layers, most=10)
    assert (first.group, second.group) == ("digits", "letters")
    assert first.shares.shape == (10, 3)
    assert first.shares.sum(1) == pytest.approx(1)
    rows = content.layers.contributions[:25]
    assert first.mean == pytest.approx((rows / rows.sum(1, keepdims=True)).mean(0))
    least, most = np.argmin(content.known.scores["exact"][:25]), np.argmax(content.known.scores["exact"][:25])
    drawn = first.shares[first.orders["exact"]]
    assert drawn[0] == pytest.approx(rows[least] / rows[least].sum())
    assert drawn[-1] == pytest.approx(rows[most] / rows[most].sum())


def test_an_input_without_uncertainty_has_no_shares() -> None:
    content = bare()
    layers = LayerContributions(["a", "b"], np.zeros((2, 2)), ["digits"] * 2, np.array([0, 1]))
    assert (numbers.layer_shares(content, layers)[0].shares == 0).all()


def test_learning_curves_begin_at_the_shared_start_and_average_over_seeds() -> None:
    found = numbers.learning_curves(cycles(), "accuracy")
    random, entropy = found["digits"]
    assert (random.method, entropy.method) == ("Random", "entropy")
    assert entropy.labelled == [10, 20, 30]
    assert entropy.mean == pytest.approx([0.5, 0.71, 0.91])
    assert (entropy.low[1], entropy.high[1]) == pytest.approx((0.7, 0.72))


def test_the_gallery_shows_both_ends_and_no_image_twice() -> None:
    assert ends(np.array([3.0, 1, 2, 5, 4]), each=2) == ([1, 2], [3, 4])
    assert ends(np.array([3.0, 1, 2]), each=8) == ([1, 2], [0])
    assert ends(np.array([1.0]), each=8) == ([0], [])


def test_pictures_say_what_they_are() -> None:
    content = full()
    (certain, uncertain), (letters, _), _ = pictures(content, "exact")
    assert len(certain) == len(uncertain) == 8
    index = int(np.argmin(content.known.scores["exact"]))
    first, labels = certain[0], content.known.labels
    assert labels is not None
    assert first.index == index
    assert first.predicted == CLASSES[content.known.predicted[index]]
    assert first.right == (content.known.predicted[index] == labels[index])
    assert first.alt == f"digits, predicted {first.predicted}, label {first.label}, score {first.score}"
    assert float(first.score) == pytest.approx(content.known.scores["exact"].min(), rel=0.01)
    assert letters[0].label is None
    assert letters[0].right is None
    assert "label" not in letters[0].alt


def test_a_label_of_an_unknown_group_is_never_called_wrong() -> None:
    content = replace(bare(), unknown=[group("others", 20, 1, labelled=True)])
    _, (certain, uncertain) = pictures(content, "exact")
    assert {p.right for p in [*certain, *uncertain]} == {None}


def test_errors() -> None:
    known = full().known
    with pytest.raises(qualms.QualmsError, match="digits has 150 images, and the predictions are 3"):
        replace(known, predicted=np.arange(3))
    with pytest.raises(qualms.QualmsError, match="the scores of exact for digits is NaN or infinite for input 0"):
        replace(known, scores={"exact": np.full(150, np.nan)})
    with pytest.raises(qualms.QualmsError, match="digits has no scores"):
        Content("t", Group("digits", known.images, {}, known.predicted))
    with pytest.raises(qualms.QualmsError, match="only one of digits and letters has scores of flat"):
        Content("t", known, [replace(full().unknown[0], scores={"exact": np.zeros(90)})])
    with pytest.raises(qualms.QualmsError, match="two groups of images have one name"):
        Content("t", known, [known])
    with pytest.raises(qualms.QualmsError, match="the layers tell of image 150 of digits"):
        Content("t", known, layers=LayerContributions(["fc"], np.ones((1, 1)), ["digits"], np.array([150])))
    with pytest.raises(qualms.QualmsError, match="the layers tell of image 0 of elsewhere"):
        Content("t", known, layers=LayerContributions(["fc"], np.ones((1, 1)), ["elsewhere"], np.array([0])))
    with pytest.raises(qualms.QualmsError, match=r"shape \(1, 2\), with 1 names"):
        LayerContributions(["fc"], np.ones((1, 2)), ["digits"], np.array([0]))
    with pytest.raises(qualms.QualmsError, match="negative, NaN or infinite"):
        LayerContributions(["fc"], -np.ones((1, 1)), ["digits"], np.array([0]))
