"""Images in a .npz file."""

import math
import zipfile
from io import BytesIO
from pathlib import Path

import numpy as np

from qualms.data.images import Images, images_of
from qualms.errors import QualmsError

IMAGES, LABELS = ("x", "images", "data"), ("y", "labels")


def read_npz(path: Path, split: str, name: str) -> Images:
    """Images with their labels, if there are any; arrays named after the split are preferred.

    Images are bytes, or floats from 0 to 1 that are rounded to bytes.
    """
    try:
        with zipfile.ZipFile(path) as file:
            kept = {entry.removesuffix(".npy") for entry in file.namelist()}
            key, labels_key = _keys(path, kept, split)
            images = _array(file.read(f"{key}.npy"))
            labels = None if labels_key is None else _array(file.read(f"{labels_key}.npy"))
    except QualmsError:
        raise
    except Exception as error:  # a broken zip raises whatever comes up
        raise QualmsError(
            f"{path} is cut or not a .npz file of plain numbers ({type(error).__name__}); "
            "write it again with numpy.savez."
        ) from None
    where = f"{key} in {path}"
    return images_of(name, path, _bytes(_channels_first(images, where), where), labels)


def _keys(path: Path, kept: set[str], split: str) -> tuple[str, str | None]:
    """The names of the image array and of its label array, if there is one, out of those in the file."""
    pairs = [(f"x_{split}", (f"y_{split}",)), (f"{split}_images", (f"{split}_labels",)), *((k, LABELS) for k in IMAGES)]
    for key, labels in pairs:
        if key in kept:
            return key, next((label for label in labels if label in kept), None)
    names = ", ".join(key for key, _ in pairs)
    raise QualmsError(f"{path} holds {', '.join(sorted(kept)) or 'nothing'} and no images; name them one of {names}.")


def _array(content: bytes) -> np.ndarray:
    # numpy.load makes room for as many numbers as the header says, whether or not they are there.
    stream = BytesIO(content)
    version = np.lib.format.read_magic(stream)
    header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, by_column, kind = header(stream)
    start = stream.tell()
    if kind.hasobject or len(content) - start != math.prod(shape) * kind.itemsize:
        raise ValueError("objects, or not as long as its header says")
    return np.frombuffer(content, kind, offset=start).reshape(shape, order="F" if by_column else "C")


def _channels_first(images: np.ndarray, where: str) -> np.ndarray:
    if images.ndim == 3:
        return images[:, None]
    first, last = (images.ndim == 4 and images.shape[axis] in (1, 3) for axis in (1, 3))
    if first and last:
        raise QualmsError(
            f"{where} has the shape {images.shape}, and either its second or its last axis could be the channels; "
            "leave the axis of one channel out, or make the images larger than 3 pixels."
        )
    if not first and not last:
        raise QualmsError(
            f"{where} has the shape {images.shape}; give [n, h, w], [n, h, w, c] or [n, c, h, w], c 1 or 3."
        )
    return images if first else images.transpose(0, 3, 1, 2)


def _bytes(images: np.ndarray, where: str) -> np.ndarray:
    if images.dtype == np.uint8 or not images.size:
        return images
    if images.dtype.kind != "f":
        raise QualmsError(f"{where} is {images.dtype}; give bytes (uint8), or floats from 0 to 1.")
    low, high = float(images.min()), float(images.max())
    if not (low >= 0 and high <= 1):
        raise QualmsError(f"{where} goes from {low:g} to {high:g}; give bytes (uint8), or floats from 0 to 1.")
    return np.rint(images.astype(np.float64) * 255)
