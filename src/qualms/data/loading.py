"""`load`: read images by the name of a dataset or a path."""

import difflib
import os
from dataclasses import dataclass, replace
from pathlib import Path

from qualms.data.catalog import DATASETS
from qualms.data.folder import is_image, read_file, read_folder
from qualms.data.image_transform import ImageTransform
from qualms.data.images import Images
from qualms.data.npz import read_npz
from qualms.data.parquet import read_parquet
from qualms.data.places import NotFound
from qualms.deprecated import renamed_arguments
from qualms.errors import QualmsError

SPLITS = ("train", "test")
PREFIX = "data:"
# Datasets of which ROOT/name is one of the folders where their files are looked for.
NAMED_FOLDERS = ("mnist", "fashion-mnist", "svhn", "omniglot", "lsun")


@dataclass(frozen=True)
class _Options:
    """How images are read.

    Args:
        root: the folder of datasets.
        split: "train" or "test".
        transform: how each image is resized; None leaves its size.
        strict: whether an image that cannot be read is an error.
    """

    root: Path
    split: str
    transform: ImageTransform | None
    strict: bool


@renamed_arguments(fit="transform")
def load(
    name: str | Path,
    root: str | Path | None = None,
    split: str = "test",
    *,
    size: int | None = None,
    transform: ImageTransform | None = None,
    strict: bool = True,
) -> Images:
    """Load the images of a dataset, a folder or a file.

    Args:
        name: the path of an image folder, of an image, or of a `.npz` or `.parquet` file: absolute,
            relative to the working directory, or relative to `root`. Where there is no such path, a
            name of `DATASETS`, which `data:NAME` is in any case.
        root: the folder that holds the datasets: if not given, the one in the environment variable
            QUALMS_DATA, else `data`.
        split: train or test.
        size: resize all images to size x size.
        transform: how all images are resized and cropped; takes precedence over `size`.
        strict: whether an image that cannot be read is an error. If not, it is left out and among
            `Images.rejected`.

    Returns:
        The images, in the order of their file or of the sorted names of their files.

    Example:
        ```python
        from qualms.data import load

        digits = load("digits")  # comes with scikit-learn; most others need their files
        print(len(digits), digits.pixels.shape, digits.classes, digits.source)
        ```
    """
    if split not in SPLITS:
        raise QualmsError(f"the split {split!r} is invalid; choose train or test.")
    if size is not None and size < 1:
        raise QualmsError(f"images cannot be {size} pixels wide; pass at least 1, or None.")
    if transform is None and size is not None:
        transform = ImageTransform((size, size), by="as requested")
    options = _Options(root_of(root), split, transform, strict)
    dataset = dataset_name(name, root)
    if dataset is not None:
        return _transform(_read_dataset(dataset, options), transform)
    return _load_path(str(name), options)


def dataset_name(name: str | Path, root: str | Path | None = None) -> str | None:
    """Find the dataset that `load` would read for a name.

    Args:
        name: the `name` argument of `load`.
        root: the `root` argument of `load`.

    Returns:
        The name in `DATASETS`; None for a path, also for one that is called like a dataset.

    Example:
        ```python
        from pathlib import Path
        from qualms.data import dataset_name

        assert dataset_name("photos") == "photos"
        Path("photos").mkdir()
        assert dataset_name("photos") is None
        assert dataset_name("data:photos") == "photos"
        ```
    """
    text = str(name)
    if text.startswith(PREFIX):
        known = text.removeprefix(PREFIX)
        if known not in DATASETS:
            raise QualmsError(
                f"there is no dataset {known!r}; choose one of {', '.join(DATASETS)}."
            )
        return known
    if text in DATASETS and place_of(text, root_of(root)) is None:
        return text
    return None


def root_of(root: str | Path | None) -> Path:
    """Return the folder of datasets: the given one, else `$QUALMS_DATA`, else `data`."""
    if root is None:
        root = os.environ.get("QUALMS_DATA", "data")
    return Path(root)


