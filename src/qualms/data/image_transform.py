"""From an image of any size to the size that a network takes."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import numpy as np
import torch
from jaxtyping import UInt8

from qualms.data.images import Images
from qualms.data.places import import_extra
from qualms.errors import QualmsError

Interpolation = Literal["nearest", "bilinear", "bicubic", "lanczos"]
LARGEST = 16_384  # pixels a side, which no network takes
# times as long as wide, beyond the network's own shape: of what is longer, a crop leaves next to
# nothing
THIN = 100


@dataclass(frozen=True)
class ImageTransform:
    """How an image becomes a network's input: resized, cropped in the middle, in gray or color.

    An image that has the right size already is left as it is.

    Args:
        size: height and width of what comes out.
        resize: before the crop, a whole number is the length of the shorter side and keeps the
            image's shape, and a pair is height and width. None resizes straight to `size`.
        interpolation: nearest, bilinear, bicubic or lanczos.
        channels: 1 for gray, 3 for color, None for those of the image.
        by: who says so, for the sentence that tells of it.

    Example:
        ```python
        import torch
        from qualms.data import ImageTransform, Images

        photos = Images("photos", torch.zeros(2, 3, 48, 64, dtype=torch.uint8), None)
        fit = ImageTransform((28, 28), resize=32, interpolation="bicubic", channels=1)
        assert fit.apply(photos).pixels.shape == (2, 1, 28, 28)
        print(fit.describe([(48, 64)] * 2))
        ```
    """

    size: tuple[int, int]
    resize: int | tuple[int, int] | None = None
    interpolation: Interpolation = "bilinear"
    channels: int | None = None
    by: str = field(default="as the network's settings say", compare=False)

    def __post_init__(self) -> None:
        sides = (*self.size, *(self._before or self.size))
        if not all(1 <= side <= LARGEST for side in sides):
            raise QualmsError(
                f"images cannot be fitted to {sides}; every side takes 1 to {LARGEST} pixels."
            )
        if any(a < b for a, b in zip(sides[2:], self.size, strict=True)) and not isinstance(
            self.resize, int
        ):
            raise QualmsError(
                f"no {_by(self.size)} can be cropped from {_by(sides[2:])} pixels; resize to more."
            )
        if self.interpolation not in get_args(Interpolation):
            names = ", ".join(get_args(Interpolation))
            raise QualmsError(
                f"the interpolation {self.interpolation!r} is not known; it is one of {names}."
            )
        if self.channels not in (None, 1, 3):
            raise QualmsError(f"images cannot have {self.channels} channels; they have 1 or 3.")

    @property
    def _before(self) -> tuple[int, int] | None:
        return (self.resize, self.resize) if isinstance(self.resize, int) else self.resize

    def apply_to_image(self, image: Any) -> Any:
        """One image of Pillow's, in mode L or RGB."""
        height, width = self.size
        if image.size != (width, height):
            image = self._without_ends(image)
            wide, high = self._resized(*image.size)
            way = import_extra("PIL.Image", "pillow", "images").Resampling[
                self.interpolation.upper()
            ]
            image = image.resize((wide, high), way)
            # As torchvision and timm round: to the nearest pixel, halves to the even one.
            left, top = round((wide - width) / 2), round((high - height) / 2)
            image = image.crop((left, top, left + width, top + height))
        mode = image.mode if self.channels is None else "L" if self.channels == 1 else "RGB"
        return image if image.mode == mode else image.convert(mode)

    def _without_ends(self, image: Any) -> Any:
        """The middle of an image that is long and thin: resized with its ends, it would have
        millions of pixels.
        """
        wide, high = image.size
        most = THIN * min(wide, high) * max(self.size) // min(self.size)
        if not isinstance(self.resize, int) or max(wide, high) <= most:
            return image
        left, top = max(0, (wide - most) // 2), max(0, (high - most) // 2)
        return image.crop((left, top, wide - left, high - top))

    def _resized(self, wide: int, high: int) -> tuple[int, int]:
        """Width and height before the crop."""
        height, width = self.size
        if not isinstance(self.resize, int):
            height, width = self.resize or self.size
            return width, height
        # Never smaller than what is cropped from it.
        scale = max(self.resize / min(wide, high), width / wide, height / high)
        return max(width, int(wide * scale + 1e-6)), max(height, int(high * scale + 1e-6))

    def apply(self, images: Images) -> Images:
        """Images in memory; the same object if nothing is to be done."""
        channels, height, width = images.pixels.shape[1:]
        wanted = self.channels or channels
        if (channels, height, width) == (wanted, *self.size):
            return images
        plain = (
            self.resize is None and self.interpolation == "bilinear"
        )  # many images at once, without Pillow
        if (
            plain or (height, width) == self.size or channels not in (1, 3)
        ):  # which says why others cannot be
            return images.convert(wanted, self.size)
        pillow = import_extra("PIL.Image", "pillow", "images")
        pixels = torch.empty(len(images), wanted, *self.size, dtype=torch.uint8)
        for i, pixel in enumerate(images.pixels):
            array = pixel.permute(1, 2, 0).contiguous().numpy()
            image = pillow.fromarray(array[..., 0] if channels == 1 else array)
            pixels[i] = torch.from_numpy(channels_first(self.apply_to_image(image)))
        return replace(images, pixels=pixels)

    def describe(self, sizes: Iterable[tuple[int, int]]) -> str:
        """What happens to images of these heights and widths, in one sentence; nothing if they have
        the right size.
        """
        others = [size for size in sizes if size != self.size]
        if not others:
            return ""
        low, high = min(others, key=_area), max(others, key=_area)
        which = _by(low) if low == high else f"{_by(low)} to {_by(high)}"
        many = f"{len(others)} image{'' if len(others) == 1 else 's'} of {which} pixels"
        were = "was" if len(others) == 1 else "were"
        if self.resize is None:
            done = f"resized to {_by(self.size)}"
        else:
            before = (
                f"{self.resize} on the shorter side"
                if isinstance(self.resize, int)
                else _by(self.resize)
            )
            done = f"resized to {before} and cropped to {_by(self.size)}"
        return f"{many} {were} {done} ({self.interpolation}), {self.by}"


def channels_first(image: Any) -> UInt8[np.ndarray, "c h w"]:
    """The pixels of an image of Pillow's, in mode L or RGB."""
    pixels = np.array(image)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def _area(size: tuple[int, int]) -> int:
    return size[0] * size[1]


def _by(size: tuple[int, ...]) -> str:
    return " x ".join(map(str, reversed(size)))  # width first, as people say it
