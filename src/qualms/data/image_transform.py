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
# In pixels; no network takes larger images.
MAX_SIDE = 16_384
# The largest aspect ratio (longer side / shorter side) of an image that is resized as a whole, as a
# multiple of the aspect ratio of the network's input. A crop would remove nearly all of a longer
# image.
MAX_ASPECT = 100


@dataclass(frozen=True)
class ImageTransform:
    """Resizes an image, crops its middle, and converts it to gray or color, for a network's input.

    An image that already has the right size is neither resized nor cropped.

    Args:
        size: height and width of the result.
        resize: the size before the crop. An integer is the length of the shorter side, with the
            aspect ratio kept; a pair is height and width. None resizes straight to `size`.
        interpolation: nearest, bilinear, bicubic or lanczos.
        channels: 1 for gray, 3 for color, None to keep the channels of the image.
        by: where these settings come from: a clause that ends the sentence that `describe` returns.

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
        """Raise an error if a setting is invalid, or if the crop exceeds the resized image."""
        before = self.size
        if isinstance(self.resize, int):
            # The shorter side; the other one is at least as long.
            before = (self.resize, self.resize)
        elif self.resize:
            before = self.resize
        sides = (*self.size, *before)
        if not all(1 <= side <= MAX_SIDE for side in sides):
            raise QualmsError(
                f"images cannot be resized to {sides}; each side must be 1 to {MAX_SIDE} pixels."
            )
        is_smaller = before[0] < self.size[0] or before[1] < self.size[1]
        # If `resize` is the shorter side, `_size_before_crop` makes the image large enough.
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
        """The settings that decide the result, as text that can be compared with a later run's."""
        # All but `by`, which only says where the settings come from.
        names = [each.name for each in fields(self) if each.compare]
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)

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
            resized_width, resized_height = self._size_before_crop(*image.size)
            resampling = pillow().Resampling[self.interpolation.upper()]
            image = image.resize((resized_width, resized_height), resampling)
            # Rounded as in torchvision and timm: to the nearest pixel, halves to the even one.
            left = round((resized_width - width) / 2)
            top = round((resized_height - height) / 2)
            image = image.crop((left, top, left + width, top + height))
        mode_by_channels = {None: image.mode, 1: "L", 3: "RGB"}
        mode = mode_by_channels[self.channels]
        if image.mode == mode:
            return image
        return image.convert(mode)

    def _crop_ends(self, image: Any) -> Any:
        """Cut off both ends of a very long, thin Pillow image before it is resized.

        With its shorter side resized to `resize`, the whole image would have millions of pixels.
        Other images are returned unchanged.
        """
        width, height = image.size
        # The longest side that is resized as a whole.
        longest = MAX_ASPECT * min(width, height) * max(self.size) // min(self.size)
        if not isinstance(self.resize, int) or max(width, height) <= longest:
            return image
        left = max(0, (width - longest) // 2)
        top = max(0, (height - longest) // 2)
        return image.crop((left, top, width - left, height - top))

    def _size_before_crop(self, image_width: int, image_height: int) -> tuple[int, int]:
        """Compute the size to which an image is resized before it is cropped.

        Args:
            image_width: the width of the image as it was read.
            image_height: the height of the image as it was read.

        Returns:
            Width and height, Pillow's order.
        """
        if not isinstance(self.resize, int):
            height, width = self.resize or self.size
            return width, height
        crop_height, crop_width = self.size
        shorter_side = min(image_width, image_height)
        # The resized image is never smaller than the crop.
        scale = max(
            self.resize / shorter_side, crop_width / image_width, crop_height / image_height
        )
        # Adding 1e-6 keeps a product just below an integer from being rounded down.
        width = max(crop_width, int(image_width * scale + 1e-6))
        height = max(crop_height, int(image_height * scale + 1e-6))
        return width, height

    def apply(self, images: Images) -> Images:
        """Transform images that are in memory.

        Args:
            images: the images, in gray or color.

        Returns:
            Images of `size`; the same object if nothing has to be done.
        """
        channels, height, width = images.pixels.shape[1:]
        out_channels = self.channels or channels
        if (channels, height, width) == (out_channels, *self.size):
            return images
        is_only_resized = self.resize is None and self.interpolation == "bilinear"
        is_only_recolored = (height, width) == self.size
        # `convert` can do only these two, but faster, as it runs on batches. It also raises the
        # error for images that have neither 1 nor 3 channels.
        if is_only_resized or is_only_recolored or channels not in (1, 3):
            return images.convert(out_channels, self.size)
        pixels = torch.empty(len(images), out_channels, *self.size, dtype=torch.uint8)
        for i, image_pixels in enumerate(images.pixels):
            array = image_pixels.permute(1, 2, 0).contiguous().numpy()
            if channels == 1:
                # Pillow takes gray images without an axis of channels.
                array = array[..., 0]
            image = self.apply_to_image(pillow().fromarray(array))
            pixels[i] = torch.from_numpy(channels_first(image))
        return replace(images, pixels=pixels)

    def describe(self, sizes: Iterable[tuple[int, int]]) -> str:
        """Describe in one sentence how images of these sizes are resized and cropped.

        Args:
            sizes: height and width of each image.

        Returns:
            The sentence; an empty string if all images have the right size.
        """
        resized = [size for size in sizes if size != self.size]
        if not resized:
            return ""
        smallest = min(resized, key=_count_pixels)
        largest = max(resized, key=_count_pixels)
        size_range = _format_size(smallest)
        if smallest != largest:
            size_range += f" to {_format_size(largest)}"
        change = f"{self._describe_steps()} ({self.interpolation}), {self.by}"
        if len(resized) == 1:
            return f"1 image of {size_range} pixels was {change}"
        return f"{len(resized)} images of {size_range} pixels were {change}"

    def _describe_steps(self) -> str:
        """Describe the resizing and the crop, such as `resized to 32 x 32`."""
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
        # A gray image has no axis of channels yet.
        return pixels[None]
    return pixels.transpose(2, 0, 1)


def _count_pixels(size: tuple[int, int]) -> int:
    """Return the number of pixels of an image of this height and width."""
    return size[0] * size[1]


def _format_size(size: tuple[int, ...]) -> str:
    """Format a size (height, width) as `width x height`, the usual order in text."""
    return " x ".join(map(str, reversed(size)))
