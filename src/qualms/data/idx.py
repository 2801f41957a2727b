"""MNIST and Fashion-MNIST: idx files, plain or gzipped.

An idx file is two zero bytes, the type of the numbers (8: bytes), the number of axes, the length of
each axis in four bytes with the highest first, and then the numbers. A split is a file of images
with three axes, [n, height, width], and one of labels with one axis.
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

# Start of the names of a split's files.
PREFIX = {"train": "train", "test": "t10k"}
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
    return _read(root, split, "mnist", MNIST_FOLDERS, DIGITS)


def read_fashion_mnist(root: Path, split: str) -> Images:
    """Read Fashion-MNIST, pictures of clothes.

    Args:
        root: the folder of datasets; the files are in it or in one of `FASHION_FOLDERS`.
        split: "train" or "test".

    Returns:
        Gray images [n, 1, 28, 28] with ten classes.
    """
    return _read(root, split, "fashion-mnist", FASHION_FOLDERS, FASHION_MNIST)


def _read(
    root: Path, split: str, name: str, folders: tuple[str, ...], classes: tuple[str, ...]
) -> Images:
    """Read the images and labels of one split.

    Args:
        root: the folder of datasets.
        split: "train" or "test".
        name: the name of the dataset.
        folders: the folders in `root` in which the files are looked for.
        classes: the names of the classes.
    """
    places = [root / folder for folder in folders]
    images = _find(places, f"{PREFIX[split]}-images", "idx3-ubyte")
    labels = _find(places, f"{PREFIX[split]}-labels", "idx1-ubyte")
    pixels = read_idx(images, axes=3)[:, None]
    where = f"{images} with {labels.name}"
    return build_images(name, where, pixels, read_idx(labels, axes=1), classes)


def _find(folders: list[Path], stem: str, ending: str) -> Path:
    """Find the first idx file that exists.

    Args:
        folders: the folders in which it may be.
        stem: the start of its name, such as `train-images`.
        ending: the end of its name, such as `idx3-ubyte`. A hyphen or a dot is before it, and `.gz`
            may be after it.
    """
    candidates = []
    for folder in folders:
        for joint in "-.":
            candidates.append(folder / f"{stem}{joint}{ending}.gz")
            candidates.append(folder / f"{stem}{joint}{ending}")
    return find_first(candidates, f"{stem}-{ending}[.gz]")


def read_idx(path: Path, axes: int) -> np.ndarray:
    """Read the array of one idx file.

    Args:
        path: the path of the file; a file that ends in `.gz` is decompressed.
        axes: the number of axes that the array must have.

    Returns:
        Bytes in the shape that the header gives.
    """
    content = read_file_bytes(path)
    if path.suffix == ".gz":
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error):
            raise QualmsError(
                f"{path} is truncated or not a gzip file; download it again."
            ) from None
    if content[:4] != bytes((0, 0, 8, axes)):
        raise QualmsError(
            f"{path} starts with {content[:4].hex(' ') or 'nothing'}, but an idx file of bytes "
            f"with {axes} axes starts with 00 00 08 0{axes}; download it again."
        )
    # After the first four bytes, four bytes for the length of each axis.
    start = 4 + 4 * axes
    shape = []
    for at in range(4, start, 4):
        shape.append(int.from_bytes(content[at : at + 4], "big"))
    length = start + math.prod(shape)
    if len(content) != length:
        raise QualmsError(
            f"{path} is {len(content)} bytes long, but its header says {length}; download it again."
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)
