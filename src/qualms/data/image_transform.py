"""Resize and crop an image of any size to the size that a network takes, with Pillow.

`Images.convert` in `images.py` only resizes, a batch of tensors at a time.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args

import numpy as np
import torch
from jaxtyping import UInt8

from qualms.data.decode import pillow
from qualms.data.images import Images
from qualms.errors import QualmsError

Interpolation = Literal["nearest", "bilinear", "bicubic", "lanczos"]
MAX_SIDE = 16_384  # pixels; no network takes more
# The largest ratio of an image's longer to its shorter side, as a multiple of that of the network's
# input. Of a longer image, a crop would leave next to nothing.
MAX_ASPECT = 100


@dataclass(frozen=True)
class ImageTransform:
    """How an image becomes a network's input: resized, cropped in the middle, in gray or color.

    An image that has the right size already is left unchanged.

    Args:
        size: height and width of the result.
        resize: the size before the crop. A whole number is the length of the shorter side and keeps
            the image's shape; a pair is height and width. None resizes straight to `size`.
        interpolation: nearest, bilinear, bicubic or lanczos.
        channels: 1 for gray, 3 for color, None for those of the image.
        by: where these settings come from, a clause that ends the sentence of `describe`.

    Example:
        ```python
        import torch
        from qualms.data import ImageTransform, Images

        photos = Images("photos", torch.zeros(2, 3, 48, 64, dtype=torch.uint8), None)
        transform = ImageTransform((28, 28), resize=32, interpolation="bicubic", channels=1)
        assert transform.apply(photos).pixels.shape == (2, 1, 28, 28)
        print(transform.describe([(48, 64)] * 2))
        ```
    """

    size: tuple[int, int]
    resize: int | tuple[int, int] | None = None
    interpolation: Interpolation = "bilinear"
    channels: int | None = None
    by: str = field(default="as in the network's settings", compare=False)

    def __post_init__(self) -> None:
        """Raise an error if a setting is invalid, or the crop larger than the resized image."""
        before = self._before or self.size
        sides = (*self.size, *before)
        if not all(1 <= side <= MAX_SIDE for side in sides):
            raise QualmsError(
                f"images cannot be resized to {sides}; each side must be 1 to {MAX_SIDE} pixels."
            )
        is_smaller = before[0] < self.size[0] or before[1] < self.size[1]
        # With one number for `resize`, `_size_before_crop` makes the image large enough.
        if is_smaller and not isinstance(self.resize, int):
            raise QualmsError(
                f"cannot crop {_format_size(self.size)} from {_format_size(before)} pixels; "
                "resize to a larger size."
            )
        if self.interpolation not in get_args(Interpolation):
            names = ", ".join(get_args(Interpolation))
            raise QualmsError(
                f"the interpolation {self.interpolation!r} is invalid; choose one of {names}."
            )
        if self.channels not in (None, 1, 3):
            raise QualmsError(f"images cannot have {self.channels} channels; pass 1 or 3.")

    @property
    def identity(self) -> str:
        """The settings that decide the result, as text that a later run is compared with."""
        settings = [each.name for each in fields(self) if each.compare]
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in settings)

    @property
    def _before(self) -> tuple[int, int] | None:
        """`resize` as a pair of height and width, for checks; None without it.

        The length of the shorter side stands for both sides.
        """
        if isinstance(self.resize, int):
            return self.resize, self.resize
        return self.resize

    def apply_to_image(self, image: Any) -> Any:
        """Resize, crop and convert one image.

        Args:
            image: a Pillow image in mode L or RGB.

        Returns:
            A Pillow image of `size`, in mode L or RGB.
        """
        height, width = self.size
        if image.size != (width, height):
            image = self._crop_ends(image)
            wide, high = self._size_before_crop(*image.size)
            filter = pillow().Resampling[self.interpolation.upper()]
            image = image.resize((wide, high), filter)
            # Rounded as in torchvision and timm: to the nearest pixel, halves to the even one.
            left = round((wide - width) / 2)
            top = round((high - height) / 2)
            image = image.crop((left, top, left + width, top + height))
        mode = {None: image.mode, 1: "L", 3: "RGB"}[self.channels]
        if image.mode == mode:
            return image
        return image.convert(mode)

    def _crop_ends(self, image: Any) -> Any:
        """Crop a long, thin image to its middle before it is resized.

        Resized as a whole, such an image would have millions of pixels.
        """
        wide, high = image.size
        longest = MAX_ASPECT * min(wide, high) * max(self.size) // min(self.size)
        if not isinstance(self.resize, int) or max(wide, high) <= longest:
            return image
        left = max(0, (wide - longest) // 2)
        top = max(0, (high - longest) // 2)
        return image.crop((left, top, wide - left, high - top))

    def _size_before_crop(self, wide: int, high: int) -> tuple[int, int]:
        """Compute the width and height to which an image of this width and height is resized."""
        height, width = self.size
        if not isinstance(self.resize, int):
            height, width = self.resize or self.size
            return width, height
        # Never smaller than the crop. Adding 1e-6 keeps a product just below a whole number from
        # being rounded down.
        scale = max(self.resize / min(wide, high), width / wide, height / high)
        width = max(width, int(wide * scale + 1e-6))
        height = max(height, int(high * scale + 1e-6))
        return width, height

    def apply(self, images: Images) -> Images:
        """Transform images in memory.

        Args:
            images: the images, in gray or color.

        Returns:
            Images of `size`; the same object if nothing has to be done.
        """
        channels, height, width = images.pixels.shape[1:]
        wanted = self.channels or channels
        if (channels, height, width) == (wanted, *self.size):
            return images
        is_plain = self.resize is None and self.interpolation == "bilinear"
        # `convert` does many images at once, and raises an error for other numbers of channels.
        if is_plain or (height, width) == self.size or channels not in (1, 3):
            return images.convert(wanted, self.size)
        pixels = torch.empty(len(images), wanted, *self.size, dtype=torch.uint8)
        for i, pixel in enumerate(images.pixels):
            array = pixel.permute(1, 2, 0).contiguous().numpy()
            if channels == 1:
                array = array[..., 0]
            image = self.apply_to_image(pillow().fromarray(array))
            pixels[i] = torch.from_numpy(channels_first(image))
        return replace(images, pixels=pixels)

    def describe(self, sizes: Iterable[tuple[int, int]]) -> str:
        """Describe how images are changed, in one sentence.

        Args:
            sizes: height and width of each image.

        Returns:
            The sentence; empty if all images have the right size.
        """
        others = [size for size in sizes if size != self.size]
        if not others:
            return ""
        low = min(others, key=_area)
        high = max(others, key=_area)
        pixels = _format_size(low)
        if low != high:
            pixels += f" to {_format_size(high)}"
        done = f"{self._steps()} ({self.interpolation}), {self.by}"
        if len(others) == 1:
            return f"1 image of {pixels} pixels was {done}"
        return f"{len(others)} images of {pixels} pixels were {done}"

    def _steps(self) -> str:
        """Describe the steps that an image goes through, such as `resized to 32 x 32`."""
        if self.resize is None:
            return f"resized to {_format_size(self.size)}"
        before = f"{self.resize} on the shorter side"
        if not isinstance(self.resize, int):
            before = _format_size(self.resize)
        return f"resized to {before} and cropped to {_format_size(self.size)}"


def channels_first(image: Any) -> UInt8[np.ndarray, "c h w"]:
    """Convert a Pillow image, in mode L or RGB, to an array [channels, height, width]."""
    pixels = np.array(image)
    if pixels.ndim == 2:
        return pixels[None]
    return pixels.transpose(2, 0, 1)


def _area(size: tuple[int, int]) -> int:
    """The number of pixels of a size."""
    return size[0] * size[1]


def _format_size(size: tuple[int, ...]) -> str:
    """Format a size (height, width) as `width x height`, the order in which people name them."""
    return " x ".join(map(str, reversed(size)))
