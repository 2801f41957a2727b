"""Training: what is learnt, which epoch is kept, and that an interrupted run ends where an
uninterrupted one does.
"""

import warnings
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from qualms.data import DATASETS, Images, Normalization, load
from qualms.errors import QualmsError
from qualms.models import load_model
from qualms.random import generator
from qualms.training import RECIPES, Recipe, fit, trained_with
from qualms.training.augment import augment

NORMALIZATION = DATASETS["digits"].normalization
SHORT = replace(RECIPES["digits"], epochs=4, drops=(2,), augment=True)


class Stop(Exception):
    pass


def network() -> nn.Module:
    """Build a network with dropout, whose draws must not depend on where a run was interrupted,
    and batch normalization.
    """
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(288, 10),
    )


def some(count: int = 300) -> Images:
    return load("digits", split="train").subset(count)


def stopping_after(epochs: int):  # type: ignore[no-untyped-def]
    def progress(what: str, done: int, total: int) -> None:
        if done == epochs:
            raise Stop

    return progress


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return list(a) == list(b) and all(torch.equal(a[k], b[k]) for k in a)


def test_the_papers_network_learns_the_bundled_digits() -> None:
    torch.manual_seed(0)
    model = load_model("digits-cnn")
    fitted = fit(
        model, load("digits", split="train"), RECIPES["digits"].shortened(8), NORMALIZATION
    )
    test = load("digits")
    right = (model(NORMALIZATION.apply(test.pixels)).argmax(1) == test.labels).float().mean()
    assert right > 0.9
    assert fitted.validation_accuracy > 0.95
    assert not model.training


@pytest.mark.parametrize("adam", [False, True])
def test_a_run_that_was_interrupted_ends_with_the_same_weights(tmp_path: Path, adam: bool) -> None:
    recipe = replace(SHORT, adam=adam, rate=1e-3 if adam else 0.05)
    whole, resumed = network(), network()
    history = fit(whole, some(), recipe, NORMALIZATION).history
    for epoch in (1, 3):
        with pytest.raises(Stop):
            fit(
                network(),
                some(),
                recipe,
                NORMALIZATION,
                checkpoint=tmp_path / "run.pt",
                progress=stopping_after(epoch),
            )
    again = fit(resumed, some(), recipe, NORMALIZATION, checkpoint=tmp_path / "run.pt")
    assert equal(whole.state_dict(), resumed.state_dict())
    assert again.history == history


def test_a_finished_run_is_read_and_not_computed_again(tmp_path: Path) -> None:
    first, second = network(), network()
    fit(first, some(), SHORT, NORMALIZATION, checkpoint=tmp_path / "run.pt")
    fit(
        second,
        some(),
        SHORT,
        NORMALIZATION,
        checkpoint=tmp_path / "run.pt",
        progress=stopping_after(1),
    )
    assert equal(first.state_dict(), second.state_dict())


def test_the_weights_of_the_best_epoch_are_kept() -> None:
    validation = load("digits").subset(100)
    model = network()
    # A rate that goes wild after the first epochs, so that the last epoch is not the best.
    recipe = Recipe(epochs=6, rate=2.0, batch=32)
    fitted = fit(model, some(), recipe, NORMALIZATION, validation=validation)
    accuracies = [row["validation_accuracy"] for row in fitted.history]
    right = (
        (model(NORMALIZATION.apply(validation.pixels)).argmax(1) == validation.labels)
        .double()
        .mean()
    )
    assert fitted.validation_accuracy == max(accuracies) == pytest.approx(float(right))
    assert fitted.best_epoch == 1 + accuracies.index(max(accuracies))
    assert accuracies[-1] < max(accuracies)


