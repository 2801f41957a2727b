"""Omniglot's folders."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw

import qualms
from qualms.data import load
from tests.helpers.layouts import GRAY, png, write_omniglot


@pytest.mark.parametrize("outer", ["omniglot-py", "omniglot", "."])
def test_ink_is_bright_as_in_mnist_wherever_the_folders_are(outer: str, tmp_path: Path) -> None:
    write_omniglot(tmp_path)
    moved = tmp_path / "moved"
    (moved / outer).mkdir(parents=True)
    (tmp_path / "omniglot-py" / "images_evaluation").rename(moved / outer / "images_evaluation")
    found = load("omniglot", moved)
    np.testing.assert_array_equal(found.pixels[:, 0], GRAY)
    assert found.labels is not None
    assert found.labels.tolist() == [0, 1, 2]
    assert found.classes == ("Greek/character01", "Greek/character02", "Greek/character03")


def test_labels_count_characters_and_not_drawings(tmp_path: Path) -> None:
    for character in ("Latin/character02", "Greek/character01", "Latin/character01"):
        folder = tmp_path / "omniglot-py" / "images_background" / character
        folder.mkdir(parents=True)
        for drawing in (2, 1):
            (folder / f"{drawing}.png").write_bytes(png(np.full((28, 28), drawing, np.uint8)))
        (folder / ".hidden.png").write_bytes(b"")
    found = load("omniglot", tmp_path, "train")
    assert found.classes == ("Greek/character01", "Latin/character01", "Latin/character02")
    assert found.labels is not None
    assert found.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert (255 - found.pixels[:, 0, 0, 0].int()).tolist() == [1, 2] * 3


def test_the_original_files_of_105_black_and_white_pixels(tmp_path: Path) -> None:
    file = write_omniglot(tmp_path)
    image = Image.new("1", (105, 105), 1)
    ImageDraw.Draw(image).rectangle((0, 0, 104, 51), fill=0)
    image.save(file)
    found = load("omniglot", tmp_path).pixels[0, 0]
    assert found.shape == (28, 28)
    assert (found[:12] > 240).all()
    assert (found[16:] < 15).all()


def test_errors(tmp_path: Path) -> None:
    with pytest.raises(
        qualms.QualmsError, match=r"no images_evaluation in .*omniglot-py.*omniglot.*get .*https"
    ):
        load("omniglot", tmp_path)
    file = write_omniglot(tmp_path)
    file.write_bytes(file.read_bytes()[:40])
    with pytest.raises(
        qualms.QualmsError, match=r"character01/0001_01\.png is truncated or not an image"
    ):
        load("omniglot", tmp_path)
    (tmp_path / "images_background").mkdir()
    with pytest.raises(
        qualms.QualmsError, match=r"images_background contains no ALPHABET/characterNN/\*\.png"
    ):
        load("omniglot", tmp_path, "train")
