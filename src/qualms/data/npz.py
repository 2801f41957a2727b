"""Images in a .npz file: a zip archive with an .npy file for each array.

Names of arrays for a split are preferred: x_SPLIT with y_SPLIT, SPLIT_images with SPLIT_labels;
else x, images or data with y or labels. Images are [n, h, w], [n, h, w, c] or [n, c, h, w], bytes,
or floats from 0 to 1 that are rounded to bytes.

numpy.load allocates memory for as many numbers as a header claims; here the length of the file is
compared with the header first.
"""

import io
import math
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8

from qualms.data.images import Images, build_images
from qualms.errors import QualmsError, explain_failure

LABELS = ("y", "labels")


@dataclass(frozen=True)
class _Header:
    """The description of an array in the first bytes of an .npy file.

    Args:
        shape: the shape of the array.
        by_column: whether the first axis changes fastest, as in Fortran.
        dtype: the dtype of the numbers.
        start: the position of the first number in the file, in bytes.
    """

    shape: tuple[int, ...]
    by_column: bool
    dtype: np.dtype[Any]
    start: int

    @classmethod
    def read(cls, stream: Any) -> "_Header":
        """Read a header.

        Args:
            stream: an .npy file, opened in binary, at its beginning; left at the first number.
        """
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_2_0
        if version == (1, 0):
            read = np.lib.format.read_array_header_1_0
        with warnings.catch_warnings():
            # About a header that Python 2 wrote, or names of types from then.
            warnings.simplefilter("ignore")
            # `read` returns shape, by_column and dtype.
            return cls(*read(stream), stream.tell())

    def require_length(self, length: int) -> None:
        """Raise a ValueError unless a file of this length holds exactly the array's numbers.

        Arrays of Python objects are refused; they would be a pickle.

        Args:
            length: the length of the .npy file in bytes, with the header.
        """
        if self.dtype.hasobject:
            raise ValueError("objects")
        if length - self.start != math.prod(self.shape) * self.dtype.itemsize:
            raise ValueError("the length does not match the header")


def read_npz(path: Path, split: str, name: str) -> Images:
    """Read the images of an .npz file, with their labels if there are any.

    Args:
        path: the path of the file.
        split: "train" or "test"; arrays named after the split are preferred.
        name: the name of the images, for tables and errors.
    """
    with _open(path) as file:
        key, labels_key = _find_keys(path, file, split)
        array = _parse_array(file.read(f"{key}.npy"))
        labels = None
        if labels_key is not None:
            labels = _parse_array(file.read(f"{labels_key}.npy"))
    where = f"{key} in {path}"
    return build_images(name, path, _scale_to_255(_channels_first(array, where), where), labels)


def npz_count(path: Path, split: str) -> int:
    """Read the number of images from the header of their array.

    Args:
        path: the path of the file.
        split: "train" or "test".
    """
    with _open(path) as file:
        key, _ = _find_keys(path, file, split)
        with file.open(f"{key}.npy") as stream:
            shape = _Header.read(stream).shape
    return shape[0] if shape else 0


def npz_parts(
    path: Path, split: str, start: int, sizes: Iterator[int]
) -> Iterator[UInt8[np.ndarray, "n c h w"]]:
    """Read the images of a file a part at a time, without holding the other parts in memory.

    Args:
        path: the path of the file.
        split: "train" or "test".
        start: the position of the first image.
        sizes: yields the number of images of each part.

    Yields:
        Bytes [n, channels, height, width].
    """
    with _open(path) as file:
        key, _ = _find_keys(path, file, split)
        entry, where = file.getinfo(f"{key}.npy"), f"{key} in {path}"
        with file.open(entry) as stream:
            header = _Header.read(stream)
            header.require_length(entry.file_size)
            whole = None
            # The numbers of an image are not consecutive.
            if header.by_column:
                whole = _parse_array(file.read(entry))
            else:
                # In bytes, of one image.
                size = math.prod(header.shape[1:]) * header.dtype.itemsize
                stream.seek(start * size, io.SEEK_CUR)
            while start < header.shape[0]:
                count = min(next(sizes), header.shape[0] - start)
                if whole is None:
                    shape = (count, *header.shape[1:])
                    part = np.frombuffer(stream.read(count * size), header.dtype).reshape(shape)
                else:
                    part = whole[start : start + count]
                images = _scale_to_255(_channels_first(part, where), where)
                yield np.require(images, np.uint8, ["C", "W"])
                start += count


