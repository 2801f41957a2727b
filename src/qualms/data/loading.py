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
        transform: how each image is resized; None keeps its size.
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
            relative to the working directory, or relative to `root`. If there is no such path, a
            key of `DATASETS`. `data:KEY` names a dataset even if there is a path called KEY.
        root: the folder that holds the datasets; None for the folder in the environment variable
            QUALMS_DATA, or `data` if that is not set.
        split: train or test.
        size: resize all images to size x size.
        transform: how all images are resized and cropped; takes precedence over `size`.
        strict: whether an image that cannot be read is an error. If not, the image is left out and
            listed in `Images.rejected`.

    Returns:
        The images, in the order of their one file, or of the sorted names of their files.

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
    options = _Options(datasets_root(root), split, transform, strict)
    dataset = dataset_name(name, root)
    if dataset is not None:
        return _apply_transform(_read_dataset(dataset, options), transform)
    return _load_path(str(name), options)


def dataset_name(name: str | Path, root: str | Path | None = None) -> str | None:
    """Return the key in `DATASETS` of the dataset that `load` would read for a name.

    Args:
        name: the `name` argument of `load`.
        root: the `root` argument of `load`.

    Returns:
        The key in `DATASETS`; None if `load` would read a path, even one that is called like a
        dataset.

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
    if text in DATASETS and find_data_path(text, datasets_root(root)) is None:
        return text
    return None


def datasets_root(root: str | Path | None) -> Path:
    """Return the folder of datasets: `root` unless it is None, else `$QUALMS_DATA`, else `data`."""
    if root is None:
        root = os.environ.get("QUALMS_DATA", "data")
    return Path(root)


def find_data_path(name: str, root: Path) -> Path | None:
    """Find the existing path that a name stands for, unless the name stands for a dataset.

    Args:
        name: an absolute path, or one relative to the working directory or to `root`.
        root: the folder of datasets.

    Returns:
        The existing path; None if there is none, or if the path is the folder in which the dataset
        called `name` keeps its files.
    """
    for path in (Path(name), root / name):
        # Unlike `Path.exists`, this returns False for names that cannot be a path.
        if os.path.exists(path):
            return None if _is_dataset_folder(path, name, root) else path
    return None


def _is_dataset_folder(path: Path, name: str, root: Path) -> bool:
    """Whether a path is the folder in which the dataset called `name` keeps its files.

    Args:
        path: an existing path.
        name: a name that may be a dataset's.
        root: the folder of datasets.
    """
    # Only the datasets in NAMED_FOLDERS keep their files in ROOT/name.
    folder = root / name
    if name not in NAMED_FOLDERS or not os.path.exists(folder):
        return False
    return os.path.samefile(path, folder)


def _read_dataset(name: str, options: _Options) -> Images:
    """Read the images of the dataset `DATASETS[name]`, and check their shape."""
    dataset, root = DATASETS[name], options.root
    try:
        images = dataset.read(root, options.split)
    except NotFound as missing:
        # `get` says where the files come from.
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
    """Read the images of a file or folder.

    If the path is called like a dataset, errors also say how to load that dataset.
    """
    try:
        return _read_path(name, options)
    except QualmsError as error:
        if name not in DATASETS:
            raise
        raise QualmsError(
            f"{str(error).rstrip('.')}; for the dataset of that name, use {PREFIX}{name}."
        ) from error


def _read_path(name: str, options: _Options) -> Images:
    """Read the images of a file or folder with the reader for its kind."""
    path = find_data_path(name, options.root)
    split = options.split
    transform = options.transform
    if path is None:
        raise _unknown_name_error(name, options.root)
    display_name, ending = _display_name(path), path.suffix.lower()
    if path.is_dir():
        return read_folder(path, split, display_name, transform, options.strict)
    if ending == ".npz":
        images = replace(read_npz(path, split, display_name), source=str(path))
        return _apply_transform(images, transform)
    if ending == ".parquet":
        return read_parquet(path, display_name, transform, options.strict)
    if is_image(path):
        return read_file(path, display_name, transform)
    raise _unknown_name_error(name, options.root)


def _display_name(path: Path) -> str:
    """Name the images at a path after its last part, without a file's ending.

    If a dataset has that name, the name of the images is the whole path, to tell the two apart.
    """
    # `abspath` resolves "." and "..", which have no name.
    short = path.stem if path.is_file() else Path(os.path.abspath(path)).name
    if short not in DATASETS:
        return short
    # Even the whole path may be called like a dataset.
    return str(path) if str(path) not in DATASETS else f"./{path}"


def _apply_transform(images: Images, transform: ImageTransform | None) -> Images:
    """Apply a transform to images in memory, and add a note on what it changed.

    If `transform` is None, the images are returned unchanged.
    """
    if transform is None:
        return images
    note = transform.describe([images.size] * len(images))
    notes = (*images.notes, note) if note else images.notes
    return replace(transform.apply(images), notes=notes)


def _unknown_name_error(name: str, root: Path) -> QualmsError:
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
