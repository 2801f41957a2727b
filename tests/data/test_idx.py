"""MNIST and Fashion-MNIST."""

import gzip
from pathlib import Path

import numpy as np
import pytest

import qualms
from qualms.data import load
from tests.helpers.layouts import GRAY, LABELS, idx_bytes, write_idx, write_mnist, write_plain_mnist

FOLDERS = {
    "mnist": ["MNIST/raw", "MNIST", "mnist", "."],
    "fashion-mnist": ["FashionMNIST/raw", "FashionMNIST", "fashion-mnist", "."],
}


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize(
    "spelling", ["{}-idx{}-ubyte.gz", "{}-idx{}-ubyte", "{}.idx{}-ubyte", "{}.idx{}-ubyte.gz"]
)
def test_every_place_and_spelling(name: str, split: str, spelling: str, tmp_path: Path) -> None:
    stem = "train" if split == "train" else "t10k"
    for folder in FOLDERS[name]:
        root = tmp_path / folder.replace("/", "-")
        write_idx(
            root / folder,
            spelling.format(f"{stem}-images", 3),
            spelling.format(f"{stem}-labels", 1),
        )
        found = load(name, root, split)
        np.testing.assert_array_equal(found.pixels[:, 0], GRAY)
        assert found.labels is not None
        assert found.labels.tolist() == LABELS
        assert found.name == name
        assert len(found.classes) == 10


def test_the_splits_are_not_mixed_up(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    with pytest.raises(qualms.QualmsError, match="there is no train-images-idx3-ubyte"):
        load("mnist", tmp_path, "train")


def test_a_missing_file_names_all_its_places_and_where_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(qualms.QualmsError) as error:
        load("mnist", tmp_path)
    for part in (
        "t10k-images-idx3-ubyte",
        f"{tmp_path}/MNIST/raw",
        f"{tmp_path}/mnist",
        "https://",
        "MNIST/raw",
    ):
        assert part in str(error.value)
    write_mnist(tmp_path).with_name("t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(qualms.QualmsError, match="there is no t10k-labels-idx1-ubyte"):
        load("mnist", tmp_path)


def test_a_cut_gzip_file(tmp_path: Path) -> None:
    path = write_mnist(tmp_path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(
        qualms.QualmsError, match=r"t10k-images-idx3-ubyte\.gz is truncated or not a gzip file"
    ):
        load("mnist", tmp_path)


@pytest.mark.parametrize("change", [-1, 1])
def test_a_length_that_disagrees_with_the_header(change: int, tmp_path: Path) -> None:
    path = write_plain_mnist(tmp_path)
    content = path.read_bytes()
    path.write_bytes(content[:-1] if change < 0 else content + b"\0")
    with pytest.raises(
        qualms.QualmsError,
        match=r"t10k-images-idx3-ubyte is 236[79] bytes long, .* says 2368",
    ):
        load("mnist", tmp_path)


def test_a_header_that_promises_the_world_costs_nothing(tmp_path: Path) -> None:
    path = write_plain_mnist(tmp_path)
    path.write_bytes(bytes((0, 0, 8, 3)) + b"\xff" * 12)
    with pytest.raises(qualms.QualmsError, match="bytes long, but its header says"):
        load("mnist", tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"\0\0", bytes((0, 0, 13, 3)) + bytes(20), idx_bytes(np.zeros(3))]
)
def test_the_wrong_magic_number(content: bytes, tmp_path: Path) -> None:
    write_plain_mnist(tmp_path).write_bytes(content)
    with pytest.raises(
        qualms.QualmsError, match=r"t10k-images-idx3-ubyte starts with .*00 00 08 03"
    ):
        load("mnist", tmp_path)


def test_labels_that_do_not_fit_the_images(tmp_path: Path) -> None:
    labels = write_mnist(tmp_path).with_name("t10k-labels-idx1-ubyte.gz")
    labels.write_bytes(gzip.compress(idx_bytes(np.array([1, 2]))))
    with pytest.raises(
        qualms.QualmsError, match=r"t10k-images.*with t10k-labels.* contains 3 images but 2 labels"
    ):
        load("mnist", tmp_path)
    labels.write_bytes(gzip.compress(idx_bytes(np.array([1, 2, 10]))))
    with pytest.raises(
        qualms.QualmsError, match="range from 1 to 10, but classes are numbered 0 to 9"
    ):
        load("mnist", tmp_path)


def test_no_images_at_all(tmp_path: Path) -> None:
    write_plain_mnist(tmp_path).write_bytes(idx_bytes(GRAY[:0]))
    with pytest.raises(qualms.QualmsError, match="contains no images"):
        load("mnist", tmp_path)


def test_images_of_another_size_are_not_mnist(tmp_path: Path) -> None:
    write_plain_mnist(tmp_path).write_bytes(idx_bytes(GRAY[:, :14]))
    with pytest.raises(
        qualms.QualmsError, match=r"images of mnist in .* \(1, 14, 28\) instead of \(1, 28, 28\)"
    ):
        load("mnist", tmp_path)
