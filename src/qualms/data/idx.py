"""MNIST and Fashion-MNIST: idx files, plain or gzipped.

An idx file consists of two zero bytes, the dtype of the values (8: bytes), the number of axes, the
length of each axis as a big-endian integer of four bytes, and then the values. A split is a file of
images with three axes, [n, height, width], and one of labels with one axis.
"""

import gzip
import math
import zlib
from pathlib import Path

import numpy as np

from qualms.data.class_names import DIGITS, FASHION_MNIST
from qualms.data.images import Images, build_images
from qualms.data.places import find_first, read_file_bytes
from qualms.errors import QualmsError

# How the names of a split's files start.
SPLIT_PREFIXES = {"train": "train", "test": "t10k"}
MNIST_FOLDERS = ("MNIST/raw", "MNIST", "mnist/raw", "mnist", ".")
FASHION_FOLDERS = ("FashionMNIST/raw", "FashionMNIST", "fashion-mnist/raw", "fashion-mnist", ".")


def read_mnist(root: Path, split: str) -> Images:
    """Read MNIST, handwritten digits.

    Args:
        root: the folder of datasets; the files are in it or in one of `MNIST_FOLDERS`.
        split: "train" or "test".

    Returns:
        Gray images [n, 1, 28, 28] with ten classes.
    """
    return _read_split(root, split, "mnist", MNIST_FOLDERS, DIGITS)


def read_fashion_mnist(root: Path, split: str) -> Images:
    """Read Fashion-MNIST, pictures of clothes.

    Args:
        root: the folder of datasets; the files are in it or in one of `FASHION_FOLDERS`.
        split: "train" or "test".

    Returns:
        Gray images [n, 1, 28, 28] with ten classes.
    """
    return _read_split(root, split, "fashion-mnist", FASHION_FOLDERS, FASHION_MNIST)


def _read_split(
    root: Path,
    split: str,
    name: str,
    folders: tuple[str, ...],
    classes: tuple[str, ...],
) -> Images:
    """Read the images and labels of one split.

    Args:
        root: the folder of datasets.
        split: "train" or "test".
        name: the name of the dataset.
        folders: the subfolders of `root` in which the files may be, tried in this order.
        classes: the names of the classes.
    """
    paths = [root / folder for folder in folders]
    prefix = SPLIT_PREFIXES[split]
    image_file = _find_idx_file(paths, f"{prefix}-images", "idx3-ubyte")
    label_file = _find_idx_file(paths, f"{prefix}-labels", "idx1-ubyte")
    # `[:, None]` adds the axis of channels.
    pixels = read_idx(image_file, axes=3)[:, None]
    labels = read_idx(label_file, axes=1)
    where = f"{image_file} with {label_file.name}"
    return build_images(name, where, pixels, labels, classes)


def _find_idx_file(folders: list[Path], stem: str, ending: str) -> Path:
    """Find an idx file called STEM-ENDING or STEM.ENDING, plain or with `.gz` appended.

    Args:
        folders: the folders in which the file may be.
        stem: the start of the file's name, such as `train-images`.
        ending: the end of the file's name, such as `idx3-ubyte`.

    Returns:
        The first path that exists.
    """
    candidates = []
    for folder in folders:
        for separator in "-.":
            candidates.append(folder / f"{stem}{separator}{ending}.gz")
            candidates.append(folder / f"{stem}{separator}{ending}")
    return find_first(candidates, f"{stem}-{ending}[.gz]")


def read_idx(path: Path, axes: int) -> np.ndarray:
    """Read the array of one idx file.

    Args:
        path: the path of the file; a file that ends in `.gz` is decompressed.
        axes: the number of axes that the array must have.

    Returns:
        A uint8 array of the shape in the file's header.
    """
    content = read_file_bytes(path)
    if path.suffix == ".gz":
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error):
            raise QualmsError(
                f"{path} is truncated or not a gzip file; download it again."
            ) from None
    # The first four bytes: two zeros, 8 for uint8, and the number of axes.
    if content[:4] != bytes((0, 0, 8, axes)):
        raise QualmsError(
            f"{path} starts with {content[:4].hex(' ') or 'nothing'}, but an idx file of bytes "
            f"with {axes} axes starts with 00 00 08 0{axes}; download it again."
        )
    # Then the length of each axis, in four bytes.
    header_length = 4 + 4 * axes
    shape = []
    for start in range(4, header_length, 4):
        shape.append(int.from_bytes(content[start : start + 4], "big"))
    length = header_length + math.prod(shape)
    if len(content) != length:
        raise QualmsError(
            f"{path} is {len(content)} bytes long, but its header says {length}; download it again."
        )
    return np.frombuffer(content, np.uint8, offset=header_length).reshape(shape)
