"""Folders of images, and LSUN, which is one."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import qualms
from qualms.data import load
from tests.helpers.layouts import IMAGES, png, write_folder


def plain(value: int, height: int = 4, width: int = 4) -> np.ndarray:
    return np.full((height, width, 3), value, np.uint8)


def put(path: Path, image: np.ndarray, kind: str = "PNG") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(png(image, kind))


def test_one_folder_a_class_in_sorted_order(tmp_path: Path) -> None:
    write_folder(tmp_path)
    found = load("things", tmp_path)
    assert found.name == "things"
    assert found.classes == ("class0", "class3", "class9")
    np.testing.assert_array_equal(found.pixels, IMAGES[[1, 0, 2]])
    assert found.pixels[1].nonzero().tolist() == [[0, 1, 5]]
    assert found.labels is not None
    assert found.labels.tolist() == [0, 1, 2]


def test_a_flat_folder_has_no_labels(tmp_path: Path) -> None:
    for name, value in (("b.png", 2), ("a.PNG", 1), (".c.png", 3)):
        put(tmp_path / "flat" / name, plain(value))
    (tmp_path / "flat" / "notes.txt").write_text("not an image")
    found = load("flat", tmp_path)
    assert found.labels is None
    assert found.classes == ()
    assert found.pixels[:, 0, 0, 0].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("ending", "kind"), [("jpg", "JPEG"), ("JPEG", "JPEG"), ("bmp", "BMP"), ("webp", "WEBP")]
)
def test_other_formats(ending: str, kind: str, tmp_path: Path) -> None:
    put(tmp_path / "flat" / f"a.{ending}", plain(100), kind)
    assert (load("flat", tmp_path).pixels.int() - 100).abs().max() <= 2


def test_gray_palette_and_transparent_images_become_color(tmp_path: Path) -> None:
    put(tmp_path / "flat" / "a.png", np.full((4, 4), 7, np.uint8))
    put(tmp_path / "flat" / "b.png", np.full((4, 4, 4), 9, np.uint8))
    palette = Image.fromarray(plain(11)).convert("P")
    palette.save(tmp_path / "flat" / "c.png", transparency=b"\0" * 5)
    found = load("flat", tmp_path).pixels
    assert found.shape == (3, 3, 4, 4)
    assert found[:2, :, 0, 0].tolist() == [[7] * 3, [9] * 3]


@pytest.mark.parametrize("test", ["test", "val", "validation"])
def test_the_folder_of_the_split_is_used(test: str, tmp_path: Path) -> None:
    put(tmp_path / "set" / "train" / "cat" / "a.png", plain(1))
    put(tmp_path / "set" / test / "cat" / "a.png", plain(2))
    assert int(load("set", tmp_path, "train").pixels.max()) == 1
    assert int(load("set", tmp_path).pixels.max()) == 2
    assert load("set", tmp_path).classes == ("cat",)


def test_the_other_split_is_no_class(tmp_path: Path) -> None:
    put(tmp_path / "set" / "train" / "cat" / "a.png", plain(1))
    with pytest.raises(
        qualms.QualmsError, match="has the folders train, but none for the split test"
    ):
        load("set", tmp_path)


def test_images_a_folder_further_down_belong_to_the_class(tmp_path: Path) -> None:
    put(tmp_path / "set" / "cat" / "images" / "a.png", plain(1))
    put(tmp_path / "set" / "dog" / "b.png", plain(2))
    found = load("set", tmp_path)
    assert found.classes == ("cat", "dog")
    assert found.pixels[:, 0, 0, 0].tolist() == [1, 2]


def test_images_of_several_sizes_need_a_size(tmp_path: Path) -> None:
    put(tmp_path / "flat" / "a.png", plain(1, 4, 6))
    put(tmp_path / "flat" / "b.png", plain(2, 5, 5))
    with pytest.raises(
        qualms.QualmsError, match=r"a\.png is 6 x 4, but b\.png is 5 x 5; pass size="
    ):
        load("flat", tmp_path)
    found = load("flat", tmp_path, size=3)
    assert found.pixels.shape == (2, 3, 3, 3)
    assert found.pixels[:, 0, 0, 0].tolist() == [1, 2]


@pytest.mark.parametrize("folder", ["lsun", "LSUN", "LSUN_resize", "lsun_resize", "LSUN_test"])
def test_lsun_comes_in_32_pixels_from_any_of_its_folders(folder: str, tmp_path: Path) -> None:
    put(tmp_path / folder / "bedroom" / "a.png", plain(1, 48, 64))
    found = load("lsun", tmp_path)
    assert found.pixels.shape == (1, 3, 32, 32)
    assert found.name == "lsun"


def test_errors(tmp_path: Path) -> None:
    with pytest.raises(qualms.QualmsError, match=r"no folder lsun or LSUN .* in .*; get LSUN"):
        load("lsun", tmp_path)
    file = write_folder(tmp_path)
    whole = file.read_bytes()
    for content in (whole[: len(whole) // 2], b"", b"not an image"):
        file.write_bytes(content)
        with pytest.raises(
            qualms.QualmsError, match=r"class3/picture\.png is truncated or not an image"
        ):
            load("things", tmp_path)
    file.unlink()
    with pytest.raises(qualms.QualmsError, match=r"class folder .*class3 has no images"):
        load("things", tmp_path)
    put(tmp_path / "things" / "loose.png", plain(1))
    with pytest.raises(
        qualms.QualmsError, match=r"both images \(loose\.png\) and class folders \(class0\)"
    ):
        load("things", tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(qualms.QualmsError, match="empty contains no images"):
        load("empty", tmp_path)
