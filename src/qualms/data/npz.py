"""Images in a .npz file: a zip archive with an .npy file for each array.

Arrays named after the split are preferred: x_SPLIT with y_SPLIT, or SPLIT_images with SPLIT_labels;
otherwise the images are in x, images or data, and the labels in y or labels. Images are [n, h, w],
[n, h, w, c] or [n, c, h, w]: bytes, or floats from 0 to 1, which are rounded to bytes.

numpy.load allocates memory for as many values as a header claims; here the length of the file is
first compared with the header.
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
        is_fortran_order: whether the first axis changes fastest.
        dtype: the dtype of the values.
        start: the position of the first value in the file, in bytes.
    """

    shape: tuple[int, ...]
    is_fortran_order: bool
    dtype: np.dtype[Any]
    start: int

    @classmethod
    def read(cls, stream: Any) -> "_Header":
        """Read a header.

        Args:
            stream: an .npy file, opened in binary mode, at its beginning; afterwards, its position
                is that of the first value.
        """
        version = np.lib.format.read_magic(stream)
        read_header = np.lib.format.read_array_header_2_0
        if version == (1, 0):
            read_header = np.lib.format.read_array_header_1_0
        with warnings.catch_warnings():
            # NumPy warns about headers that Python 2 wrote, and about outdated names of dtypes.
            warnings.simplefilter("ignore")
            shape, is_fortran_order, dtype = read_header(stream)
        return cls(shape, is_fortran_order, dtype, start=stream.tell())

    def require_length(self, length: int) -> None:
        """Raise a ValueError unless a file of this length contains exactly the array's values.

        Arrays of Python objects are refused, since reading them would run a pickle.

        Args:
            length: the length of the .npy file in bytes, including the header.
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
    with _open_npz(path) as file:
        key, labels_key = _find_keys(path, file, split)
        images = _parse_array(file.read(f"{key}.npy"))
        labels = None
        if labels_key is not None:
            labels = _parse_array(file.read(f"{labels_key}.npy"))
    where = f"{key} in {path}"
    pixels = _scale_to_255(_to_channels_first(images, where), where)
    return build_images(name, path, pixels, labels)


def count_npz_images(path: Path, split: str) -> int:
    """Return the number of images in an .npz file, of which only the array's header is read.

    Args:
        path: the path of the file.
        split: "train" or "test".
    """
    with _open_npz(path) as file:
        key, _ = _find_keys(path, file, split)
        with file.open(f"{key}.npy") as stream:
            shape = _Header.read(stream).shape
    # An array without axes contains no images.
    return shape[0] if shape else 0


def iter_npz_images(
    path: Path,
    split: str,
    start: int,
    sizes: Iterator[int],
) -> Iterator[UInt8[np.ndarray, "n c h w"]]:
    """Read the images of an .npz file batch by batch, with only one batch in memory.

    An array in Fortran order is kept in memory as a whole.

    Args:
        path: the path of the file.
        split: "train" or "test".
        start: the position of the first image that is read.
        sizes: the number of images of each batch.

    Yields:
        Bytes [n, channels, height, width].
    """
    with _open_npz(path) as file:
        key, _ = _find_keys(path, file, split)
        entry, where = file.getinfo(f"{key}.npy"), f"{key} in {path}"
        with file.open(entry) as stream:
            header = _Header.read(stream)
            header.require_length(entry.file_size)
            all_images = None
            if header.is_fortran_order:
                # The values of one image are not consecutive in the file, so read all images.
                all_images = _parse_array(file.read(entry))
            else:
                image_bytes = math.prod(header.shape[1:]) * header.dtype.itemsize
                # Skip the images before `start`.
                stream.seek(start * image_bytes, io.SEEK_CUR)
            while start < header.shape[0]:
                count = min(next(sizes), header.shape[0] - start)
                if all_images is None:
                    values = np.frombuffer(stream.read(count * image_bytes), header.dtype)
                    batch = values.reshape(count, *header.shape[1:])
                else:
                    batch = all_images[start : start + count]
                images = _scale_to_255(_to_channels_first(batch, where), where)
                # torch needs an array that is contiguous ("C") and writable ("W").
                yield np.require(images, np.uint8, ["C", "W"])
                start += count


@contextmanager
def _open_npz(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open a .npz file; any exception inside the block becomes an error that names the file."""

    def explain(error: Exception) -> QualmsError:
        """Create the error that the file is damaged, with the class of the exception."""
        return QualmsError(
            f"{path} is truncated or not a .npz file of plain numbers ({type(error).__name__}); "
            "write it again with numpy.savez."
        )

    with explain_failure(explain), zipfile.ZipFile(path) as file:
        for entry in file.infolist():
            # Reading would allocate memory for the size that the entry claims.
            if entry.compress_size > path.stat().st_size:
                raise zipfile.BadZipFile
        yield file


def _find_keys(path: Path, file: zipfile.ZipFile, split: str) -> tuple[str, str | None]:
    """Find the names of the array of images and of the array of their labels.

    Args:
        path: the path of the file, for errors.
        file: the open archive.
        split: "train" or "test".

    Returns:
        The name of the array of images; and the name of the array of labels, None without labels.
    """
    arrays = {entry.removesuffix(".npy") for entry in file.namelist()}
    # The possible names of the labels, by the name of the images.
    label_names: dict[str, tuple[str, ...]] = {
        f"x_{split}": (f"y_{split}",),
        f"{split}_images": (f"{split}_labels",),
        "x": LABELS,
        "images": LABELS,
        "data": LABELS,
    }
    for key, label_keys in label_names.items():
        if key not in arrays:
            continue
        for label_key in label_keys:
            if label_key in arrays:
                return key, label_key
        return key, None
    raise QualmsError(
        f"{path} contains {', '.join(sorted(arrays)) or 'nothing'}, but no images; name the "
        f"array of images one of {', '.join(label_names)}."
    )


def _parse_array(content: bytes) -> np.ndarray:
    """Parse the bytes of an .npy file into a read-only array."""
    header = _Header.read(io.BytesIO(content))
    header.require_length(len(content))
    values = np.frombuffer(content, header.dtype, offset=header.start)
    return values.reshape(header.shape, order="F" if header.is_fortran_order else "C")


def _to_channels_first(images: np.ndarray, where: str) -> np.ndarray:
    """Reorder the axes of images to [n, c, h, w].

    Args:
        images: an array [n, h, w], [n, h, w, c] or [n, c, h, w], where c is 1 or 3.
        where: the name of the array in errors.
    """
    if images.ndim == 3:
        return images[:, None]  # [n, 1, h, w]
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
    """Scale floats from 0 to 1 to integers from 0 to 255; return bytes unchanged.

    Args:
        images: an array of bytes, or of floats from 0 to 1.
        where: the name of the array in errors.

    Returns:
        The array of bytes; or a float64 array of integers, which the caller converts to bytes.
    """
    # An array without values has no range to check.
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
