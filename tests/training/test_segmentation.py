"""A small network learns to name pixels, the same for the same seed; pixels that do not count teach
it nothing.
"""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from qualms.data.scenes import CLASSES, IGNORED, NORMALIZATION, Scenes, scenes
from qualms.models.fcn import FCN
from qualms.training.segmentation import RECIPE, fit_scenes

SHORT = replace(RECIPE, epochs=2)


def network() -> FCN:
    torch.manual_seed(0)
    return FCN(len(CLASSES))


def test_the_same_seed_gives_the_same_weights() -> None:
    found = scenes(8, "train")
    weights = []
    for seed in (0, 0, 1):
        model = network()
        fit_scenes(model, found, NORMALIZATION, SHORT, seed=seed)
        assert not model.training
        weights.append(model.head.weight.detach().clone())
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_pixels_that_do_not_count_teach_nothing() -> None:
    found = scenes(8, "train")
    labels = found.labels.clone()
    labels[:, :, :30] = IGNORED
    counts = labels != IGNORED
    logits = network().train()(NORMALIZATION.apply(found.pixels)).movedim(1, -1)
    want = float(F.cross_entropy(logits[counts], labels[counts]).detach())
    (loss,) = fit_scenes(
        network(), Scenes(found.pixels, labels), NORMALIZATION, replace(RECIPE, epochs=1)
    )
    assert loss == pytest.approx(want, rel=1e-5)


def test_each_epoch_is_told() -> None:
    told: list[tuple[str, int, int]] = []
    fit_scenes(
        network(),
        scenes(4, "train"),
        NORMALIZATION,
        SHORT,
        progress=lambda *step: told.append(step),
    )
    assert told == [("epochs", 1, 2), ("epochs", 2, 2)]


@pytest.mark.slow
def test_most_of_the_ink_is_named_right_after_a_minute() -> None:
    model = network()
    losses = fit_scenes(model, scenes(1000, "train"), NORMALIZATION, replace(RECIPE, epochs=4))
    assert losses[-1] < losses[0] / 5
    test = scenes(50)
    with torch.no_grad():
        right = model(NORMALIZATION.apply(test.pixels)).argmax(1) == test.labels
    assert right[test.labels != IGNORED].double().mean() > 0.98
    assert right[(test.labels > 0) & (test.labels != IGNORED)].double().mean() > 0.8
