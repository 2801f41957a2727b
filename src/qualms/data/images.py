"""Images in memory, as bytes: what every reader returns."""

import hashlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from qualms.errors import QualmsError, warn_renamed

LUMA = (0.299, 0.587, 0.114)  # ITU-R 601: how bright red, green and blue look
CHUNK = 1000  # images that are held as floats at a time


@dataclass(frozen=True)
class Rejected:
    """An image or text that could not be read: its id, and a reason that goes on from "it is".

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
    """Pixels, and where they are known the classes.

    `classes` names the classes that `labels` counts; it is empty where the files do not name them.
    `ids` are the names of the image files, in the same way. `source` says where they come from,
    `notes` what was done to them as they were read, in sentences, and `rejected` what could not be
    read.

    Example:
        ```python
        import torch
        from qualms.data import Images

        pixels = torch.zeros(6, 1, 8, 8, dtype=torch.uint8)
        images = Images("mine", pixels, labels=torch.tensor([0, 1, 0, 1, 0, 1]))
        some = images.subset(4, seed=1).fitted(channels=3, size=16)
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
        return len(self.pixels)

    @property
    def size(self) -> tuple[int, int]:
        """Height and width."""
        return self.pixels.shape[2], self.pixels.shape[3]

    def take(self, index: slice | Int64[Tensor, " k"]) -> "Images":
        """The images at these places, in this order."""
        places = range(len(self))[index] if isinstance(index, slice) else index.tolist()
        ids = tuple(self.ids[i] for i in places) if self.ids else ()
        labels = None if self.labels is None else self.labels[index]
        return replace(self, pixels=self.pixels[index], labels=labels, ids=ids)

    def subset(self, count: int | None, seed: int = 0) -> "Images":
        """`count` images in a random order that the seed alone decides; all of them if None or more
        than there are.

        The order is always the shuffled one, so the first k images of a subset are the subset of k.
        """
        if count is not None and count < 1:
            raise QualmsError(
                f"a subset of {count} images of {self.name} was asked for; ask for at least 1, or None."
            )
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))
        return self.take(order[:count])

    def convert(self, channels: int, size: int | tuple[int, int]) -> "Images":
        """In gray (1 channel) or color (3), resized; the same object if nothing is to be done.

        `size` is height and width, or one number for both.
        """
        height, width = (size, size) if isinstance(size, int) else size
        if channels not in (1, 3) or self.pixels.shape[1] not in (1, 3):
            raise QualmsError(
                f"{self.name} cannot go from {self.pixels.shape[1]} channels to {channels}; use 1 or 3."
            )
        if min(height, width) < 1:
            raise QualmsError(
                f"{self.name} cannot be resized to {size} pixels; ask for at least 1."
            )
        if tuple(self.pixels.shape[1:]) == (channels, height, width):
            return self
        parts = [_fit(part, channels, height, width) for part in self.pixels.split(CHUNK)]
        return replace(self, pixels=torch.cat(parts))

    def fitted(self, channels: int, size: int | tuple[int, int]) -> "Images":
        """The deprecated name of `convert`."""
        warn_renamed("Images.fitted", "Images.convert")
        return self.convert(channels, size)

    def fingerprint(self) -> str:
        """Sixteen hex digits that change with any pixel, label or shape."""
        digest = hashlib.sha256(str(tuple(self.pixels.shape)).encode())
        digest.update(self.pixels.contiguous().numpy().data)
        if self.labels is not None:
            digest.update(b"labels")
            digest.update(self.labels.contiguous().numpy().data)
        return digest.hexdigest()[:16]

    def numbers(self) -> list[int]:
        """A whole number of 63 bits for each image, which changes with any of its pixels."""
        return [number_of(one.contiguous().numpy()) for one in self.pixels]


def number_of(values: np.ndarray) -> int:
    """A whole number of 63 bits that changes with any of some numbers, so that draws can follow
    them.
    """
    return (
        int.from_bytes(hashlib.blake2b(np.ascontiguousarray(values).data, digest_size=8).digest())
        >> 1
    )


def _fit(
    pixels: UInt8[Tensor, "n c h w"], channels: int, height: int, width: int
) -> UInt8[Tensor, "n d k l"]:
    x: Float[Tensor, "n c h w"] = pixels.float()
    if channels < pixels.shape[1]:
        x = torch.einsum("nchw,c->nhw", x, torch.tensor(LUMA))[:, None]
    if tuple(x.shape[2:]) != (height, width):
        x = F.interpolate(x, (height, width), mode="bilinear", antialias=True)
    # One rounding at the end, not one for each step.
    return x.round().clamp(0, 255).to(torch.uint8).expand(-1, channels, -1, -1)


def build_images(
    name: str, where: object, pixels: Any, labels: Any, classes: tuple[str, ...] = (), **more: Any
) -> Images:
    """Images from a reader's arrays, once they are consistent; `where` names the files in an error.

    `more` are the other fields of `Images`.
    """
    if len(pixels) == 0:
        raise QualmsError(
            f"{where} holds no images; check that it is the file you meant, and whole."
        )
    # A copy where need be: arrays over a file's bytes cannot be written to, and torch wants the
    # order of the axes.
    x = torch.from_numpy(np.require(pixels, np.uint8, ["C", "W"]))
    if labels is None:
        return Images(name, x, None, classes, **more)
    y = np.asarray(labels)
    if y.ndim == 0 or len(y) != len(x):
        count = 1 if y.ndim == 0 else len(y)
        raise QualmsError(
            f"{where} holds {len(x)} images and {count} labels; there must be one label for each image."
        )
    if y.size != len(x) or y.dtype.kind not in "iu":
        raise QualmsError(
            f"the labels in {where} are {y.dtype} of shape {y.shape}; each must be one whole number, its class."
        )
    low, high = int(y.min()), int(y.max())
    if low < 0 or high >= (len(classes) or 2**63):
        allowed = f"0 to {len(classes) - 1}" if classes else "0 and up"
        raise QualmsError(
            f"the labels in {where} go from {low} to {high}, and classes are counted {allowed}; correct them."
        )
    return Images(name, x, torch.from_numpy(y.reshape(-1).astype(np.int64)), classes, **more)
