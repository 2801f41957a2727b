"""SVHN's .mat files."""

from pathlib import Path

import numpy as np
import pytest

import qualms
from qualms.data import load
from tests.data.layouts import IMAGES, LABELS, write_svhn


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


def test_errors(tmp_path: Path) -> None:
    with pytest.raises(qualms.QualmsError, match=r"no test_32x32\.mat in .*svhn.*SVHN; get .*http"):
        load("svhn", tmp_path)
    path = write_svhn(tmp_path)
    whole = path.read_bytes()
    for content in (whole[:3000], whole[:50], b"", b"MATLAB 7.3 MAT-file" + bytes(600)):
        path.write_bytes(content)
        with pytest.raises(
            qualms.QualmsError, match=r"test_32x32\.mat (is cut or not a MATLAB 5 file|has no variables)"
        ):
            load("svhn", tmp_path)
    write_svhn(tmp_path, X=IMAGES)
    with pytest.raises(qualms.QualmsError, match=r"X in .*test_32x32\.mat is uint8 of shape \(3, 3, 32, 32\)"):
        load("svhn", tmp_path)
    write_svhn(tmp_path, X=IMAGES.transpose(2, 3, 1, 0).astype(float))
    with pytest.raises(qualms.QualmsError, match="is float64 of shape"):
        load("svhn", tmp_path)
    write_svhn(tmp_path, X={"a": 1})
    with pytest.raises(qualms.QualmsError, match="struct.*and not the numbers X and y"):
        load("svhn", tmp_path)
    write_svhn(tmp_path, y=np.array([1, 2]))
    with pytest.raises(qualms.QualmsError, match="3 images and 2 labels"):
        load("svhn", tmp_path)
    for labels in ([0, 1, 2], [1, 2, 11], [1, 2, 2.5], [1, 2, np.nan]):
        write_svhn(tmp_path, y=np.array(labels))
        with pytest.raises(qualms.QualmsError, match="not all classes from 1 to 10"):
            load("svhn", tmp_path)