def place_of(name: str, root: Path) -> Path | None:
    """Find an existing path in the working directory, or else in the folder of datasets.

    Args:
        name: the path; an absolute one stays itself.
        root: the folder of datasets.

    Returns:
        The existing path; None if there is none, or if it is the folder in which the dataset of
        that name has its files.
    """
    for place in (Path(name), root / name):
        # Unlike Path's, False for what cannot be a path.
        if os.path.exists(place):
            return None if _is_dataset_folder(place, name, root) else place
    return None


def _is_dataset_folder(place: Path, name: str, root: Path) -> bool:
    """Whether a place is the folder in which the dataset of that name has its files.

    Args:
        place: an existing path.
        name: the name that led to it.
        root: the folder of datasets.
    """
    folder = root / name
    if name not in NAMED_FOLDERS or not os.path.exists(folder):
        return False
    return os.path.samefile(place, folder)


def _read_dataset(name: str, options: _Options) -> Images:
    """Read the images of a dataset, and check their shape."""
    dataset, root = DATASETS[name], options.root
    try:
        images = dataset.read(root, options.split)
    except NotFound as missing:
        raise QualmsError(f"{missing}; {dataset.get}, in the dataset folder {root}.") from None
    shape = tuple(images.pixels.shape[1:])
    expected = (dataset.channels, dataset.size, dataset.size)
    if shape != expected:
        raise QualmsError(
            f"the images of {name} in {root} have shape {shape} instead of {expected}; "
            f"{dataset.get}."
        )
    source = f"{root}/ (dataset {name})"
    if dataset.package:
        source = f"bundled with {dataset.package}"
    return replace(images, source=source)


def _load_path(name: str, options: _Options) -> Images:
    """Read the images of a file or folder; errors also name a dataset of the same name."""
    try:
        return _read_path(name, options)
    except QualmsError as error:
        if name not in DATASETS or place_of(name, options.root) is None:
            raise
        raise QualmsError(
            f"{str(error).rstrip('.')}; for the dataset of that name, use {PREFIX}{name}."
        ) from error


def _read_path(name: str, options: _Options) -> Images:
    """Read the images of a file or folder with the reader for its kind."""
    path = place_of(name, options.root)
    split = options.split
    transform = options.transform
    if path is None:
        raise _unknown_name(name, options.root)
    shown, ending = _display_name(path), path.suffix.lower()
    if path.is_dir():
        return read_folder(path, split, shown, transform, options.strict)
    if ending == ".npz":
        images = replace(read_npz(path, split, shown), source=str(path))
        return _transform(images, transform)
    if ending == ".parquet":
        return read_parquet(path, shown, transform, options.strict)
    if is_image(path):
        return read_file(path, shown, transform)
    raise _unknown_name(name, options.root)


def _display_name(place: Path) -> str:
    """Name images after the last part of their path, without a file's ending.

    If that is the name of a dataset, the whole path is the name.
    """
    short = place.stem if place.is_file() else Path(os.path.abspath(place)).name
    if short not in DATASETS:
        return short
    return str(place) if str(place) not in DATASETS else f"./{place}"


def _transform(images: Images, transform: ImageTransform | None) -> Images:
    """Apply a transform to images in memory, and add a note on what it did; None does nothing."""
    if transform is None:
        return images
    note = transform.describe([images.size] * len(images))
    notes = (*images.notes, note) if note else images.notes
    return replace(transform.apply(images), notes=notes)


def _unknown_name(name: str, root: Path) -> QualmsError:
    """Create the error that a name is neither a dataset nor a path; it suggests similar names."""
    names = list(DATASETS)
    if root.is_dir():
        names += [entry.name for entry in root.iterdir()]
    close = difflib.get_close_matches(name, names, cutoff=0.5)
    hint = "pass a path that exists, or a name."
    if close:
        hint = f"did you mean {' or '.join(close)}?"
    return QualmsError(
        f"{name} is neither a dataset ({', '.join(DATASETS)}) nor an image, an image folder, "
        f"a .npz or a .parquet file in the working directory or {root}; {hint}"
    )
