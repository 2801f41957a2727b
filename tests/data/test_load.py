"""Names and paths."""

import ast
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import qualms
from qualms.data import DATASETS, dataset_name, load
from tests.helpers import layouts


def test_the_folder_of_datasets_is_given_or_named_by_the_environment_or_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    layouts.write_mnist(tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("QUALMS_DATA", raising=False)
    assert len(load("mnist")) == layouts.COUNT
    monkeypatch.setenv("QUALMS_DATA", str(tmp_path / "elsewhere"))
    with pytest.raises(qualms.QualmsError, match="elsewhere"):
        load("mnist")
    assert len(load("mnist", tmp_path / "data")) == layouts.COUNT
    assert len(load("mnist", "data")) == layouts.COUNT


def test_a_path_is_absolute_or_below_the_root_or_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layouts.write_npz(tmp_path)
    monkeypatch.chdir(tmp_path)
    for name, root in (
        (tmp_path / "things.npz", "nowhere"),
        ("things.npz", tmp_path),
        ("things.npz", "nowhere"),
    ):
        np.testing.assert_array_equal(load(name, root).pixels, layouts.IMAGES)


def test_any_images_come_in_the_size_that_is_asked_for(tmp_path: Path) -> None:
    for write in (
        layouts.write_mnist,
        layouts.write_npz,
        layouts.write_folder,
        layouts.write_parquet,
    ):
        write(tmp_path)
    for name, channels in (("mnist", 1), ("things.npz", 3), ("things", 3), ("things.parquet", 3)):
        assert load(name, tmp_path, size=16).pixels.shape == (layouts.COUNT, channels, 16, 16)


def test_an_unknown_name_is_told_its_neighbors(tmp_path: Path) -> None:
    (tmp_path / "tiny-imagenet").mkdir()
    with pytest.raises(
        qualms.QualmsError, match=r"cifar-10 is neither a dataset .* did you mean cifar10"
    ):
        load("cifar-10", tmp_path)
    with pytest.raises(qualms.QualmsError, match="did you mean tiny-imagenet"):
        load("tiny-imagnet", tmp_path)
    for name in ("q" * 5000, "q\0q"):
        with pytest.raises(qualms.QualmsError, match="pass a path that exists, or a name"):
            load(name, tmp_path)
    (tmp_path / "qqq.txt").write_text("")
    with pytest.raises(
        qualms.QualmsError, match=r"/qqq\.txt is neither .*mnist.* nor an image, an image folder"
    ):
        load(tmp_path / "qqq.txt", tmp_path)


def test_splits_and_sizes_that_are_none() -> None:
    with pytest.raises(qualms.QualmsError, match="the split 'val' is invalid"):
        load("digits", split="val")
    with pytest.raises(qualms.QualmsError, match="cannot be 0 pixels wide"):
        load("digits", size=0)


def test_digits_need_no_file(tmp_path: Path) -> None:
    from sklearn.datasets import load_digits

    train, test = (load("digits", tmp_path, split) for split in ("train", "test"))
    assert (len(train), len(test)) == (1437, 360)
    assert train.labels is not None
    assert test.labels is not None
    both = torch.cat([train.pixels, test.pixels])
    np.testing.assert_allclose(
        both[:, 0] / 255 * 16, load_digits().images, atol=16 / 255 / 2 + 1e-5
    )
    assert int(both.max()) == 255
    assert torch.cat([train.labels, test.labels]).tolist() == load_digits().target.tolist()
    x = DATASETS["digits"].normalization.apply(train.pixels)
    assert float(x.mean()) == pytest.approx(0, abs=0.01)
    assert float(x.std()) == pytest.approx(1, abs=0.01)


def test_the_catalog_agrees_with_itself() -> None:
    assert set(DATASETS) == {
        "mnist", "fashion-mnist", "cifar10", "cifar100", "svhn", "omniglot", "lsun", "digits", "letters", "photos",
    }  # fmt: skip
    for name, dataset in DATASETS.items():
        assert len(dataset.normalization.mean) == dataset.channels, name
        assert "http" in dataset.get or name in ("digits", "letters", "photos")


@pytest.mark.parametrize(
    ("module", "package", "write", "name"),
    [
        ("PIL.Image", "pillow", layouts.write_folder, "things"),
        ("PIL.Image", "pillow", layouts.write_omniglot, "omniglot"),
        ("pyarrow", "pyarrow", layouts.write_parquet, "things.parquet"),
        ("sklearn.datasets", "scikit-learn", layouts.write_mnist, "digits"),
    ],
)
def test_a_package_that_is_not_there_is_named(
    module: str,
    package: str,
    write: layouts.Writer,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write(tmp_path)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        qualms.QualmsError, match=rf"reading .* needs {package}; run pip install '\.\[app\]'"
    ):
        load(name, tmp_path)


def test_importing_needs_no_package_of_the_extra() -> None:
    for file in (Path(qualms.__file__).parent / "data").glob("*.py"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                module = node.names[0].name if isinstance(node, ast.Import) else str(node.module)
                known = {*sys.stdlib_module_names, "jaxtyping", "numpy", "qualms", "torch"}
                assert module.split(".")[0] in known, (file.name, module)


@pytest.mark.parametrize(
    ("name", "count", "shape"), [("letters", 208, (1, 28, 28)), ("photos", 260, (3, 32, 32))]
)
def test_letters_and_photos_need_no_file(
    tmp_path: Path, name: str, count: int, shape: tuple[int, ...]
) -> None:
    train, test = (load(name, tmp_path, split) for split in ("train", "test"))
    assert tuple(train.pixels.shape) == tuple(test.pixels.shape) == (count, *shape)
    assert test.labels is not None
    assert int(test.labels.max()) + 1 == len(test.classes) == DATASETS[name].classes
    seen = {bytes(image.numpy()) for image in train.pixels.flatten(1)}
    again = [bytes(image.numpy()) in seen for image in test.pixels.flatten(1)]
    assert sum(again) <= (4 if name == "letters" else 0)  # a small l may look like a larger one


def test_letters_are_bright_on_dark_and_in_the_middle(tmp_path: Path) -> None:
    letters = load("letters", tmp_path).pixels.double()[:, 0]
    assert float(letters[:, 0, 0].max()) == 0
    places = torch.arange(28.0).double()
    center = (letters.sum(1) * places).sum(1) / letters.sum((1, 2))
    assert float((center - 13.5).abs().max()) < 4


def test_photos_are_patches_as_they_stand_in_the_photograph(tmp_path: Path) -> None:
    from sklearn.datasets import load_sample_image

    china = load_sample_image("china.jpg")
    train = load("photos", tmp_path, "train")
    np.testing.assert_array_equal(train.pixels[0].permute(1, 2, 0).numpy(), china[:32, :32])


def square(path: Path, value: int, count: int = 1) -> None:
    path.mkdir(parents=True)
    for i in range(count):
        (path / f"{i}.png").write_bytes(layouts.png(np.full((4, 4, 3), value, np.uint8)))


def test_a_folder_in_the_working_directory_beats_one_in_the_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    square(tmp_path / "mine", 1, count=10)
    square(tmp_path / "root" / "mine", 2, count=3)
    found = load("mine", "root")
    assert (len(found), int(found.pixels.max()), found.source) == (10, 1, "mine/ (folder)")
    assert load("root/mine", "root").source == "root/mine/ (folder)"
    (tmp_path / "mine").rename(tmp_path / "other")
    assert load("mine", "root").source == "root/mine/ (folder)"


def test_a_path_beats_a_name_which_a_prefix_brings_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("QUALMS_DATA", raising=False)
    assert load("photos").source == "bundled with scikit-learn"
    square(tmp_path / "photos", 3)
    found = load("photos")
    assert (len(found), found.source) == (1, "photos/ (folder)")
    assert load("data:photos").source == "bundled with scikit-learn"
    square(tmp_path / "data" / "letters", 4)
    assert load("letters").source == "data/letters/ (folder)"
    with pytest.raises(
        qualms.QualmsError, match="there is no dataset 'photo'; choose one of mnist"
    ):
        load("data:photo")


@pytest.mark.parametrize("place", ["mnist", "sets/mnist", "data/mnist"])
def test_a_folder_called_like_a_dataset_is_not_taken_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.chdir(tmp_path)
    square(tmp_path / place, 3)
    assert load(place).name not in DATASETS
    assert dataset_name(place) is None
    np.savez(tmp_path / "mnist.npz", x=layouts.IMAGES)
    assert load("mnist.npz").name == "mnist.npz"


def test_the_folder_of_a_datasets_own_files_is_the_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("QUALMS_DATA", raising=False)
    (tmp_path / "data").mkdir()
    layouts.write_idx(
        tmp_path / "data" / "mnist", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"
    )
    assert load("mnist").source == "data/ (dataset mnist)"
    monkeypatch.chdir(tmp_path / "data")
    assert load("mnist", ".").name == "mnist"
    (tmp_path / "data" / "digits").mkdir()
    with pytest.raises(
        qualms.QualmsError,
        match=r"digits contains no images; .*; for the dataset of that name, use data:digits",
    ):
        load("digits")
