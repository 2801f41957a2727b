"""Images in memory, as bytes: what every reader returns.

`Images.convert` resizes a batch of tensors of one size. `image_transform.py` resizes and crops as a
network's settings ask for, one Pillow image at a time.
"""

import hashlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from qualms.deprecated import RenamedAttribute
from qualms.errors import QualmsError

# The weights of red, green and blue in the brightness of a pixel (ITU-R 601).
LUMA = (0.299, 0.587, 0.114)
# Images that are held as floats at a time.
CHUNK = 1000


@dataclass(frozen=True)
class Rejected:
    """An image or text that could not be read.

    Args:
        id: the name of the image or text.
        reason: why the image or text could not be read; completes the sentence "it is …".

    Example:
        ```python
        from pathlib import Path
        import numpy as np
        from PIL import Image
        from qualms.data import load

        Path("mine").mkdir()
        Image.fromarray(np.zeros((8, 8), np.uint8)).save("mine/good.png")
        Path("mine/bad.png").write_bytes(b"cut")
        (rejected,) = load("mine", strict=False).rejected
        assert rejected.id == "bad.png"
        print(rejected.reason)
        ```
    """

    id: str
    reason: str


@dataclass(frozen=True, eq=False)
class Images:
    """Images of one size, with their labels if these are known.

    Args:
        name: what tables and errors call the images.
        pixels: bytes [n, channels, height, width].
        labels: the class of each image [n]; None if the classes are not known.
        classes: the names of the classes: label i is called `classes[i]`. Empty if there are none.
        ids: the name of each image, such as its file's; empty if the images have no names.
        source: where the images come from.
        notes: sentences about what was changed when the images were read.
        rejected: the images that could not be read, which are not among `pixels`.

    Example:
        ```python
        import torch
        from qualms.data import Images

        pixels = torch.zeros(6, 1, 8, 8, dtype=torch.uint8)
        images = Images("mine", pixels, labels=torch.tensor([0, 1, 0, 1, 0, 1]))
        some = images.subset(4, seed=1).convert(channels=3, size=16)
        print(len(some), some.pixels.shape, some.labels)
        ```
    """

    name: str
    pixels: UInt8[Tensor, "n c h w"]
    labels: Int64[Tensor, " n"] | None
    classes: tuple[str, ...] = ()
    ids: tuple[str, ...] = ()
    source: str = ""
    notes: tuple[str, ...] = ()
    rejected: tuple[Rejected, ...] = ()

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.pixels)

    @property
    def size(self) -> tuple[int, int]:
        """The height and width of the images, in pixels."""
        return self.pixels.shape[2], self.pixels.shape[3]

    def take(self, index: slice | Int64[Tensor, " k"]) -> "Images":
        """Return the images at some positions, with their labels and ids.

        Args:
            index: a slice, or positions in any order.
        """
        ids = self.ids
        if isinstance(index, slice):
            ids = ids[index]
        elif ids:  # empty if the images have none
            ids = tuple(ids[i] for i in index.tolist())
        labels = None if self.labels is None else self.labels[index]
        return replace(
            self,
            pixels=self.pixels[index],
            labels=labels,
            ids=ids,
        )

    def subset(self, count: int | None, seed: int = 0) -> "Images":
        """Return the first `count` images of a random order that depends on the seed alone.

        The order does not depend on `count`: a smaller subset is the start of a larger one.

        Args:
            count: the number of images; None, or more than there are, for all images.
            seed: the seed of the random order.
        """
        if count is not None and count < 1:
            raise QualmsError(
                f"cannot take a subset of {count} images from {self.name}; pass at least 1, or "
                "None for all."
            )
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(self), generator=generator)
        return self.take(order[:count])

    def convert(self, channels: int, size: int | tuple[int, int]) -> "Images":
        """Convert the images to gray or color, and resize them bilinearly with antialiasing.

        Args:
            channels: 1 for gray, 3 for color.
            size: height and width, or one number for both.

        Returns:
            Images [n, channels, height, width]; the same object if nothing has to be done.
        """
        height, width = (size, size) if isinstance(size, int) else size
        if channels not in (1, 3) or self.pixels.shape[1] not in (1, 3):
            raise QualmsError(
                f"{self.name} cannot be converted from {self.pixels.shape[1]} channels to "
                f"{channels}; pass 1 or 3."
            )
        if min(height, width) < 1:
            raise QualmsError(f"{self.name} cannot be resized to {size} pixels; pass at least 1.")
        if tuple(self.pixels.shape[1:]) == (channels, height, width):
            return self
        converted = []
        for chunk in self.pixels.split(CHUNK):
            converted.append(_convert_pixels(chunk, channels, height, width))
        return replace(self, pixels=torch.cat(converted))

    fitted = RenamedAttribute("convert")

    def fingerprint(self) -> str:
        """Hash the shape, the pixels and the labels to sixteen hex digits, which identify them."""
        digest = hashlib.sha256(str(tuple(self.pixels.shape)).encode())
        digest.update(self.pixels.contiguous().numpy().data)
        if self.labels is not None:
            # Separates the labels from the pixels.
            digest.update(b"labels")
            digest.update(self.labels.contiguous().numpy().data)
        return digest.hexdigest()[:16]

    def numbers(self) -> list[int]:
        """Hash each image's pixels to an integer below 2**63, to seed the image's random draws."""
        return [hash_array(image.contiguous().numpy()) for image in self.pixels]