@contextmanager
def _open(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open a .npz file; any exception inside the block becomes an error that names the file."""

    def explain(error: Exception) -> QualmsError:
        """Create the error that names the file and the class of the exception."""
        return QualmsError(
            f"{path} is truncated or not a .npz file of plain numbers ({type(error).__name__}); "
            "write it again with numpy.savez."
        )

    with explain_failure(explain), zipfile.ZipFile(path) as file:
        for entry in file.infolist():
            if entry.compress_size > path.stat().st_size:
                # Memory would be allocated for the size that the entry claims.
                raise zipfile.BadZipFile
        yield file


def _find_keys(path: Path, file: zipfile.ZipFile, split: str) -> tuple[str, str | None]:
    """Find the names of the image array and of its label array, None if there is no such array.

    Args:
        path: the path of the file, for errors.
        file: the archive.
        split: "train" or "test".
    """
    arrays = {entry.removesuffix(".npy") for entry in file.namelist()}
    pairs: dict[str, tuple[str, ...]] = {
        f"x_{split}": (f"y_{split}",),
        f"{split}_images": (f"{split}_labels",),
        "x": LABELS,
        "images": LABELS,
        "data": LABELS,
    }
    for key, label_keys in pairs.items():
        if key not in arrays:
            continue
        for label_key in label_keys:
            if label_key in arrays:
                return key, label_key
        return key, None
    raise QualmsError(
        f"{path} contains {', '.join(sorted(arrays)) or 'nothing'}, but no images; name the "
        f"array of images one of {', '.join(pairs)}."
    )


def _parse_array(content: bytes) -> np.ndarray:
    """Parse the bytes of an .npy file into an array, which cannot be written to."""
    header = _Header.read(io.BytesIO(content))
    header.require_length(len(content))
    numbers = np.frombuffer(content, header.dtype, offset=header.start)
    if header.by_column:
        return numbers.reshape(header.shape, order="F")
    return numbers.reshape(header.shape)


def _channels_first(images: np.ndarray, where: str) -> np.ndarray:
    """Reorder images to [n, c, h, w], whichever axis has the channels.

    Args:
        images: an array of images, with or without an axis of channels.
        where: the name of the array in errors.
    """
    if images.ndim == 3:
        return images[:, None]
    is_first = images.ndim == 4 and images.shape[1] in (1, 3)
    is_last = images.ndim == 4 and images.shape[3] in (1, 3)
    if is_first and is_last:
        raise QualmsError(
            f"{where} has shape {images.shape}, where either the second or the last axis could be "
            "the channels; drop that axis if there is only one channel, or use images larger than "
            "3 pixels."
        )
    if is_first:
        return images
    if is_last:
        return images.transpose(0, 3, 1, 2)
    raise QualmsError(
        f"{where} has shape {images.shape}; pass [n, h, w], [n, h, w, c] or [n, c, h, w], "
        "where c is 1 or 3."
    )


def _scale_to_255(images: np.ndarray, where: str) -> np.ndarray:
    """Scale floats from 0 to 1 to whole numbers from 0 to 255, in float64; bytes are unchanged.

    Args:
        images: an array of bytes, or of floats from 0 to 1.
        where: the name of the array in errors.
    """
    if images.dtype == np.uint8 or not images.size:
        return images
    if images.dtype.kind != "f":
        raise QualmsError(f"{where} is {images.dtype}; pass bytes (uint8), or floats from 0 to 1.")
    low, high = float(images.min()), float(images.max())
    if not (low >= 0 and high <= 1):
        raise QualmsError(
            f"{where} ranges from {low:g} to {high:g}; pass bytes (uint8), or floats from 0 to 1."
        )
    return np.rint(images.astype(np.float64) * 255)
