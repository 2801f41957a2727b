"""A name or a path in, images out."""

import difflib
import os
from pathlib import Path

from qualms.data.arrays import read_npz
from qualms.data.catalogue import DATASETS
from qualms.data.folder import read_folder
from qualms.data.images import Images
from qualms.data.parquet import read_parquet
from qualms.data.places import NotFound
from qualms.errors import QualmsError

SPLITS = ("train", "test")


def load(name: str | Path, root: str | Path | None = None, split: str = "test", *, size: int | None = None) -> Images:
    """The images of a dataset.

    `name` is one of `DATASETS`, or the path of an image folder, `.npz` or `.parquet` file: absolute, or relative to
    `root` or to the working directory. `root` is the folder that holds the datasets: if not given, the one in the
    environment variable QUALMS_DATA, else `data`. `split` is train or test. With `size`, images come out size x size.

    Example:
        ```python
        from qualms.data import load

        digits = load("digits")  # comes with scikit-learn; other names need their files in the folder of datasets
        print(len(digits), digits.pixels.shape, digits.classes)
        ```
    """
    if split not in SPLITS:
        raise QualmsError(f"the split {split!r} is not known; it is train or test.")
    if size is not None and size < 1:
        raise QualmsError(f"images cannot be {size} pixels wide; give a size of at least 1, or none.")
    folder = Path(root if root is not None else os.environ.get("QUALMS_DATA", "data"))
    images = _named(str(name), folder, split) if str(name) in DATASETS else _at_path(Path(name), folder, split, size)
    return images if size is None else images.fitted(images.pixels.shape[1], size)


def _named(name: str, root: Path, split: str) -> Images:
    dataset = DATASETS[name]
    try:
        images = dataset.read(root, split)
    except NotFound as missing:
        raise QualmsError(f"{missing}; {dataset.get}, in the folder of datasets {root}.") from None
    found, due = tuple(images.pixels.shape[1:]), (dataset.channels, dataset.size, dataset.size)
    if found != due:
        raise QualmsError(f"the images of {name} in {root} have the shape {found} and not {due}; {dataset.get}.")
    return images


def _at_path(path: Path, root: Path, split: str, size: int | None) -> Images:
    for place in (root / path, path):  # an absolute path stays itself
        if os.path.isdir(place):  # unlike Path's, False for what cannot be a path
            return read_folder(place, split, size, place.name)
        if os.path.isfile(place) and place.suffix.lower() == ".npz":
            return read_npz(place, split, place.stem)
        if os.path.isfile(place) and place.suffix.lower() == ".parquet":
            return read_parquet(place, size, place.stem)
    raise _unknown(path, root)


def _unknown(path: Path, root: Path) -> QualmsError:
    beside = [entry.name for entry in root.iterdir()] if root.is_dir() else []
    close = difflib.get_close_matches(str(path), [*DATASETS, *beside], cutoff=0.5)
    hint = f"did you mean {' or '.join(close)}?" if close else "give a path that exists, or a name."
    return QualmsError(
        f"{path} is neither a dataset ({', '.join(DATASETS)}) nor an image folder, .npz or .parquet file in {root} or "
        f"the working directory; {hint}"
    )