def test_the_checkpoint_holds_the_best_weights_and_the_normalization(tmp_path: Path) -> None:
    model = network()
    fit(
        model,
        some(),
        SHORT,
        NORMALIZATION,
        checkpoint=tmp_path / "run.pt",
        about={"network": "mine"},
    )
    found = torch.load(tmp_path / "run.pt", weights_only=True)
    assert equal(found["state_dict"], model.state_dict())
    assert found["network"] == "mine"
    assert trained_with(tmp_path / "run.pt") == NORMALIZATION
    torch.save(model.state_dict(), tmp_path / "other.pt")
    assert trained_with(tmp_path / "other.pt") is None


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 1}, "seed"),
        ({"recipe": replace(SHORT, rate=0.01)}, "rate"),
        ({"normalization": Normalization((0.0,), (1.0,))}, "mean"),
        ({"images": some(200)}, "images"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_by_what_differs(
    tmp_path: Path, change: dict[str, object], named: str
) -> None:
    given = {
        "images": some(),
        "recipe": SHORT,
        "normalization": NORMALIZATION,
        "checkpoint": tmp_path / "run.pt",
    }
    fit(network(), **given)  # type: ignore[arg-type]
    with pytest.raises(QualmsError, match=f"another {named} "):
        fit(network(), **{**given, **change})  # type: ignore[arg-type]


def test_a_checkpoint_from_other_first_weights_is_refused(tmp_path: Path) -> None:
    fit(network(), some(), SHORT, NORMALIZATION, checkpoint=tmp_path / "run.pt")
    other = network()
    with torch.no_grad():
        other[0].weight += 1
    with pytest.raises(QualmsError, match="another start"):
        fit(other, some(), SHORT, NORMALIZATION, checkpoint=tmp_path / "run.pt")


def test_a_file_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.pt").write_bytes(b"not a checkpoint")
    with pytest.raises(QualmsError, match="not a checkpoint of this training"):
        fit(network(), some(), SHORT, NORMALIZATION, checkpoint=tmp_path / "run.pt")


@pytest.mark.parametrize("content", [torch.zeros(3), {"settings": torch.zeros(3)}])
def test_tensors_without_names_are_refused_without_a_warning(
    content: object, tmp_path: Path
) -> None:
    torch.save(content, tmp_path / "run.pt")
    with warnings.catch_warnings(
        record=True
    ) as told:  # one that is an error would be taken for damage
        warnings.simplefilter("always")
        assert trained_with(tmp_path / "run.pt") is None
        with pytest.raises(QualmsError, match="not a checkpoint of this training"):
            fit(network(), some(), SHORT, NORMALIZATION, checkpoint=tmp_path / "run.pt")
    assert told == []


def test_hooks_that_a_file_puts_on_its_weights_are_left_behind(tmp_path: Path) -> None:
    path, recipe = tmp_path / "run.pt", replace(SHORT, epochs=2)
    with pytest.raises(Stop):
        fit(
            network(), some(100), recipe, NORMALIZATION, checkpoint=path, progress=stopping_after(1)
        )
    content = torch.load(path, weights_only=True)
    name, weight = next(iter(content["state_dict"].items()))

    class Hooked:
        def __reduce__(self) -> object:
            storage = weight.untyped_storage()
            typed = torch.storage.TypedStorage(
                wrap_storage=storage, dtype=weight.dtype, _internal=True
            )
            rebuild = torch._utils._rebuild_tensor_v2
            return rebuild, (
                typed,
                0,
                tuple(weight.shape),
                weight.stride(),
                False,
                OrderedDict([(1, "no hook")]),
            )

    content["state_dict"][name] = Hooked()
    torch.save(content, path)
    assert torch.load(path, weights_only=True)["state_dict"][name]._backward_hooks
    fit(network(), some(100), recipe, NORMALIZATION, checkpoint=path)
    assert not torch.load(path, weights_only=True)["state_dict"][name]._backward_hooks


def test_training_leaves_the_callers_random_numbers_alone() -> None:
    model = network()
    before = torch.random.get_rng_state()
    fit(model, some(100), replace(SHORT, epochs=1), NORMALIZATION)
    assert torch.equal(before, torch.random.get_rng_state())


def test_images_without_labels_cannot_be_learnt() -> None:
    with pytest.raises(QualmsError, match="no labels"):
        fit(network(), replace(some(), labels=None), SHORT, NORMALIZATION)


def test_a_shortened_recipe_moves_its_steps_along() -> None:
    assert RECIPES["cifar10"].shortened(10).drops == (3, 6, 9)
    assert RECIPES["cifar10"].shortened(10).epochs == 10
    with pytest.raises(QualmsError, match="positive"):
        RECIPES["cifar10"].shortened(0)


def test_augmentation_keeps_the_middle_of_a_plain_image_and_follows_its_generator() -> None:
    x = torch.ones(16, 3, 32, 32)
    moved = augment(x, generator(0))
    torch.testing.assert_close(moved[:, :, 12:20, 12:20], x[:, :, 12:20, 12:20])
    assert (moved[:, :, 0] < 0.5).any()  # what comes in from outside is zero
    assert torch.equal(moved, augment(x, generator(0)))
    assert not torch.equal(moved, augment(x, generator(1)))


def test_augmentation_mirrors_turns_and_moves_a_dot_by_as_much_as_it_says() -> None:
    x = torch.zeros(400, 1, 33, 33)
    x[:, :, 15:18, 23:26] = 1  # 8 pixels right of the middle
    moved = augment(x, generator(0))[:, 0]
    places = torch.arange(33.0) - 16
    across = (moved * places).sum((1, 2)) / moved.sum((1, 2))
    down = (moved * places[:, None]).sum((1, 2)) / moved.sum((1, 2))
    mirrored = across < 0
    assert 0.4 < mirrored.float().mean() < 0.6
    assert 2.7 < across.abs().min() < 4.5  # at least (8 - 4) cos 15° - 4 sin 15°
    assert 11 < across.abs().max() < 12.7  # at most the length of (8 + 4, 4)
    assert 5 < down.abs().max() < 7  # at most (8 + 4) sin 15° + 4 cos 15°


def test_every_epoch_shows_every_image_once_in_an_order_of_its_own() -> None:
    model, seen = network(), list[Tensor]()
    model.register_forward_pre_hook(
        lambda m, args: seen.append(args[0].sum((1, 2, 3))) if m.training else None
    )
    fit(model, some(120), Recipe(epochs=2, rate=1e-6, batch=120, validation=0.1), NORMALIZATION)
    first, second = seen
    assert len(first) == 108
    torch.testing.assert_close(first.sort().values, second.sort().values)
    assert not torch.equal(first, second)
