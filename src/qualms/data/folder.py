"""Image files: one alone, a flat folder, or one folder for each class.

A folder may instead hold a folder for each split, `train` and `test` (or `val`, `validation`), and
each of these is one of the above. Classes are numbered in the order of the class folders' sorted
names. Hidden files are skipped.
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
# Formats that Pillow recognizes but cannot decode.
UNDECODABLE_FORMATS = {"BUFR", "GRIB", "HDF5", "MPEG"}
# For the endings of image files that Pillow alone does not read: the package that adds a decoder to
# Pillow, or "" if there is none.
PLUGIN_PACKAGES = {
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
        labels: the class of each image; None if there are no class folders.
        classes: the names of the classes.
        other_files: the files that are no images.
    """

    path: Path
    files: list[Path]
    labels: list[int] | None
    classes: tuple[str, ...]
    other_files: list[Path]

    def to_read(self, start: int = 0) -> Iterator[File]:
        """Yield a `File`, the input of `read_images`, for each image from position `start` on."""
        for file in islice(self.files, start, None):
            yield _as_file(self.path, file)


@dataclass(frozen=True)
class _Entries:
    """The folders, images and other files directly in a folder, without hidden ones."""

    folders: list[Path]
    images: list[Path]
    other_files: list[Path]


def read_lsun(root: Path, split: str) -> Images:
    """Read LSUN, rooms and buildings: images of classes that a network for CIFAR does not know.

    Args:
        root: the folder of datasets; the images are in one of its folders `LSUN_FOLDERS`.
        split: "train" or "test"; only used if there are folders for splits.

    Returns:
        Color images [n, 3, 32, 32], resized to CIFAR's size; each folder of images is a class.
    """
    candidates = [root / folder for folder in LSUN_FOLDERS]
    path = find_first(candidates, f"folder {' or '.join(LSUN_FOLDERS)}")
    transform = ImageTransform((32, 32), by="to match CIFAR")
    return read_folder(path, split, "lsun", transform)


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
        transform: how each image is resized; None keeps the images' size, which must then be the
            same for all.
        strict: whether an image that cannot be read is an error. If not, the image is left out and
            listed in `Images.rejected`.
    """
    listing = list_folder(path, split)
    # `path` may be the folder of the split from here on.
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
        notes=(*read.notes, *_describe_skipped(listing.other_files)),
        rejected=read.rejected,
    )


def read_file(path: Path, name: str, transform: ImageTransform | None = None) -> Images:
    """Read one image file as `Images` of length 1, without a label.

    Args:
        path: the path of the file.
        name: the name of the images, in tables and errors.
        transform: how the image is resized; None keeps its size.
    """
    read = read_images([_as_file(path.parent, path)], path, transform, strict=True)
    images = build_images(name, path, read.pixels, labels=None)
    source = f"{path} (image file)"
    return replace(
        images,
        ids=(path.name,),
        source=source,
        notes=read.notes,
    )


def list_folder(path: Path, split: str) -> Listing:
    """List the image files of a folder in the order of their sorted names.

    Subfolders, if there are any, are the classes; images may be at any depth below them.

    Args:
        path: the folder; if it has a folder for the split, that folder is listed.
        split: "train" or "test".
    """
    path = _find_split_folder(path, split)
    entries = _list_entries(path)
    if not entries.folders:
        return Listing(
            path,
            entries.images,
            labels=None,
            classes=(),
            other_files=entries.other_files,
        )
    if entries.images:
        raise QualmsError(
            f"{path} has both images ({entries.images[0].name}) and class folders "
            f"({entries.folders[0].name}); keep only one of the two."
        )
    files: list[Path] = []
    labels: list[int] = []
    other_files = entries.other_files
    for label, folder in enumerate(entries.folders):
        class_images, class_other_files = _list_recursively(folder)
        if not class_images:
            # Skipping the empty folder would renumber the later classes, so that they would have
            # other labels than in a split where the folder has images.
            raise QualmsError(f"the class folder {folder} has no images; add some, or remove it.")
        files += class_images
        labels += [label] * len(class_images)
        other_files += class_other_files
    classes = tuple(folder.name for folder in entries.folders)
    return Listing(path, files, labels, classes, other_files)


def is_image(path: Path) -> bool:
    """Whether a file's name ends like an image's, even if Pillow cannot decode it here."""
    ending = path.suffix.lower()
    if ending not in readable_endings() and ending not in PLUGIN_PACKAGES:
        return False
    # A link to a missing file counts too, so that it is reported as an image that cannot be read.
    return path.is_file() or path.is_symlink()


@cache
def readable_endings() -> frozenset[str]:
    """Find the endings of the files that this installation of Pillow reads, such as `.png`.

    If the package pillow-heif is installed, this first teaches Pillow to read HEIF files.
    """
    library = pillow()
    with suppress(ImportError):
        import_module("pillow_heif").register_heif_opener()
    readable = set()
    for ending, file_format in library.registered_extensions().items():
        # Formats that are not in OPEN can only be written.
        if file_format in library.OPEN and file_format not in UNDECODABLE_FORMATS:
            readable.add(ending)
    return frozenset(readable)


def _find_split_folder(path: Path, split: str) -> Path:
    """Return the folder of a split inside a folder, or the folder itself if it has no splits.

    Args:
        path: the folder.
        split: "train" or "test".

    Raises:
        QualmsError: if all folders inside are those of other splits.
    """
    for name in SPLIT_FOLDERS[split]:
        if (path / name).is_dir():
            return path / name
    split_names = {name for names in SPLIT_FOLDERS.values() for name in names}
    folders = [folder.name for folder in _list_entries(path).folders]
    if folders and split_names.issuperset(folders):
        # Folders called `train` and the like are not classes: only the other split is there.
        raise QualmsError(
            f"{path} has the folders {', '.join(folders)}, but none for the split {split}; "
            "choose another split."
        )
    return path


def _list_entries(path: Path) -> _Entries:
    """List the folders, images and other files directly in a folder, each sorted by name."""
    entries = _Entries(
        folders=[],
        images=[],
        other_files=[],
    )
    try:
        for entry in sorted(path.iterdir()):
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                entries.folders.append(entry)
            elif is_image(entry):
                entries.images.append(entry)
            else:
                entries.other_files.append(entry)
    except OSError as error:
        raise QualmsError(
            f"{path} cannot be read ({error.strerror}); check that it is a readable folder."
        ) from None
    return entries


def _list_recursively(folder: Path) -> tuple[list[Path], list[Path]]:
    """List the images, and the other files, of a class folder and of all folders below it."""
    entries = _list_entries(folder)
    images, other_files = entries.images, entries.other_files
    for subfolder in entries.folders:
        more_images, more_other_files = _list_recursively(subfolder)
        images += more_images
        other_files += more_other_files
    return images, other_files


def _as_file(folder: Path, file: Path) -> File:
    """Create the `File` for an image file, whose bytes `read_images` reads later.

    Args:
        folder: the folder of images; the image's id is the file's path relative to this folder.
        file: the path of the image file.
    """
    relative = file.relative_to(folder)
    return File(relative.as_posix(), where=str(file), content=partial(_read_content, file))


def _read_content(file: Path) -> bytes:
    """Return the bytes of an image file, or raise `Unreadable` with the reason."""
    ending = file.suffix.lower()
    if ending not in readable_endings():
        # `is_image` has let this ending pass, so it is here; "" if no package reads such files.
        package = PLUGIN_PACKAGES[ending]
        needs = "Pillow cannot read"
        if package:
            needs = f"needs the package {package}"
        raise Unreadable(str(file), f"a {ending} file, which {needs}")
    try:
        return file.read_bytes()
    except OSError as error:
        raise Unreadable(str(file), f"a file that cannot be read ({error.strerror})") from None


def _describe_skipped(files: list[Path]) -> list[str]:
    """Write a sentence about the files that were skipped because they are no images.

    Args:
        files: the skipped files.

    Returns:
        A list with the sentence; an empty list if no file was skipped.
    """
    if not files:
        return []
    names = ", ".join(file.name for file in files[:3])
    if len(files) > 3:
        names += ", …"
    if len(files) == 1:
        return [f"1 file that is not an image was skipped ({names})"]
    return [f"{len(files)} files that are not images were skipped ({names})"]
