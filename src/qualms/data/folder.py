"""Image files: one alone, a flat folder, or one folder for each class.

A folder may have folders for splits, `train` and `test` (or `val`, `validation`), around all that.
Classes are the folders' sorted names. Hidden files are skipped.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import import_module
from itertools import islice
from pathlib import Path

from qualms.data.decode import Unreadable, pillow
from qualms.data.image_transform import ImageTransform
from qualms.data.images import Images, build_images
from qualms.data.places import find_first
from qualms.data.reading import File, read_images
from qualms.errors import QualmsError

SPLIT_FOLDERS = {"train": ("train",), "test": ("test", "val", "validation")}
LSUN_FOLDERS = ("lsun", "LSUN", "LSUN_resize", "lsun_resize", "LSUN_test")
# Formats that Pillow recognizes and cannot decode.
NO_IMAGES = {"BUFR", "GRIB", "HDF5", "MPEG"}
# Images that Pillow does not read by itself, and the package that teaches it to, if there is one.
FOREIGN = {
    ".heic": "pillow-heif",
    ".heif": "pillow-heif",
    ".avif": "pillow-avif-plugin",
    ".jxl": "pillow-jxl-plugin",
    **dict.fromkeys((".arw", ".cr2", ".cr3", ".dng", ".nef", ".orf", ".raf", ".rw2"), ""),
    ".svg": "",
    ".exr": "",
}


@dataclass(frozen=True)
class Listing:
    """The image files of a folder, in order.

    Args:
        path: the folder.
        files: the images in it.
        labels: the class of each image; None if there are no folders for classes.
        classes: the names of the classes.
        others: the files that are no images.
    """

    path: Path
    files: list[Path]
    labels: list[int] | None
    classes: tuple[str, ...]
    others: list[Path]

    def to_read(self, start: int = 0) -> Iterator[File]:
        """Yield the images from position `start` on, as `read_images` takes them."""
        for file in islice(self.files, start, None):
            yield _as_file(self.path, file)


@dataclass(frozen=True)
class _Entries:
    """The folders, images and other files directly in a folder, without hidden ones."""

    folders: list[Path]
    images: list[Path]
    others: list[Path]


def read_lsun(root: Path, split: str) -> Images:
    """Read LSUN, rooms and buildings: images that a network for CIFAR does not know.

    Args:
        root: the folder of datasets; the images are in one of `LSUN_FOLDERS`.
        split: "train" or "test", if there are folders for splits.

    Returns:
        Color images [n, 3, 32, 32]; the folders are the classes.
    """
    places = [root / folder for folder in LSUN_FOLDERS]
    path = find_first(places, f"folder {' or '.join(LSUN_FOLDERS)}")
    return read_folder(path, split, "lsun", ImageTransform((32, 32), by="to match CIFAR"))


def read_folder(
    path: Path,
    split: str,
    name: str,
    transform: ImageTransform | None = None,
    strict: bool = True,
) -> Images:
    """Read all images in a folder, in the order of their sorted names.

    Args:
        path: the folder; if it has a folder for the split, that folder is read.
        split: "train" or "test".
        name: the name of the images, in tables and errors.
        transform: how each image is resized; None leaves them in one size.
        strict: whether an image that cannot be read is an error. If not, it is left out and among
            `Images.rejected`.
    """
    listing = list_folder(path, split)
    path = listing.path
    read = read_images(list(listing.to_read()), path, transform, strict)
    labels = None
    if listing.labels is not None:
        labels = [listing.labels[i] for i in read.kept]
    ids = [listing.files[i].relative_to(path).as_posix() for i in read.kept]
    return build_images(
        name,
        path,
        read.pixels,
        labels,
        listing.classes,
        ids=tuple(ids),
        source=f"{path}/ (folder)",
        notes=(*read.notes, *_skipped_note(listing.others)),
        rejected=read.rejected,
    )


def read_file(path: Path, name: str, transform: ImageTransform | None = None) -> Images:
    """Read one image file as `Images` of length 1, without a label.

    Args:
        path: the path of the file.
        name: the name of the images, in tables and errors.
        transform: how the image is resized; None leaves its size.
    """
    read = read_images([_as_file(path.parent, path)], path, transform, strict=True)
    images = build_images(name, path, read.pixels, None)
    source = f"{path} (image file)"
    return replace(images, ids=(path.name,), source=source, notes=read.notes)


def list_folder(path: Path, split: str) -> Listing:
    """List the image files of a folder by their sorted names.

    Subfolders, if there are any, are the classes; their images may be at any depth.

    Args:
        path: the folder; if it has a folder for the split, that folder is listed.
        split: "train" or "test".
    """
    path = _split_folder(path, split)
    entries = _list_entries(path)
    if not entries.folders:
        return Listing(path, entries.images, None, (), entries.others)
    if entries.images:
        raise QualmsError(
            f"{path} has both images ({entries.images[0].name}) and class folders "
            f"({entries.folders[0].name}); keep only one of the two."
        )
    files: list[Path] = []
    labels: list[int] = []
    others = entries.others
    for label, folder in enumerate(entries.folders):
        inside, more = _list_below(folder)
        if not inside:
            # If it were skipped, the classes after it would have other numbers than in a split in
            # which it has images.
            raise QualmsError(f"the class folder {folder} has no images; add some, or remove it.")
        files += inside
        labels += [label] * len(inside)
        others += more
    classes = tuple(folder.name for folder in entries.folders)
    return Listing(path, files, labels, classes, others)


def is_image(path: Path) -> bool:
    """Whether a file is an image by the ending of its name, whether or not it can be read here."""
    ending = path.suffix.lower()
    if ending not in endings() and ending not in FOREIGN:
        return False
    # A link to a missing file is listed too, and later reported as an image that cannot be read.
    return path.is_file() or path.is_symlink()


@cache
def endings() -> frozenset[str]:
    """Find the endings of the files that this installation of Pillow reads, such as `.png`.

    HEIF files are among them if the package pillow-heif is installed.
    """
    library = pillow()
    with suppress(ImportError):
        import_module("pillow_heif").register_heif_opener()
    readable = set()
    for ending, kind in library.registered_extensions().items():
        if kind in library.OPEN and kind not in NO_IMAGES:
            readable.add(ending)
    return frozenset(readable)


def _split_folder(path: Path, split: str) -> Path:
    """Return the folder of a split inside a folder, or the folder itself if it has no splits.

    If all its folders are those of other splits, an error is raised.

    Args:
        path: the folder.
        split: "train" or "test".
    """
    for name in SPLIT_FOLDERS[split]:
        if (path / name).is_dir():
            return path / name
    split_names = {name for names in SPLIT_FOLDERS.values() for name in names}
    folders = [folder.name for folder in _list_entries(path).folders]
    if folders and split_names.issuperset(folders):
        # These are not classes: the folder holds only the other split.
        raise QualmsError(
            f"{path} has the folders {', '.join(folders)}, but none for the split {split}; "
            "choose another split."
        )
    return path


def _list_entries(path: Path) -> _Entries:
    """List what is directly in a folder, sorted by name."""
    entries = _Entries([], [], [])
    try:
        for entry in sorted(path.iterdir()):
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                entries.folders.append(entry)
            elif is_image(entry):
                entries.images.append(entry)
            else:
                entries.others.append(entry)
    except OSError as error:
        raise QualmsError(
            f"{path} cannot be read ({error.strerror}); check that it is a readable folder."
        ) from None
    return entries


def _list_below(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the images and the other files of a folder at any depth.

    Some datasets have folders inside that of a class.
    """
    entries = _list_entries(folder)
    images, others = entries.images, entries.others
    for inside in entries.folders:
        more_images, more_others = _list_below(inside)
        images += more_images
        others += more_others
    return images, others


