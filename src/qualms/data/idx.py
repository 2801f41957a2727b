"""MNIST and Fashion-MNIST: idx files, as they are or gzipped.

An idx file is two zero bytes, the type of the numbers (8: bytes), the number of axes, the length of
each axis in four bytes with the highest first, and then the numbers.
"""

import gzip
import math
import zlib
from pathlib import Path

import numpy as np

from qualms.data.images import Images, build_images
from qualms.data.places import find_first, read_file_bytes
from qualms.errors import QualmsError

DIGITS = tuple("0123456789")
CLOTHES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
PREFIX = {"train": "train", "test": "t10k"}


def read_mnist(root: Path, split: str) -> Images:
    """Handwritten digits."""
    return _read(root, ("MNIST/raw", "MNIST", "mnist/raw", "mnist", "."), split, "mnist", DIGITS)


def read_fashion_mnist(root: Path, split: str) -> Images:
    """Pictures of clothes."""
    folders = ("FashionMNIST/raw", "FashionMNIST", "fashion-mnist/raw", "fashion-mnist", ".")
    return _read(root, folders, split, "fashion-mnist", CLOTHES)


def _read(
    root: Path, folders: tuple[str, ...], split: str, name: str, classes: tuple[str, ...]
) -> Images:
    images = _find(root, folders, f"{PREFIX[split]}-images", 3)
    labels = _find(root, folders, f"{PREFIX[split]}-labels", 1)
    pixels = read_idx(images, axes=3)[:, None]
    return build_images(
        name, f"{images} with {labels.name}", pixels, read_idx(labels, axes=1), classes
    )


def _find(root: Path, folders: tuple[str, ...], stem: str, axes: int) -> Path:
    spellings = [f"{stem}{joint}idx{axes}-ubyte{end}" for joint in "-." for end in (".gz", "")]
    return find_first(
        (root / f / s for f in folders for s in spellings), f"{stem}-idx{axes}-ubyte[.gz]"
    )


def read_idx(path: Path, axes: int) -> np.ndarray:
    """The bytes of one idx file, in its shape."""
    content = read_file_bytes(path)
    if path.suffix == ".gz":
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error):
            raise QualmsError(f"{path} is cut or not a gzip file; get it again.") from None
    if content[:4] != bytes((0, 0, 8, axes)):
        raise QualmsError(
            f"{path} starts with {content[:4].hex(' ') or 'nothing'}, and an idx file of bytes with {axes} axes with "
            f"00 00 08 0{axes}; get it again."
        )
    start = 4 + 4 * axes
    shape = [int.from_bytes(content[at : at + 4], "big") for at in range(4, start, 4)]
    if len(content) != start + math.prod(shape):
        raise QualmsError(
            f"{path} should be {start + math.prod(shape)} bytes long by its header and is {len(content)}; get it again."
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)
