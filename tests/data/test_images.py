"""Images in memory."""

from pathlib import Path

import pytest
import torch

import qualms
from qualms.data import Images, load
from tests.helpers.layouts import write_folder


def images(count: int = 20, channels: int = 3, size: int = 8) -> Images:
    pixels = torch.randint(
        0, 256, (count, channels, size, size), generator=torch.Generator().manual_seed(1)
    )
    return Images("some", pixels.to(torch.uint8), torch.arange(count), ())


def test_take_keeps_images_and_labels_together() -> None:
    all_ = images()
    some = all_.take(torch.tensor([4, 2]))
    assert len(some) == 2
    assert some.labels is not None
    assert some.labels.tolist() == [4, 2]
    assert torch.equal(some.pixels, all_.pixels[[4, 2]])
    assert torch.equal(all_.take(slice(3, 5)).pixels, all_.pixels[3:5])


def test_a_subset_starts_with_every_smaller_one_and_the_seed_alone_decides_it() -> None:
    all_ = images()
    torch.manual_seed(5)
    seven = all_.subset(7, seed=3)
    torch.manual_seed(6)
    assert torch.equal(seven.pixels, all_.subset(7, seed=3).pixels)
    assert torch.equal(all_.subset(4, seed=3).pixels, seven.pixels[:4])
    assert not torch.equal(all_.subset(7, seed=4).pixels, seven.pixels)


def test_a_subset_of_all_is_shuffled_too() -> None:
    all_ = images()
    for count in (None, 20, 1000):
        labels = all_.subset(count).labels
        assert labels is not None
        assert labels.tolist() != list(range(20))
        assert sorted(labels.tolist()) == list(range(20))


def test_images_without_labels_stay_so() -> None:
    bare = Images("bare", images().pixels, None)
    assert bare.subset(3).labels is None
    assert bare.convert(1, 4).labels is None


def test_nothing_to_fit_is_the_same_object() -> None:
    all_ = images()
    assert all_.convert(3, 8) is all_


def test_gray_weighs_colors_as_they_look() -> None:
    pure = torch.zeros(3, 3, 2, 2, dtype=torch.uint8)
    for channel in range(3):
        pure[channel, channel] = 255
    assert Images("pure", pure, None).convert(1, 2).pixels[:, 0, 0, 0].tolist() == [76, 150, 29]


def test_gray_becomes_color_of_equal_channels() -> None:
    gray = images(channels=1)
    assert torch.equal(gray.convert(3, 8).pixels, gray.pixels.expand(-1, 3, -1, -1))


def test_shrinking_averages_and_does_not_skip_pixels() -> None:
    stripes = torch.zeros(1, 1, 8, 8, dtype=torch.uint8)
    stripes[..., ::2] = 200
    small = Images("stripes", stripes, None).convert(1, 2).pixels.int()
    assert small.shape == (1, 1, 2, 2)
    assert ((small - 100).abs() < 15).all()


def test_resizing_keeps_the_orientation_and_many_images_in_order() -> None:
    pixels = torch.zeros(2500, 1, 8, 8, dtype=torch.uint8)
    pixels[:, :, :4, 4:] = (torch.arange(2500) % 256).to(torch.uint8)[:, None, None, None]
    corner = Images("corner", pixels, None).convert(1, 4).pixels
    assert torch.equal(corner[:, 0, 0, 3].long(), torch.arange(2500) % 256)
    assert not corner[:, 0, 3].any()
    assert not corner[:, 0, :, 0].any()


def test_a_fingerprint_changes_with_pixels_labels_and_shape() -> None:
    all_ = images()
    same = Images("another name", all_.pixels.clone(), torch.arange(20))
    assert same.fingerprint() == all_.fingerprint()
    assert len(all_.fingerprint()) == 16
    other = all_.pixels.clone()
    other[7, 1, 2, 3] ^= 1
    changed = [
        Images("", other, all_.labels),
        Images("", all_.pixels, None),
        Images("", all_.pixels, torch.arange(20).flip(0)),
        Images("", all_.pixels.reshape(20, 3, 4, 16), all_.labels),
    ]
    assert len({x.fingerprint() for x in [all_, *changed]}) == 5


def test_errors() -> None:
    with pytest.raises(qualms.QualmsError, match="a subset of 0 images from some"):
        images().subset(0)
    with pytest.raises(qualms.QualmsError, match="some cannot be converted from 3 channels to 2"):
        images().convert(2, 8)
    with pytest.raises(qualms.QualmsError, match="resized to 0 pixels"):
        images().convert(3, 0)


def test_files_keep_their_names_through_every_choice(tmp_path: Path) -> None:
    write_folder(tmp_path)
    images = load("things", tmp_path)
    assert len(images.ids) == len(images)
    assert images.take(slice(1, None)).ids == images.ids[1:]
    order = torch.tensor([2, 0])
    assert images.take(order).ids == (images.ids[2], images.ids[0])
