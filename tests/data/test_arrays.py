""".npz files."""

import io
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qualms
from qualms.data import Images, load
from tests.helpers.layouts import IMAGES, LABELS


def npz(folder: Path, **arrays: Any) -> Images:
    np.savez(folder / "set.npz", **arrays)
    return load("set.npz", folder)


@pytest.mark.parametrize("key", ["x", "images", "data", "x_test", "test_images"])
def test_images_by_any_of_their_names(key: str, tmp_path: Path) -> None:
    found = npz(tmp_path, **{key: IMAGES})
    np.testing.assert_array_equal(found.pixels, IMAGES)
    assert found.labels is None
    assert found.name == "set"


@pytest.mark.parametrize(
    ("images", "labels"),
    [
        ("x", "y"),
        ("images", "labels"),
        ("data", "labels"),
        ("x_test", "y_test"),
        ("test_images", "test_labels"),
    ],
)
@pytest.mark.parametrize("kind", [np.uint8, np.int64, ">i2"])
def test_labels_of_any_whole_numbers(images: str, labels: str, kind: Any, tmp_path: Path) -> None:
    for values in (np.array(LABELS, kind), np.array(LABELS, kind)[:, None]):
        found = npz(tmp_path, **{images: IMAGES, labels: values})
        assert found.labels is not None
        assert found.labels.tolist() == LABELS


def test_the_arrays_of_the_split(tmp_path: Path) -> None:
    train, test = IMAGES[:2], IMAGES[2:]
    found = npz(
        tmp_path,
        x_train=train,
        y_train=LABELS[:2],
        x_test=test,
        y_test=LABELS[2:],
        x=IMAGES,
        y=LABELS,
    )
    np.testing.assert_array_equal(found.pixels, test)
    found = load(tmp_path / "set.npz", split="train")
    np.testing.assert_array_equal(found.pixels, train)
    assert found.labels is not None
    assert found.labels.tolist() == LABELS[:2]


def test_the_labels_of_everything_are_not_those_of_a_split(tmp_path: Path) -> None:
    assert npz(tmp_path, x_test=IMAGES, y=LABELS).labels is None


def test_channels_may_be_first_last_or_absent_and_the_red_pixel_stays(tmp_path: Path) -> None:
    for images in (IMAGES, IMAGES.transpose(0, 2, 3, 1), np.asfortranarray(IMAGES)):
        found = npz(tmp_path, x=images)
        assert found.pixels[0].nonzero().tolist() == [[0, 1, 5]]
        np.testing.assert_array_equal(found.pixels, IMAGES)
    for images in (IMAGES[:, 0], IMAGES[:, :1], IMAGES[:, 0, :, :, None]):
        np.testing.assert_array_equal(npz(tmp_path, x=images).pixels, IMAGES[:, :1])


@pytest.mark.parametrize("kind", [np.float32, np.float64, ">f4"])
def test_floats_from_0_to_1_are_rounded_to_bytes(kind: Any, tmp_path: Path) -> None:
    np.testing.assert_array_equal(npz(tmp_path, x=(IMAGES / 255).astype(kind)).pixels, IMAGES)
    assert npz(tmp_path, x=np.full((1, 8, 8), 0.499, kind)).pixels.unique().tolist() == [127]


def test_a_compressed_file(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "set.npz", x=IMAGES)
    np.testing.assert_array_equal(load("set.npz", tmp_path).pixels, IMAGES)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.zeros((5, 3, 8, 3), np.uint8)}, r"x in .*set\.npz .* could be the channels"),
        ({"x": np.zeros((5, 1, 1, 1), np.uint8)}, "could be the channels"),
        ({"x": np.zeros((5, 4, 8, 8), np.uint8)}, r"\(5, 4, 8, 8\); pass \[n, h, w\]"),
        ({"x": np.zeros((5, 8), np.uint8)}, r"\(5, 8\); pass"),
        ({"x": np.uint8(3)}, r"\(\); pass"),
        ({"x": np.full((2, 8, 8), 255.0)}, "from 255 to 255; pass bytes"),
        ({"x": np.full((2, 8, 8), -0.1)}, r"from -0\.1 to"),
        ({"x": np.full((2, 8, 8), np.nan)}, "from nan to nan"),
        ({"x": np.zeros((2, 8, 8), np.int64)}, "is int64; pass bytes"),
        ({"x": np.zeros((0, 8, 8), np.uint8)}, "contains no images"),
        ({"x": np.zeros((0, 8, 8))}, "contains no images"),
        (
            {"pictures": IMAGES},
            "contains pictures, but no images; name the array of images one of x_test, test_images, x, images, data",
        ),
        ({"x_train": IMAGES}, "contains x_train, but no images"),
        ({"x": IMAGES, "y": [1, 2]}, "3 images but 2 labels"),
        ({"x": IMAGES, "y": 1}, "3 images but 1 labels"),
        ({"x": IMAGES, "y": [-1, 2, 3]}, "range from -1 to 3"),
        ({"x": IMAGES, "y": np.array([2**63, 2, 3], np.uint64)}, "classes are numbered from 0"),
        ({"x": IMAGES, "y": [0.5, 2, 3]}, r"are float64 of shape \(3,\)"),
        (
            {"x": IMAGES, "y": np.eye(3, dtype=int)},
            r"of shape \(3, 3\); each label must be a single whole number",
        ),
    ],
)
def test_what_cannot_be_read_is_named(arrays: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(qualms.QualmsError, match=message):
        npz(tmp_path, **arrays)


def test_a_file_that_python_2_wrote_is_read_without_a_word(tmp_path: Path) -> None:
    header = b"{'descr': '|u1', 'fortran_order': False, 'shape': (2L, 4L, 3L)}"
    header += b" " * (117 - len(header)) + b"\n"
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as file:
        file.writestr(
            "x.npy",
            b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + bytes(range(24)),
        )
    assert load(tmp_path / "a.npz").pixels.flatten().tolist() == list(range(24))


def test_objects_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        qualms.QualmsError, match=r"set\.npz is truncated or not a \.npz file of plain numbers"
    ):
        npz(tmp_path, x=np.array([{"a": 1}], object))


def test_cut_and_false_files(tmp_path: Path) -> None:
    np.savez(tmp_path / "set.npz", x=IMAGES)
    whole = (tmp_path / "set.npz").read_bytes()
    for content in (whole[:-10], whole[:100], b"", b"hello"):
        (tmp_path / "set.npz").write_bytes(content)
        with pytest.raises(qualms.QualmsError, match=r"set\.npz is truncated or not"):
            load("set.npz", tmp_path)


def test_a_header_that_promises_the_world_costs_nothing(tmp_path: Path) -> None:
    header = io.BytesIO()
    described = {"descr": "|u1", "fortran_order": False, "shape": (2**40, 32, 32)}
    np.lib.format.write_array_header_1_0(header, described)
    with zipfile.ZipFile(tmp_path / "set.npz", "w") as file:
        file.writestr("x.npy", header.getvalue() + bytes(100))
    with pytest.raises(qualms.QualmsError, match=r"set\.npz is truncated or not"):
        load("set.npz", tmp_path)
