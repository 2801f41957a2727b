"""A name or a path in, images out."""

import difflib
import os
from dataclasses import replace
from pathlib import Path

from qualms.data.catalog import DATASETS
from qualms.data.folder import is_image, read_file, read_folder
from qualms.data.image_transform import ImageTransform
from qualms.data.images import Images
from qualms.data.npz import read_npz
from qualms.data.parquet import read_parquet
from qualms.data.places import NotFound
from qualms.errors import QualmsError, warn_renamed

SPLITS = ("train", "test")
PREFIX = "data:"
AT_HOME = (
    "mnist",
    "fashion-mnist",
    "svhn",
    "omniglot",
    "lsun",
)  # ROOT/name is one of the places of their files


def load(
    name: str | Path,
    root: str | Path | None = None,
    split: str = "test",
    *,
    size: int | None = None,
    transform: ImageTransform | None = None,
    strict: bool = True,
    fit: ImageTransform | None = None,
) -> Images:
    """The images of a dataset, a folder or a file.

    Args:
        name: the path of an image folder, of an image, or of a `.npz` or `.parquet` file: absolute,
            relative to the working directory, or relative to `root`. Where there is no such path, a
            name of `DATASETS`, which `data:NAME` is in any case.
        root: the folder that holds the datasets: if not given, the one in the environment variable
            QUALMS_DATA, else `data`.
        split: train or test.
        size: resize all images to size x size.
        transform: resize and crop all images so, whatever `size` is.
        strict: whether an image that cannot be read is an error. If not, it is left out and among
            `Images.rejected`.
        fit: the deprecated name of `transform`.

    Example:
        ```python
        from qualms.data import load

        digits = load("digits")  # comes with scikit-learn; other names need files of their own
        print(len(digits), digits.pixels.shape, digits.classes, digits.source)
        ```
    """
    if split not in SPLITS:
        raise QualmsError(f"the split {split!r} is not known; it is train or test.")
    if size is not None and size < 1:
        raise QualmsError(
            f"images cannot be {size} pixels wide; give a size of at least 1, or none."
        )
    if fit is not None:
        warn_renamed("load(fit=)", "load(transform=)")
        transform = fit
    if transform is None and size is not None:
        transform = ImageTransform((size, size), by="as asked for")
    folder, dataset = root_of(root), dataset_name(name, root)
    if dataset is not None:
        return _fitted(_named(dataset, folder, split), transform)
    place = place_of(str(name), folder)
    if place is None:
        raise _unknown(str(name), folder)
    try:
        return _at(place, str(name), folder, split, transform, strict)
    except QualmsError as error:
        if str(name) in DATASETS:
            raise QualmsError(
                f"{str(error).rstrip('.')}; the dataset of that name is {PREFIX}{name}."
            ) from error
        raise


def dataset_name(name: str | Path, root: str | Path | None = None) -> str | None:
    """The name in `DATASETS` that `load` takes this for; None for a path, also for one that is
    called like a dataset.

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
            raise QualmsError(f"there is no dataset {known!r}; there are {', '.join(DATASETS)}.")
        return known
    return text if text in DATASETS and place_of(text, root_of(root)) is None else None


def root_of(root: str | Path | None) -> Path:
    """The folder of datasets: this one, or that of the environment, or `data`."""
    return Path(root if root is not None else os.environ.get("QUALMS_DATA", "data"))


def place_of(name: str, root: Path) -> Path | None:
    """What exists by this path in the working directory or else in the folder of datasets."""
    for place in (Path(name), root / name):  # an absolute path stays itself
        if os.path.exists(place):  # unlike Path's, False for what cannot be a path
            own = (
                name in AT_HOME
                and os.path.exists(root / name)
                and os.path.samefile(place, root / name)
            )
            return None if own else place
    return None


def _named(name: str, root: Path, split: str) -> Images:
    dataset = DATASETS[name]
    try:
        images = dataset.read(root, split)
    except NotFound as missing:
        raise QualmsError(f"{missing}; {dataset.get}, in the folder of datasets {root}.") from None
    found, due = tuple(images.pixels.shape[1:]), (dataset.channels, dataset.size, dataset.size)
    if found != due:
        raise QualmsError(
            f"the images of {name} in {root} have the shape {found} and not {due}; {dataset.get}."
        )
    source = f"bundled with {dataset.package}" if dataset.package else f"{root}/ (dataset {name})"
    return replace(images, source=source)


def _at(
    place: Path, typed: str, root: Path, split: str, fit: ImageTransform | None, strict: bool
) -> Images:
    # What is called like a dataset goes by its path, so that nobody takes it for the dataset.
    short, whole = place.stem if place.is_file() else Path(os.path.abspath(place)).name, str(place)
    name = short if short not in DATASETS else whole if whole not in DATASETS else f"./{whole}"
    if place.is_dir():
        return read_folder(place, split, name, fit, strict)
    if place.suffix.lower() == ".npz":
        return _fitted(replace(read_npz(place, split, name), source=whole), fit)
    if place.suffix.lower() == ".parquet":
        return read_parquet(place, name, fit, strict)
    if is_image(place):
        return read_file(place, name, fit)
    raise _unknown(typed, root)


def _fitted(images: Images, fit: ImageTransform | None) -> Images:
    if fit is None:
        return images
    told = fit.describe([images.size] * len(images))
    return replace(fit.apply(images), notes=(*images.notes, *([told] if told else [])))


def _unknown(name: str, root: Path) -> QualmsError:
    beside = [entry.name for entry in root.iterdir()] if root.is_dir() else []
    close = difflib.get_close_matches(name, [*DATASETS, *beside], cutoff=0.5)
    hint = f"did you mean {' or '.join(close)}?" if close else "give a path that exists, or a name."
    return QualmsError(
        f"{name} is neither a dataset ({', '.join(DATASETS)}) nor an image, an image folder, a .npz or a .parquet file "
        f"in the working directory or {root}; {hint}"
    )
