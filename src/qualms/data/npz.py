"""Images in a .npz file."""

import io
import math
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import UInt8

from qualms.data.images import Images, build_images
from qualms.errors import QualmsError

IMAGES, LABELS = ("x", "images", "data"), ("y", "labels")


@dataclass(frozen=True)
class Header:
    """What the first bytes of an array say of it."""

    shape: tuple[int, ...]
    by_column: bool
    kind: np.dtype[Any]
    start: int  # where its numbers begin

    @classmethod
    def read(cls, stream: Any) -> "Header":
        """From the beginning of a .npy file."""
        version = np.lib.format.read_magic(stream)
        read = (
            np.lib.format.read_array_header_1_0
            if version == (1, 0)
            else np.lib.format.read_array_header_2_0
        )
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # about a header that Python 2 wrote, or names of types from then
            return cls(*read(stream), stream.tell())


def read_npz(path: Path, split: str, name: str) -> Images:
    """Images with their labels, if there are any; arrays named after the split are preferred.

    Images are bytes, or floats from 0 to 1 that are rounded to bytes.
    """
    with _opened(path) as file:
        key, labels_key = _keys(path, _kept(file), split)
        images = _array(file.read(f"{key}.npy"))
        labels = None if labels_key is None else _array(file.read(f"{labels_key}.npy"))
    where = f"{key} in {path}"
    return build_images(name, path, _bytes(_channels_first(images, where), where), labels)


def npz_count(path: Path, split: str) -> int:
    """How many images there are, as the file says."""
    with _opened(path) as file:
        key, _ = _keys(path, _kept(file), split)
        with file.open(f"{key}.npy") as stream:
            return (Header.read(stream).shape or (0,))[0]


def npz_parts(
    path: Path, split: str, start: int, sizes: Iterator[int]
) -> Iterator[UInt8[np.ndarray, "n c h w"]]:
    """The images from number `start` on, so many at a time, without the others in memory."""
    with _opened(path) as file:
        key, _ = _keys(path, _kept(file), split)
        entry, where = file.getinfo(f"{key}.npy"), f"{key} in {path}"
        with file.open(entry) as stream:
            header = Header.read(stream)
            size = math.prod(header.shape[1:]) * header.kind.itemsize
            if (
                header.kind.hasobject
                or entry.file_size - header.start != size * (header.shape or (1,))[0]
            ):
                raise ValueError("objects, or not as long as its header says")
            if header.by_column:  # its images are not one after the other
                images = _array(file.read(entry))
            else:
                images = None
                stream.seek(start * size, io.SEEK_CUR)
            while start < header.shape[0]:
                count = min(next(sizes), header.shape[0] - start)
                if images is None:
                    some = np.frombuffer(stream.read(count * size), header.kind).reshape(
                        count, *header.shape[1:]
                    )
                else:
                    some = images[start : start + count]
                yield _images(some, where)
                start += count


def _images(array: np.ndarray, where: str) -> UInt8[np.ndarray, "n c h w"]:
    return np.require(_bytes(_channels_first(array, where), where), np.uint8, ["C", "W"])


@contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(path) as file:
            if any(entry.compress_size > path.stat().st_size for entry in file.infolist()):
                raise zipfile.BadZipFile  # room would be made for as much as it says
            yield file
    except (QualmsError, GeneratorExit):
        raise
    except Exception as error:  # a broken zip raises whatever comes up
        raise QualmsError(
            f"{path} is cut or not a .npz file of plain numbers ({type(error).__name__}); "
            "write it again with numpy.savez."
        ) from None


def _kept(file: zipfile.ZipFile) -> set[str]:
    return {entry.removesuffix(".npy") for entry in file.namelist()}


def _keys(path: Path, kept: set[str], split: str) -> tuple[str, str | None]:
    """The names of the image array and of its label array, if there is one, out of those in the
    file.
    """
    pairs = [
        (f"x_{split}", (f"y_{split}",)),
        (f"{split}_images", (f"{split}_labels",)),
        *((k, LABELS) for k in IMAGES),
    ]
    for key, labels in pairs:
        if key in kept:
            return key, next((label for label in labels if label in kept), None)
    names = ", ".join(key for key, _ in pairs)
    raise QualmsError(
        f"{path} holds {', '.join(sorted(kept)) or 'nothing'} and no images; name them one of {names}."
    )


def _array(content: bytes) -> np.ndarray:
    # numpy.load makes room for as many numbers as the header says, whether or not they are there.
    stream = io.BytesIO(content)
    header = Header.read(stream)
    if (
        header.kind.hasobject
        or len(content) - header.start != math.prod(header.shape) * header.kind.itemsize
    ):
        raise ValueError("objects, or not as long as its header says")
    order: Literal["F", "C"] = "F" if header.by_column else "C"
    return np.frombuffer(content, header.kind, offset=header.start).reshape(
        header.shape, order=order
    )


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
        raise QualmsError(
            f"{where} goes from {low:g} to {high:g}; give bytes (uint8), or floats from 0 to 1."
        )
    return np.rint(images.astype(np.float64) * 255)
