"""CIFAR-10 and CIFAR-100: the Python version of the published files.

Each file is a pickle of a dictionary. Under `data` it has the images as bytes [n, 3072], each row
all reds of an image, then all greens, then all blues; the labels are a list under `labels`
(CIFAR-10) or `fine_labels` (CIFAR-100). Keys are bytes in pickles that Python 2 wrote.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qualms.data.class_names import CIFAR10, CIFAR100
from qualms.data.images import Images, build_images
from qualms.data.pickles import read_pickle
from qualms.data.places import find_first
from qualms.errors import QualmsError


@dataclass(frozen=True)
class _Layout:
    """Where the files of CIFAR-10 or CIFAR-100 are, and what they contain.

    Args:
        name: the name of the dataset.
        folder: the folder that holds the files, in the folder of datasets.
        files: the names of the files by split.
        label_key: the key of the labels in each file.
        classes: the names of the classes.
    """

    name: str
    folder: str
    files: dict[str, list[str]]
    label_key: str
    classes: tuple[str, ...]


_CIFAR10 = _Layout(
    "cifar10",
    "cifar-10-batches-py",
    {"train": [f"data_batch_{i}" for i in range(1, 6)], "test": ["test_batch"]},
    "labels",
    CIFAR10,
)
_CIFAR100 = _Layout(
    "cifar100",
    "cifar-100-python",
    {"train": ["train"], "test": ["test"]},
    "fine_labels",
    CIFAR100,
)


def read_cifar10(root: Path, split: str) -> Images:
    """Read CIFAR-10: small photographs in ten classes.

    Args:
        root: the folder that holds `cifar-10-batches-py`.
        split: "train" or "test".

    Returns:
        Color images [n, 3, 32, 32].
    """
    return _read_split(root, split, _CIFAR10)


def read_cifar100(root: Path, split: str) -> Images:
    """Read CIFAR-100: small photographs in a hundred classes.

    These are the dataset's fine labels; its twenty coarse ones are not read.

    Args:
        root: the folder that holds `cifar-100-python`.
        split: "train" or "test".

    Returns:
        Color images [n, 3, 32, 32].
    """
    return _read_split(root, split, _CIFAR100)


def _read_split(root: Path, split: str, layout: _Layout) -> Images:
    """Read all files of a split, and concatenate their images and labels.

    Args:
        root: the folder of datasets.
        split: "train" or "test".
        layout: where the dataset's files are, and what they contain.
    """
    folder = root / layout.folder
    # Find all files before reading the first, so that a missing one is reported at once.
    paths = [find_first([folder / file], file) for file in layout.files[split]]
    pixels, labels = [], []
    for path in paths:
        batch = _read_batch(path, layout)
        # `_read_batch` requires labels.
        assert batch.labels is not None
        pixels.append(batch.pixels.numpy())
        labels.append(batch.labels.numpy())
    all_pixels = np.concatenate(pixels)
    all_labels = np.concatenate(labels)
    return build_images(layout.name, folder, all_pixels, all_labels, layout.classes)


def _read_batch(path: Path, layout: _Layout) -> Images:
    """Read the images and labels of one file, or raise an error if it is not a CIFAR file.

    Args:
        path: a pickle as described at the top of this file.
        layout: the key of the labels, and the names of the classes.
    """
    content = read_pickle(path)
    if not isinstance(content, dict):
        raise QualmsError(
            f"{path} does not contain a dictionary, so it is not a CIFAR file; download it again."
        )
    entries = {_decode_key(key): value for key, value in content.items()}
    data: Any = entries.get("data")
    if not _is_byte_table(data):
        raise QualmsError(
            f"{path} has no uint8 array of shape (n, 3072) under 'data', so it is not a CIFAR "
            "file; download it again."
        )
    labels = entries.get(layout.label_key)
    if _is_integer_list(labels):
        labels = np.array(labels, np.int64)
    # The values of an array are checked by `build_images`.
    if not isinstance(labels, np.ndarray):
        raise QualmsError(
            f"{path} has no list of whole numbers under '{layout.label_key}', so it is not a "
            "CIFAR file; download it again."
        )
    pixels = data.reshape(-1, 3, 32, 32)
    return build_images(layout.name, path, pixels, labels, layout.classes)


def _decode_key(key: Any) -> Any:
    """Convert a key of bytes, as Python 2 pickled them, to text; return others unchanged."""
    return key.decode("latin1") if isinstance(key, bytes) else key


def _is_byte_table(data: Any) -> bool:
    """Whether a value is a uint8 array [n, 3072]: three colors of 32x32 pixels in each row."""
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8:
        return False
    return data.ndim == 2 and data.shape[1] == 3072


def _is_integer_list(labels: Any) -> bool:
    """Whether a value is a list of integers that fit into int64."""
    if not isinstance(labels, list):
        return False
    return all(type(label) is int and abs(label) < 2**63 for label in labels)
