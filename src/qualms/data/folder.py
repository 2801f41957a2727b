"""Image files: one alone, a flat folder, or one folder for each class."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from itertools import islice
from pathlib import Path

from qualms.data.decode import Unreadable, pillow
from qualms.data.image_transform import ImageTransform
from qualms.data.images import Images, build_images
from qualms.data.places import find_first
from qualms.data.reading import File, Read, read_images
from qualms.errors import QualmsError

SPLIT_FOLDERS = {"train": ("train",), "test": ("test", "val", "validation")}
LSUN_FOLDERS = ("lsun", "LSUN", "LSUN_resize", "lsun_resize", "LSUN_test")
NO_IMAGES = {"BUFR", "GRIB", "HDF5", "MPEG"}  # formats that Pillow recognizes and cannot decode
# Images that Pillow does not read by itself, and the package that teaches it to.
FOREIGN = {
    **dict.fromkeys((".heic", ".heif"), "pillow-heif"),
    ".avif": "pillow-avif-plugin",
    ".jxl": "pillow-jxl-plugin",
    **dict.fromkeys(
        (".arw", ".cr2", ".cr3", ".dng", ".nef", ".orf", ".raf", ".rw2", ".svg", ".exr"), ""
    ),
}


def read_lsun(root: Path, split: str) -> Images:
    """Rooms and buildings, 32x32: images that a network for CIFAR does not know. Its folders are
    its classes.
    """
    path = find_first(
        (root / folder for folder in LSUN_FOLDERS), f"folder {' or '.join(LSUN_FOLDERS)}"
    )
    return read_folder(path, split, "lsun", ImageTransform((32, 32), by="as CIFAR's are"))


@dataclass(frozen=True)
class Listing:
    """The image files of a folder in order, with the class of each if there is a folder for each
    class.
    """

    path: Path
    files: list[Path]
    labels: list[int] | None
    classes: tuple[str, ...]
    passed: list[Path]  # what is no image

    def to_read(self, start: int = 0) -> Iterator[File]:
        """The files as a reader takes them, from a place on."""
        return (_file(self.path, file) for file in islice(self.files, start, None))


def read_folder(
    path: Path, split: str, name: str, fit: ImageTransform | None = None, strict: bool = True
) -> Images:
    """All the images in a folder, by their sorted names; in its folder for the split, if it has
    one.
    """
    found = list_folder(path, split)
    read = read_images(list(found.to_read()), found.path, fit, strict)
    return _images(name, found.path, found.files, found.labels, found.classes, found.passed, read)


def list_folder(path: Path, split: str) -> Listing:
    """The image files of a folder by their sorted names; in its folder for the split, if it has
    one.
    """
    path = _of_split(path, split)
    folders, loose, passed = _entries(path)
    if not folders:
        return Listing(path, loose, None, (), passed)
    if loose:
        raise QualmsError(
            f"{path} holds images both loose ({loose[0].name}) and in folders ({folders[0].name}); keep one of the two."
        )
    files: list[Path] = []
    labels: list[int] = []
    for label, folder in enumerate(folders):
        inside, more = _below(folder)
        if not inside:
            # Leaving it out would count the classes after it differently from a split where it has
            # images.
            raise QualmsError(f"the class folder {folder} holds no images; fill it, or remove it.")
        files += inside
        labels += [label] * len(inside)
        passed += more
    return Listing(path, files, labels, tuple(folder.name for folder in folders), passed)


def read_file(path: Path, name: str, fit: ImageTransform | None = None) -> Images:
    """One image."""
    return _images(
        name,
        path,
        [path],
        None,
        (),
        [],
        read_images([_file(path.parent, path)], path, fit, strict=True),
    )


def is_image(path: Path) -> bool:
    """Whether a file is an image by the ending of its name, whether or not it can be read here."""
    return path.suffix.lower() in endings() | FOREIGN.keys() and (
        path.is_file() or path.is_symlink()
    )


def _images(
    name: str,
    path: Path,
    files: list[Path],
    labels: list[int] | None,
    classes: tuple[str, ...],
    passed: list[Path],
    read: Read,
) -> Images:
    kept = [files[place] for place in read.kept]
    alone = files == [path]
    return build_images(
        name,
        path,
        read.pixels,
        None if labels is None else [labels[place] for place in read.kept],
        classes,
        ids=tuple(file.name if alone else file.relative_to(path).as_posix() for file in kept),
        source=f"{path} (image file)" if alone else f"{path}/ (folder)",
        notes=(*read.notes, *_passed_over(passed)),
        rejected=read.rejected,
    )


def _of_split(path: Path, split: str) -> Path:
    for folder in SPLIT_FOLDERS[split]:
        if (path / folder).is_dir():
            return path / folder
    every = {name for names in SPLIT_FOLDERS.values() for name in names}
    folders, _, _ = _entries(path)
    if folders and all(folder.name in every for folder in folders):
        # As classes they would be a surprise: this folder holds the other split alone.
        there = ", ".join(folder.name for folder in folders)
        raise QualmsError(
            f"{path} has the folders {there} and none for the split {split}; ask for another split."
        )
    return path


def _entries(path: Path) -> tuple[list[Path], list[Path], list[Path]]:
    """Folders, images and all else, but for what is hidden."""
    try:
        visible = sorted(entry for entry in path.iterdir() if not entry.name.startswith("."))
    except OSError as error:
        raise QualmsError(
            f"{path} cannot be read ({error.strerror}); check that it is a folder you may read."
        ) from None
    folders = [entry for entry in visible if entry.is_dir()]
    images = [entry for entry in visible if entry not in set(folders) and is_image(entry)]
    known = {*folders, *images}
    return folders, images, [entry for entry in visible if entry not in known]


def _below(folder: Path) -> tuple[list[Path], list[Path]]:
    # Some sets keep a class's images a folder further down.
    folders, images, passed = _entries(folder)
    for inside in folders:
        more, others = _below(inside)
        images += more
        passed += others
    return images, passed


def _file(path: Path, file: Path) -> File:
    return File(file.relative_to(path).as_posix(), str(file), partial(_content, file))


def _content(file: Path) -> bytes:
    ending = file.suffix.lower()
    if ending not in endings():
        needs = (
            f"needs the package {FOREIGN[ending]}" if FOREIGN[ending] else "Pillow does not read"
        )
        raise Unreadable(str(file), f"a {ending} file, which {needs}")
    try:
        return file.read_bytes()
    except OSError as error:
        raise Unreadable(str(file), f"no file that can be read ({error.strerror})") from None


@cache
def endings() -> frozenset[str]:
    """Those of the files that Pillow reads here."""
    library = pillow()
    with suppress(ImportError):
        import_module("pillow_heif").register_heif_opener()
    known = library.registered_extensions()
    return frozenset(
        ending for ending, kind in known.items() if kind in library.OPEN and kind not in NO_IMAGES
    )


def _passed_over(files: list[Path]) -> list[str]:
    if not files:
        return []
    names = ", ".join(file.name for file in files[:3]) + (", …" if len(files) > 3 else "")
    one = len(files) == 1
    return [
        f"{len(files)} {'file that is not an image was' if one else 'files that are not images were'} "
        f"passed over ({names})"
    ]
