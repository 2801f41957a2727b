"""Many image files to one array: fitted as they are read, so that no more than one is ever there in
full size.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import UInt8

from qualms.data.decode import Unreadable, decode_image, told
from qualms.data.image_transform import ImageTransform, channels_first
from qualms.data.images import Rejected
from qualms.errors import QualmsError


@dataclass(frozen=True)
class File:
    """An image to be read: its id, what an error calls it, and its bytes, which may raise
    `Unreadable`.
    """

    id: str
    where: str
    content: Callable[[], bytes]


@dataclass(frozen=True)
class Read:
    """The images that could be read, their places among the files, what was done to them, and the
    others.
    """

    pixels: UInt8[np.ndarray, "n c h w"]
    kept: list[int]
    notes: tuple[str, ...]
    rejected: tuple[Rejected, ...]


def read_images(
    files: Sequence[File], where: object, fit: ImageTransform | None, strict: bool
) -> Read:
    """All of `files` in color, or as `fit` says; the first that cannot be read is an error if
    `strict`.
    """
    read = read_available(files, where, fit, strict)
    if not read.kept:
        raise _nothing(where, read.rejected)
    return read


def read_available(
    files: Sequence[File], where: object, fit: ImageTransform | None, strict: bool
) -> Read:
    """The same, where it is no error that none can be read: there are others."""
    pixels: np.ndarray | None = None
    kept: list[int] = []
    rejected: list[Rejected] = []
    sizes: list[tuple[int, int]] = []
    done: Counter[str] = Counter()
    for place, file in enumerate(files):
        try:
            image, what = decode_image(file.content(), file.where)
            found = channels_first(image if fit is None else fit.apply_to_image(image))
        except Unreadable as error:
            if strict:
                raise
            rejected.append(Rejected(file.id, error.reason))
            continue
        sizes.append((image.height, image.width))
        if pixels is None:
            pixels = np.empty((len(files), *found.shape), np.uint8)
        if found.shape != pixels.shape[1:]:
            first, (h, w), (h2, w2) = files[kept[0]].id, sizes[0], sizes[-1]
            raise QualmsError(
                f"the images in {where} differ in size: {first} is {w} x {h} and {file.id} is {w2} x {h2}; "
                "pass size= to resize them while reading."
            )
        pixels[len(kept)] = found
        kept.append(place)
        done.update(what)
    if pixels is None:
        pixels = np.empty((0, 3, 1, 1), np.uint8)
    if fit is not None and fit.channels == 1:
        del done["grayscale"]
    notes = [*told(done.items()), *([] if fit is None else [fit.describe(sizes)])]
    return Read(pixels[: len(kept)], kept, tuple(note for note in notes if note), tuple(rejected))


def _nothing(where: object, rejected: Sequence[Rejected]) -> QualmsError:
    if not rejected:
        return QualmsError(f"{where} holds no images; check that it is the one you meant.")
    first = rejected[0]
    if len(rejected) == 1:
        return QualmsError(
            f"no image can be read from {where}: {first.id} is {first.reason}; replace it."
        )
    return QualmsError(
        f"none of the {len(rejected)} images in {where} can be read: {first.id} is {first.reason}; replace them."
    )