def hash_array(values: np.ndarray) -> int:
    """Hash the values of an array to an integer from 0 to 2**63 - 1.

    The same sample always has the same hash, so the hash can seed the sample's random draws. Shape
    and dtype are not part of the hash.

    Args:
        values: an array of any shape and dtype.
    """
    content = np.ascontiguousarray(values).data
    digest = hashlib.blake2b(content, digest_size=8).digest()
    # Drop one of 64 bits, so that the number fits into a signed integer of 64 bits.
    return int.from_bytes(digest) >> 1


def _convert_pixels(
    pixels: UInt8[Tensor, "n c h w"],
    channels: int,
    height: int,
    width: int,
) -> UInt8[Tensor, "n d k l"]:
    """Convert a batch of images to gray or color, and resize them bilinearly with torch.

    Args:
        pixels: bytes [n, c, h, w] with 1 or 3 channels.
        channels: the number of channels of the result, 1 or 3.
        height: the height of the result.
        width: the width of the result.

    Returns:
        Bytes [n, channels, height, width].
    """
    x: Float[Tensor, "n c h w"] = pixels.float()
    if channels < pixels.shape[1]:
        gray = torch.einsum("nchw,c->nhw", x, torch.tensor(LUMA))
        x = gray[:, None]  # [n, 1, h, w]
    if tuple(x.shape[2:]) != (height, width):
        x = F.interpolate(x, (height, width), mode="bilinear", antialias=True)
    # Rounded once at the end, not after each step.
    rounded = x.round().clamp(0, 255).to(torch.uint8)
    # From gray to color, this repeats the channel; otherwise it changes nothing.
    return rounded.expand(-1, channels, -1, -1)


def build_images(
    name: str,
    where: object,
    pixels: Any,
    labels: Any,
    classes: tuple[str, ...] = (),
    **fields: Any,
) -> Images:
    """Check that a reader's arrays are consistent, and create `Images` from them.

    Args:
        name: the name of the images, in tables and errors.
        where: the files that the arrays come from, for errors.
        pixels: an array [n, channels, height, width] of integers from 0 to 255.
        labels: an integer for each image; None if there are no labels.
        classes: the names of the classes; empty if there are none.
        fields: values of further fields of `Images`.

    Raises:
        QualmsError: if there are no images, or if the labels are not one class for each image.
    """
    if len(pixels) == 0:
        raise QualmsError(
            f"{where} contains no images; check that it is the right file, and complete."
        )
    # torch needs an array that is contiguous ("C") and writable ("W"), which an array over a file's
    # bytes is not. `require` copies only if needed.
    pixel_tensor = torch.from_numpy(np.require(pixels, np.uint8, ["C", "W"]))
    label_tensor = None
    if labels is not None:
        label_tensor = _labels_to_tensor(labels, where, len(pixel_tensor), len(classes))
    return Images(name, pixel_tensor, label_tensor, classes, **fields)


def _labels_to_tensor(
    labels: Any,
    where: object,
    count: int,
    num_classes: int,
) -> Int64[Tensor, " n"]:
    """Convert labels to a tensor, or raise an error unless there is one class for each image.

    Args:
        labels: the labels as read from files: an array or a list.
        where: the files that the labels come from, for errors.
        count: the number of images.
        num_classes: the number of classes; 0 if it is not known.
    """
    y = np.asarray(labels)
    # An array without axes has no length.
    length = len(y) if y.ndim else 1
    if y.ndim == 0 or length != count:
        raise QualmsError(
            f"{where} contains {count} images but {length} labels; provide one label per image."
        )
    if y.size != count or y.dtype.kind not in "iu":
        raise QualmsError(
            f"the labels in {where} are {y.dtype} of shape {y.shape}; each label must be a single "
            "whole number."
        )
    low, high = int(y.min()), int(y.max())
    if low < 0 or high >= (num_classes or 2**63):
        allowed = f"0 to {num_classes - 1}" if num_classes else "from 0"
        raise QualmsError(
            f"the labels in {where} range from {low} to {high}, but classes are numbered "
            f"{allowed}; correct the labels."
        )
    return torch.from_numpy(y.reshape(-1).astype(np.int64))
