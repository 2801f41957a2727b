"""SVHN's .mat files."""

import struct
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat

import qualms
from qualms.data import load
from tests.helpers.layouts import IMAGES, LABELS, write_svhn


@pytest.mark.parametrize("folder", [".", "svhn", "SVHN"])
def test_images_stand_upright_and_class_10_is_the_digit_0(folder: str, tmp_path: Path) -> None:
    (tmp_path / folder).mkdir(exist_ok=True)
    write_svhn(tmp_path / folder)
    found = load("svhn", tmp_path)
    np.testing.assert_array_equal(found.pixels, IMAGES)
    assert found.pixels[0].nonzero().tolist() == [[0, 1, 5]]
    assert found.labels is not None
    assert found.labels.tolist() == LABELS
    assert found.classes == tuple("0123456789")


def test_labels_may_be_matlabs_doubles(tmp_path: Path) -> None:
    write_svhn(tmp_path, y=np.array([3.0, 10.0, 9.0])[:, None])
    found = load("svhn", tmp_path)
    assert found.labels is not None
    assert found.labels.tolist() == LABELS


def test_scipy_is_not_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_svhn(tmp_path)
    for module in ("scipy", "scipy.io"):
        monkeypatch.setitem(sys.modules, module, None)
    np.testing.assert_array_equal(load("svhn", tmp_path).pixels, IMAGES)


def test_a_file_of_a_machine_that_counts_bytes_from_the_other_end(tmp_path: Path) -> None:
    def element(kind: int, content: bytes) -> bytes:
        return struct.pack(">II", kind, len(content)) + content + bytes(-len(content) % 8)

    def matrix(name: bytes, shape: tuple[int, ...], kind: int, numbers: bytes) -> bytes:
        lengths = struct.pack(f">{len(shape)}i", *shape)
        parts = [(6, struct.pack(">II", kind, 0)), (5, lengths), (1, name), (2, numbers)]
        return element(14, b"".join(element(*part) for part in parts))

    images = matrix(b"X", (32, 32, 3, 3), 9, IMAGES.transpose(2, 3, 1, 0).tobytes(order="F"))
    labels = matrix(b"y", (3, 1), 6, bytes([3, 10, 9]))  # doubles, stored as bytes
    (tmp_path / "test_32x32.mat").write_bytes(
        b"MATLAB 5.0".ljust(124) + b"\1\0MI" + images + labels
    )
    found = load("svhn", tmp_path)
    np.testing.assert_array_equal(found.pixels, IMAGES)
    assert found.labels is not None
    assert found.labels.tolist() == LABELS


@pytest.mark.parametrize("place", range(128, 200, 4))
@pytest.mark.parametrize("number", [0, 1, 2**31 - 1, 2**31, 2**32 - 1])
def test_a_length_or_type_that_lies_is_an_error_or_does_no_harm(
    place: int, number: int, tmp_path: Path
) -> None:
    path = write_svhn(tmp_path)
    savemat(path, {"y": np.array([[3], [10], [9]], np.uint8), "X": IMAGES.transpose(2, 3, 1, 0)})
    content = bytearray(path.read_bytes())
    content[place : place + 4] = number.to_bytes(4, "little")
    path.write_bytes(content)
    with suppress(qualms.QualmsError):  # and nothing else
        assert len(load("svhn", tmp_path)) == 3


def test_errors(tmp_path: Path) -> None:
    with pytest.raises(qualms.QualmsError, match=r"no test_32x32\.mat in .*svhn.*SVHN; get .*http"):
        load("svhn", tmp_path)
    path = write_svhn(tmp_path)
    whole = path.read_bytes()
    for content in (whole[:3000], whole[:50], b"", b"MATLAB 7.3 MAT-file" + bytes(600)):
        path.write_bytes(content)
        with pytest.raises(qualms.QualmsError, match=r"test_32x32\.mat is truncated or not"):
            load("svhn", tmp_path)
    write_svhn(tmp_path, X=IMAGES)
    with pytest.raises(
        qualms.QualmsError, match=r"X in .*test_32x32\.mat is uint8 of shape \(3, 3, 32, 32\)"
    ):
        load("svhn", tmp_path)
    write_svhn(tmp_path, X=IMAGES.transpose(2, 3, 1, 0).astype(float))
    with pytest.raises(qualms.QualmsError, match="is float64 of shape"):
        load("svhn", tmp_path)
    write_svhn(tmp_path, X={"a": 1})
    with pytest.raises(qualms.QualmsError, match=r"X \(struct\).*instead of the numbers X and y"):
        load("svhn", tmp_path)
    write_svhn(tmp_path, y=np.array([1, 2]))
    with pytest.raises(qualms.QualmsError, match="3 images but 2 labels"):
        load("svhn", tmp_path)
    for labels in ([0, 1, 2], [1, 2, 11], [1, 2, 2.5], [1, 2, np.nan]):
        write_svhn(tmp_path, y=np.array(labels))
        with pytest.raises(qualms.QualmsError, match="not all from 1 to 10"):
            load("svhn", tmp_path)
