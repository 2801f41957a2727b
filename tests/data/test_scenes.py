"""Scenes: the same for the same seed, with the objects that were asked for where the labels say."""

import pytest
import torch

import qualms
from qualms.data import load
from qualms.data.scenes import (
    CLASSES,
    IGNORED,
    KINDS,
    KNOWN_COUNTS,
    LIKE_DIGITS,
    UNKNOWN,
    _read_unknown_objects,
    scenes,
)

EVERY = (None, *KINDS)


@pytest.mark.parametrize("unknown", EVERY)
def test_a_scene_follows_from_its_number_and_the_seed(unknown: str | None) -> None:
    some, more, other = (
        scenes(3, "test", unknown),
        scenes(5, "test", unknown),
        scenes(3, "test", unknown, seed=1),
    )
    assert torch.equal(some.pixels, more.pixels[:3])
    assert torch.equal(some.labels, more.labels[:3])
    assert not torch.equal(some.labels, other.labels)
    assert not torch.equal(some.labels, scenes(3, "train", unknown).labels)


def test_training_scenes_hold_what_is_known_and_all_of_it() -> None:
    found = scenes(60, "train")
    assert set(found.labels.unique().tolist()) == {*range(len(CLASSES)), IGNORED}
    each = [len({*scene.unique().tolist()} - {0, IGNORED}) for scene in found.labels]
    assert min(each) >= 1
    assert max(each) <= KNOWN_COUNTS[1]


@pytest.mark.parametrize("unknown", KINDS)
def test_an_unknown_object_is_in_every_scene_beside_known_ones(unknown: str) -> None:
    found = scenes(40, "test", unknown)
    assert (found.labels == UNKNOWN).flatten(1).any(1).all()
    known = (found.labels > 0) & (found.labels < len(CLASSES))
    assert known.flatten(1).any(1).double().mean() > 0.9


@pytest.mark.parametrize("unknown", [None, "digits", "letters"])
def test_ink_is_brighter_than_the_background_and_its_edge_lies_between(unknown: str | None) -> None:
    found = scenes(40, "test", unknown)
    pixels = found.pixels[:, 0].double()
    background, edge = pixels[found.labels == 0].mean(), pixels[found.labels == IGNORED].mean()
    classes = [c for c in found.labels.unique().tolist() if c not in (0, IGNORED)]
    assert all(background < edge < pixels[found.labels == c].mean() for c in classes)


def test_held_out_digits_are_never_among_the_known_and_letters_like_digits_never_among_the_unknown() -> (
    None
):
    assert "8" not in CLASSES
    assert "9" not in CLASSES
    assert len(_read_unknown_objects("letters", "test").shapes) == 4 * (52 - len(LIKE_DIGITS))
    digits = load("digits").labels
    assert digits is not None
    assert len(_read_unknown_objects("digits", "test").shapes) == int((digits >= 8).sum())


def test_what_cannot_be_made_is_told() -> None:
    with pytest.raises(
        qualms.QualmsError,
        match="cannot make 0 scenes of split 'test' with unknown objects None",
    ):
        scenes(0)
    with pytest.raises(qualms.QualmsError, match="None or one of digits, letters, photos"):
        scenes(1, "test", "cats")
    with pytest.raises(qualms.QualmsError, match="the split train or test"):
        scenes(1, "validation")
