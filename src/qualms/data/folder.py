"""Folders of image files: flat, or one folder for each class."""

from pathlib import Path

import numpy as np

from qualms.data.decode import decoded, stacked
from qualms.data.images import Images, images_of
from qualms.data.places import content_of, first_of
from qualms.errors import QualmsError

ENDINGS = {".png", ".jpg", ".jpeg", ".bmp", ".webp"}
SPLIT_FOLDERS = {"train": ("train",), "test": ("test", "val", "validation")}
LSUN_FOLDERS = ("lsun", "LSUN", "LSUN_resize", "lsun_resize", "LSUN_test")


def read_lsun(root: Path, split: str) -> Images:
    """Rooms and buildings, 32x32: images that a network for CIFAR does not know. Its folders are its classes."""
    path = first_of((root / folder for folder in LSUN_FOLDERS), f"folder {' or '.join(LSUN_FOLDERS)}")
    return read_folder(path, split, 32, "lsun")


def read_folder(path: Path, split: str, size: int | None, name: str) -> Images:
    """All the images in a folder, by their sorted names; in its folder for the split, if it has one."""
    path = _of_split(path, split)
    folders, loose = _entries(path)
    if not folders:
        return images_of(name, path, _pixels(path, loose, size), None, ids=_ids(path, loose))
    if loose:
        raise QualmsError(
            f"{path} holds images both loose ({loose[0].name}) and in folders ({folders[0].name}); keep one of the two."
        )
    files: list[Path] = []
    labels: list[int] = []
    for label, folder in enumerate(folders):
        inside = _files(folder)
        if not inside:
            # Leaving it out would count the classes after it differently from a split where it has images.
            raise QualmsError(f"the class folder {folder} holds no images; fill it, or remove it.")
        files += inside
        labels += [label] * len(inside)
    classes = tuple(folder.name for folder in folders)
    return images_of(name, path, _pixels(path, files, size), labels, classes, _ids(path, files))


def _of_split(path: Path, split: str) -> Path:
    for folder in SPLIT_FOLDERS[split]:
        if (path / folder).is_dir():
            return path / folder
    every = {name for names in SPLIT_FOLDERS.values() for name in names}
    folders, _ = _entries(path)
    if folders and all(folder.name in every for folder in folders):
        # As classes they would be a surprise: this folder holds the other split alone.
        there = ", ".join(folder.name for folder in folders)
        raise QualmsError(f"{path} has the folders {there} and none for the split {split}; ask for another split.")
    return path


def _entries(path: Path) -> tuple[list[Path], list[Path]]:
    try:
        visible = sorted(entry for entry in path.iterdir() if not entry.name.startswith("."))
    except OSError as error:
        raise QualmsError(
            f"{path} cannot be read ({error.strerror}); check that it is a folder you may read."
        ) from None
    return [entry for entry in visible if entry.is_dir()], [entry for entry in visible if _is_image(entry)]


def _files(folder: Path) -> list[Path]:
    # Some sets keep a class's images a folder further down.
    folders, images = _entries(folder)
    return images + [file for inside in folders for file in _files(inside)]


def _is_image(entry: Path) -> bool:
    return entry.suffix.lower() in ENDINGS and entry.is_file()


def _ids(path: Path, files: list[Path]) -> tuple[str, ...]:
    return tuple(file.relative_to(path).as_posix() for file in files)


def _pixels(path: Path, files: list[Path], size: int | None) -> np.ndarray:
    named = ((str(file.relative_to(path)), decoded(content_of(file), str(file), size)) for file in files)
    return stacked(named, path)