def _as_file(folder: Path, file: Path) -> File:
    """Describe a file for `read_images`, which reads its bytes later.

    Args:
        folder: the folder; the image's id is the file's path inside it.
        file: the path of the file.
    """
    return File(file.relative_to(folder).as_posix(), str(file), partial(_read_content, file))


def _read_content(file: Path) -> bytes:
    """Return the bytes of an image file, or raise `Unreadable` with the reason."""
    ending = file.suffix.lower()
    if ending not in endings():
        # Empty if no package reads such files.
        package = FOREIGN[ending]
        needs = "Pillow cannot read"
        if package:
            needs = f"needs the package {package}"
        raise Unreadable(str(file), f"a {ending} file, which {needs}")
    try:
        return file.read_bytes()
    except OSError as error:
        raise Unreadable(str(file), f"a file that cannot be read ({error.strerror})") from None


def _skipped_note(files: list[Path]) -> list[str]:
    """Return a sentence about the files that were skipped because they are no images.

    Args:
        files: the skipped files.

    Returns:
        A list of the one sentence; empty if no file was skipped.
    """
    if not files:
        return []
    names = ", ".join(file.name for file in files[:3])
    if len(files) > 3:
        names += ", …"
    if len(files) == 1:
        return [f"1 file that is not an image was skipped ({names})"]
    return [f"{len(files)} files that are not images were skipped ({names})"]
