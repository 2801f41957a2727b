"""Convert the image files or numbers of a request to pixels.

The limits are checked first: no image with too many pixels is ever decoded.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from fastapi import HTTPException
from jaxtyping import UInt8

from qualms.data import ImageTransform
from qualms.data.decode import TooLarge, Unreadable, decode_image, pillow
from qualms.data.image_transform import channels_first
from qualms.service.config import ServiceConfig
from qualms.service.schemas import FORMATS, MAX_ECHO

# The pixels of one image, [c, h, w]; images of a request may differ in size.
Pixels = UInt8[np.ndarray, "_ _ _"]


@dataclass(frozen=True)
class ImageReader:
    """Reads the images of one request, within the limits.

    Args:
        transform: Resizes the images to the network's input size; None does not resize them.
        config: The limits.
    """

    transform: ImageTransform | None
    config: ServiceConfig

    def read_files(self, files: Sequence[tuple[str, bytes]]) -> list[Pixels]:
        """Decode image files, and resize the images to the network's input size.

        Args:
            files: The name and the content of each file.

        Returns:
            The images, each [c, h, w].

        Raises:
            HTTPException: 413 if there are too many images or pixels, 422 if a file is not an
                image in one of `FORMATS`.
        """
        self.require_count(len(files))
        pixels_left = self.config.max_pixels
        images = []
        for name, content in files:
            image = self._decode(name, content, pixels_left)
            pixels_left -= image.width * image.height
            images.append(self._to_pixels(image))
        return images

    def _decode(self, name: str, content: bytes, max_pixels: int) -> Any:
        """Decode one file to a `PIL.Image.Image`.

        Args:
            name: The name of the file, for error messages.
            content: The bytes of the file.
            max_pixels: The most pixels that the image may have.

        Raises:
            HTTPException: 413 if it has more, 422 if it is not an image in one of `FORMATS`.
        """
        try:
            image, _ = decode_image(content, name, formats=FORMATS, max_pixels=max_pixels)
        except TooLarge:
            raise self._too_many_pixels() from None
        except Unreadable as error:
            message = f"{name[:MAX_ECHO]} is {error.bare_reason}; send {', '.join(FORMATS)} files."
            raise HTTPException(422, message) from None
        return image

    def read_arrays(self, arrays: Sequence[Any], white: int) -> list[Pixels]:
        """Convert images that were sent as numbers, and resize them to the network's input size.

        They are processed like decoded files, so an image has the same score either way.

        Args:
            arrays: Nested lists or arrays, each [h][w] or [h][w][c].
            white: The value of white, 255 (integers) or 1.

        Returns:
            The images, each [c, h, w].

        Raises:
            HTTPException: 413 if there are too many images or pixels, 422 if an array is not an
                image.
        """
        self.require_count(len(arrays))
        pixels_left = self.config.max_pixels
        images = []
        for position, array in enumerate(arrays):
            values = _to_uint8(array, white, name=f"image {position}")
            height, width = values.shape[:2]
            pixels_left -= height * width
            if pixels_left < 0:
                raise self._too_many_pixels()
            image = pillow().fromarray(values)
            images.append(self._to_pixels(image))
        return images

    def _to_pixels(self, image: Any) -> Pixels:
        """Return the pixels [c, h, w] of a `PIL.Image.Image`, resized if the network needs that."""
        if self.transform is not None:
            image = self.transform.apply_to_image(image)
        return channels_first(image)

    def require_count(self, num_images: int) -> None:
        """Raise an error if there are no images, or too many.

        Raises:
            HTTPException: 422 if there is none, 413 if there are too many.
        """
        limit = self.config.max_images
        if num_images == 0:
            raise HTTPException(422, "the request has no images; send at least one.")
        if num_images > limit:
            message = f"the request has {num_images} images, but the limit is {limit}; send fewer."
            raise HTTPException(413, message)

    def require_pixels(self, shape: Sequence[int]) -> None:
        """Raise an error if images of this shape have too many pixels, before they are read.

        Args:
            shape: [n, h, w] or [n, h, w, c].

        Raises:
            HTTPException: 413 if there are too many.
        """
        num_images, height, width = (int(length) for length in shape[:3])
        if num_images * height * width > self.config.max_pixels:
            raise self._too_many_pixels()

    def _too_many_pixels(self) -> HTTPException:
        """Make the error with status 413 that the caller raises for too many pixels in total."""
        limit = self.config.max_pixels
        message = (
            f"the request's images have more than {limit:,} pixels in total; send smaller ones."
        )
        return HTTPException(413, message)


def _to_uint8(
    array: Any,
    white: int,
    name: str,
) -> UInt8[np.ndarray, "h w *colors"]:
    """Check the numbers of one image, and rescale them to integers from 0 to 255.

    Args:
        array: A nested list or an array, [h][w] or [h][w][c].
        white: The value of white, 255 (integers) or 1.
        name: The name of the image in error messages.

    Returns:
        [h, w] for gray, [h, w, 3] for RGB.

    Raises:
        HTTPException: 422 if the numbers do not form an image.
    """
    values = _as_array(array)
    is_numeric = values.dtype.kind in "iuf"
    if not is_numeric or values.ndim not in (2, 3) or not values.size:
        message = "is not an array of numbers, [height][width] or [height][width][channels]."
        raise HTTPException(422, f"{name} {message}")
    if values.ndim == 3 and values.shape[2] not in (1, 3):
        message = f"has {values.shape[2]} channels; send 1 for gray or 3 for RGB."
        raise HTTPException(422, f"{name} {message}")
    is_in_range = (values >= 0).all() and (values <= white).all()  # false for NaN
    if not is_in_range:
        message = (
            f"has numbers outside 0 to {white}; rescale them, or set `white` (in /v2: `datatype`)."
        )
        raise HTTPException(422, f"{name} {message}")
    if white == 255 and values.dtype.kind == "f" and (values % 1 != 0).any():
        message = (
            "has fractional numbers, but `white` is 255; for numbers from 0 to 1, set `white` to 1 "
            "(in /v2: `datatype` FP32)."
        )
        raise HTTPException(422, f"{name} {message}")
    pixels = np.rint(values * (255 / white)).astype(np.uint8)
    has_one_channel = pixels.shape[2:] == (1,)
    return pixels[..., 0] if has_one_channel else pixels


def _as_array(array: Any) -> np.ndarray:
    """Convert nested lists to an array; an empty one, which is refused, if rows differ."""
    try:
        return np.asarray(array)
    except ValueError:
        return np.empty(0, dtype=object)
