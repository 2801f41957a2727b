"""Read many image files into one array.

Images are transformed as they are read, so that only one at a time is in memory in full size.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import UInt8

from qualms.data.decode import Unreadable, decode_image, describe_changes
from qualms.data.image_transform import ImageTransform, channels_first
from qualms.data.images import Rejected
from qualms.errors import QualmsError


@dataclass(frozen=True)
class File:
    """An image file that can be read later.

    Args:
        id: the name of the image.
        where: what an error calls the image.
        content: a function that returns the bytes of the file, or raises `Unreadable`.
    """

    id: str
    where: str
    content: Callable[[], bytes]


@dataclass(frozen=True)
class Read:
    """The images that could be read, and the files that could not.

    Args:
        pixels: bytes [n, channels, height, width].
        kept: for each image, the index of its file among all files.
        notes: sentences about what was changed in the images.
        rejected: the files that could not be read.
    """

    pixels: UInt8[np.ndarray, "n c h w"]
    kept: list[int]
    notes: tuple[str, ...]
    rejected: tuple[Rejected, ...]


def read_images(
    files: Sequence[File],
    where: object,
    transform: ImageTransform | None,
    strict: bool,
    may_be_empty: bool = False,
) -> Read:
    """Read image files into one array.

    Args:
        files: the image files to read.
        where: what an error calls all files together.
        transform: how each image is resized; None keeps the images' size, which must then be the
            same for all.
        strict: whether an image that cannot be read is an error. If not, the image is left out and
            listed in `Read.rejected`.
        may_be_empty: whether to return no images, instead of raising an error, if none can be read;
            for a batch of a larger number of files.

    Raises:
        QualmsError: if images differ in size, or if no image can be read.
    """
    # Returned if no image can be read.
    pixels = np.empty((0, 3, 1, 1), np.uint8)
    kept: list[int] = []
    rejected: list[Rejected] = []
    sizes: list[tuple[int, int]] = []
    changes: Counter[str] = Counter()
    for index, file in enumerate(files):
        try:
            image, image_changes = decode_image(file.content(), file.where)
        except Unreadable as error:
            if strict:
                raise
            rejected.append(Rejected(file.id, error.reason))
            continue
        sizes.append((image.height, image.width))
        if transform is not None:
            image = transform.apply_to_image(image)
        array = channels_first(image)
        if not kept:
            # The first image decides the size.
            pixels = np.empty((len(files), *array.shape), np.uint8)
        elif array.shape != pixels.shape[1:]:
            # `sizes` are those of the images kept and, at the end, of this image.
            height, width = sizes[0]
            other_height, other_width = sizes[-1]
            raise QualmsError(
                f"the images in {where} differ in size: {files[kept[0]].id} is {width} x "
                f"{height}, but {file.id} is {other_width} x {other_height}; pass size= to resize "
                "them while reading."
            )
        pixels[len(kept)] = array
        kept.append(index)
        changes.update(image_changes)
    if not kept and not may_be_empty:
        raise _nothing_read_error(where, rejected)
    notes = _write_notes(changes, transform, sizes)
    return Read(pixels[: len(kept)], kept, notes, tuple(rejected))


def _write_notes(
    changes: Counter[str], transform: ImageTransform | None, sizes: list[tuple[int, int]]
) -> tuple[str, ...]:
    """Write sentences about what was changed in the images.

    Args:
        changes: for each key of `CHANGES`, the number of images with this change.
        transform: how the images were resized; None if they were not.
        sizes: the height and width of each image before it was resized.
    """
    if transform is None:
        return tuple(describe_changes(changes))
    if transform.channels == 1:
        # Decoding made gray images color, and the transform gray again: no change to report.
        del changes["grayscale"]
    sentences = describe_changes(changes)
    size_note = transform.describe(sizes)
    if size_note:
        sentences.append(size_note)
    return tuple(sentences)


def _nothing_read_error(where: object, rejected: Sequence[Rejected]) -> QualmsError:
    """Create the error that no image could be read, with the reason of the first.

    Args:
        where: what the error calls all files together.
        rejected: the files that could not be read; empty if there are no files.
    """
    if not rejected:
        return QualmsError(f"{where} contains no images; check the path.")
    first = rejected[0]
    if len(rejected) == 1:
        return QualmsError(
            f"no image can be read from {where}: {first.id} is {first.reason}; replace it."
        )
    return QualmsError(
        f"none of the {len(rejected)} images in {where} can be read: {first.id} is "
        f"{first.reason}; replace them."
    )
