"""The report's numbers are those of qualms.metrics, and what is thin_curve or cut is thin_curve for
drawing alone.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

import qualms
from qualms import metrics
from qualms.data import Normalization
from qualms.methods import parse
from qualms.report import numbers
from qualms.report.comparison import describe_comparison, format_cost, list_columns, make_cells
from qualms.report.content import Content, Group, LayerContributions
from qualms.report.gallery import confident_mistakes, extreme_images
from qualms.report.layer_chart import layer_name, layers_of
from qualms.report.roles import explain_no_default, find_default, not_for_use
from qualms.stream.network import Network
from qualms.tasks.rows import LeftOutRow
from tests.helpers.report_contents import bare, cycles, full, group


def test_every_method_is_judged_by_the_metrics_best_mean_auroc_first() -> None:
    content = full()
    found = numbers.summarize_methods(content, resamples=50)
    assert sorted(j.method for j in found) == sorted(content.methods)
    means = [
        np.mean(
            [
                metrics.auroc(content.known.scores[j.method], g.scores[j.method])
                for g in content.unknown
            ]
        )
        for j in found
    ]
    assert means == sorted(means, reverse=True)
    assert [j.mean_auroc.value for j in found if j.mean_auroc] == pytest.approx(means)
    for j in found:
        known, letters = content.known.scores[j.method], content.unknown[0].scores[j.method]
        assert j.aupr[0] == metrics.aupr(known, letters)
        assert (j.auroc[0].low, j.auroc[0].high) == metrics.interval(
            metrics.auroc, known, letters, resamples=50
        )
        assert j.raulc is not None
        assert j.raulc.value == metrics.raulc(known, content.known.correct)
        assert j.cost == content.costs.get(j.method)


def test_equal_scores_are_chance() -> None:
    flat = next(j for j in numbers.summarize_methods(full(), resamples=20) if j.method == "flat")
    assert flat.auroc[0] == numbers.Estimate(0.5, 0.5, 0.5)
    assert flat.raulc == numbers.Estimate(0.0, 0.0, 0.0)


def test_without_unknown_groups_the_best_raulc_comes_first() -> None:
    content = replace(full(), unknown=(), layers={})
    values = [
        j.raulc.value
        for j in numbers.summarize_methods(content, resamples=20)
        if j.raulc is not None
    ]
    assert len(values) == 4
    assert values == sorted(values, reverse=True)


def test_without_labels_or_without_mistakes_there_is_no_raulc() -> None:
    assert {j.raulc for j in numbers.summarize_methods(bare(), resamples=20)} == {None}
    known = full().known
    always_right = Content("t", replace(known, labels=known.predicted))
    assert {j.raulc for j in numbers.summarize_methods(always_right, resamples=20)} == {None}


def test_one_mistake_among_few_images_has_a_value_even_if_hardly_an_interval() -> None:
    known = group("digits", 40, 0)
    one_wrong = replace(known, labels=np.where(np.arange(40) == 3, 9, known.predicted))
    found = numbers.summarize_methods(Content("t", one_wrong), resamples=20)
    assert {j.method: j.raulc.value for j in found if j.raulc is not None} == {
        m: metrics.raulc(s, one_wrong.correct) for m, s in known.scores.items()
    }


@pytest.mark.parametrize("method", ["exact", "tied", "wide", "flat"])
def test_an_axis_leaves_out_few_scores_of_any_group(method: str) -> None:
    scores = [g.scores[method] for g in full().groups]
    found = numbers.score_axis(scores)
    assert found.logarithmic == (method == "wide")
    assert found.low < found.high
    for values in scores:
        assert ((values < found.low) | (values > found.high)).mean() < 0.1


def test_an_outlier_does_not_stretch_the_axis() -> None:
    assert numbers.score_axis([np.append(np.linspace(0, 1, 500), 1e9)]).high < 2


def test_zeros_lie_below_a_logarithmic_axis() -> None:
    found = numbers.score_axis([np.concatenate([np.zeros(10), np.geomspace(1e-3, 1, 30)])])
    assert found.logarithmic
    assert 0 < found.low < 2e-3


def test_a_thinned_curve_keeps_its_ends_and_its_shape() -> None:
    random = np.random.default_rng(0)
    fpr, tpr = metrics.roc(random.normal(0, 1, 4000), random.normal(1, 1, 3000))
    x, y = numbers.thin_curve(fpr, tpr)
    assert len(x) <= numbers.MAX_POINTS < len(fpr)
    assert (x[0], y[0], x[-1], y[-1]) == (0, 0, 1, 1)
    assert np.abs(np.interp(fpr, x, y) - tpr).max() < 0.01
    assert numbers.thin_curve(x, y)[0] is x


def test_shares_of_layers_are_means_over_the_inputs_of_a_group() -> None:
    content = full()
    found = numbers.layer_shares(content, content.layers["exact"])
    assert found.groups == ["digits", "letters"]
    rows = content.layers["exact"].contributions[:25]
    assert found.shares[0] == pytest.approx((rows / rows.sum(1, keepdims=True)).mean(0))
    assert found.shares.sum(1) == pytest.approx(1)
    few = numbers.layer_shares(content, content.layers["exact"], max_layers=2)
    assert (few.names, few.others) == (["Conv 3×3 · conv2", "Linear · fc"], 1)


def test_an_input_without_uncertainty_has_no_shares() -> None:
    layers = LayerContributions(["a", "b"], np.zeros((2, 2)), ["digits"] * 2)
    assert (numbers.layer_shares(bare(), layers).shares == 0).all()


def test_layers_add_up_to_the_score_of_a_method_that_weights_them() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 3, 5), torch.nn.Flatten(), torch.nn.Linear(48, 3)
    )
    network = Network("small", model, Normalization((0.5,), (0.25,)))
    known = group("digits", 6, 0)
    methods = {
        spec: parse(spec) for spec in ("regrad+layers", "exgrad+layers(0.4)", "entropy", "negrad")
    }
    found = layers_of(network, [known], methods)
    assert list(found) == ["regrad+layers", "exgrad+layers(0.4)"]
    for spec, layers in found.items():
        assert list(layers.names) == ["Conv 5×5 · 0", "Linear · 2"]
        scores = qualms.score(model, network.inputs(known.images), spec)
        assert layers.contributions.sum(1) == pytest.approx(scores.numpy(), rel=1e-4)
    assert layers_of(network, [known], {"entropy": parse("entropy")}) == {}
    assert layer_name(model, "(model)") == "(model)"


def test_learning_curves_begin_at_the_shared_start_and_average_over_seeds() -> None:
    found = numbers.learning_curves(cycles(), "accuracy")
    random, entropy = found["digits"]
    assert (random.method, entropy.method) == ("Random", "entropy")
    assert entropy.labeled == [10, 20, 30]
    assert entropy.mean == pytest.approx([0.5, 0.71, 0.91])
    assert (entropy.low[1], entropy.high[1]) == pytest.approx((0.7, 0.72))


def test_the_gallery_shows_both_ends_and_no_image_twice() -> None:
    assert extreme_images(np.array([3.0, 1, 2, 5, 4]), max_images=2) == ([1, 2], [3, 4])
    assert extreme_images(np.array([3.0, 1, 2]), max_images=8) == ([1, 2], [0])
    assert extreme_images(np.array([1.0]), max_images=8) == ([0], [])


def test_confident_mistakes_come_worst_first() -> None:
    known = full().known
    found = confident_mistakes(known)
    assert known.correct is not None
    assert known.confidence is not None
    assert not known.correct[found].any()
    assert (np.diff(known.confidence[found]) <= 0).all()
    assert known.confidence[found[0]] == known.confidence[~known.correct].max()
    assert confident_mistakes(bare().known) == []


def test_the_default_is_known_by_its_kind_and_its_absence_is_explained() -> None:
    content = full()
    assert (find_default(content), explain_no_default(content)) == ("exact", "")
    assert not_for_use(content) == ["flat"]
    without = replace(content, kinds={"tied": parse("ungrad")}, layers={})
    assert find_default(without) is None
    assert "was not among the requested methods" in explain_no_default(without)
    row = LeftOutRow(row="left out", method="regrad+layers+smooth", why="the model is odd.")
    assert explain_no_default(replace(without, left_out=[row])).endswith(
        "could not be used: the model is odd."
    )


def test_methods_that_are_not_for_use_stand_with_others_only() -> None:
    known = replace(bare().known, scores={"negrad": np.arange(30.0), "ungrad": np.arange(30.0)})
    assert not_for_use(Content("t", known)) == []


def test_rows_whose_interval_reaches_the_best_are_tied() -> None:
    content = full()
    judged = numbers.summarize_methods(content, resamples=50)
    found = numbers.compare_methods(content, judged)
    assert found.best is not None
    assert found.best.method == "exact"
    assert found.best.main is not None
    for j in judged[1:]:
        assert j.main is not None
        assert (j.method in found.tied) == (
            j.main.high >= found.best.main.low and j.method != "flat"
        )
    assert "wide" in found.tied  # it ranks as `exact` does
    assert "exact has the highest mean AUROC" in " ".join(
        describe_comparison(content, judged, found)
    )


def test_nothing_is_called_best_where_all_may_be_chance() -> None:
    content = Content("t", group("digits", 40, 0), [group("like them", 30, 0)])
    judged = numbers.summarize_methods(content, resamples=200)
    found = numbers.compare_methods(content, judged)
    assert (found.best, found.tied) == (None, [])
    told = " ".join(describe_comparison(content, judged, found))
    assert told.startswith("No method does better than chance here")
    assert "best" not in told


def test_without_anything_to_compare_there_is_a_reason() -> None:
    known = full().known
    for content, words in (
        (bare(), "no labels that show which predictions are wrong"),
        (Content("t", replace(known, labels=known.predicted)), "every prediction is right"),
    ):
        judged = numbers.summarize_methods(content, resamples=5)
        (told,) = describe_comparison(content, judged, numbers.compare_methods(content, judged))
        assert words in told


def test_whiskers_span_the_methods_that_are_for_use() -> None:
    content = full()
    judged = numbers.summarize_methods(content, resamples=50)
    heads = [column.heading for column in list_columns(content, judged)]
    rows = {j.method: make_cells(content, judged, j) for j in judged}
    assert all(len(row) == len(heads) for row in rows.values())
    drawn = [row[0]["whisker"] for name, row in rows.items() if name != "flat"]
    assert all(0 < w["low"] <= w["at"] <= w["low"] + w["width"] < 100 for w in drawn)
    assert (
        min(w["low"] for w in drawn) > 5
    )  # a group's own interval begins lower than that of the mean
    assert rows["flat"][0]["whisker"]["at"] == 0
    assert rows["exact"][-1]["text"] == "56×"
    assert [format_cost(cost) for cost in (1, 1.24, 9.96, 56.3)] == ["1×", "1.2×", "10×", "56×"]


def test_errors() -> None:
    known = full().known
    with pytest.raises(
        qualms.QualmsError, match="digits has 150 images and 3 values in the predictions"
    ):
        replace(known, predicted=np.arange(3))
    with pytest.raises(
        qualms.QualmsError, match="the scores of exact for digits is NaN or infinite for input 0"
    ):
        replace(known, scores={"exact": np.full(150, np.nan)})
    with pytest.raises(qualms.QualmsError, match="digits has no scores"):
        Content("t", Group("digits", known.images, {}, known.predicted))
    with pytest.raises(
        qualms.QualmsError, match="only one of digits and letters has scores of flat"
    ):
        Content("t", known, [replace(full().unknown[0], scores={"exact": np.zeros(90)})])
    with pytest.raises(qualms.QualmsError, match="two groups of images have the same name"):
        Content("t", known, [known])
    with pytest.raises(qualms.QualmsError, match="2 values in the confidences"):
        replace(known, confidence=np.ones(2))
    layers = LayerContributions(["fc"], np.ones((1, 1)), ["elsewhere"])
    with pytest.raises(qualms.QualmsError, match="the layers of exact are for images of elsewhere"):
        Content("t", known, layers={"exact": layers})
    with pytest.raises(qualms.QualmsError, match=r"shape \(1, 2\), with 1 names"):
        LayerContributions(["fc"], np.ones((1, 2)), ["digits"])
    with pytest.raises(qualms.QualmsError, match="negative, NaN or infinite"):
        LayerContributions(["fc"], -np.ones((1, 1)), ["digits"])
