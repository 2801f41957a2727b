"""Turn what a request holds, image files or numbers, into pixels.

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

# [c, h, w]; images of one request may differ in size.
Pixels = UInt8[np.ndarray, "_ _ _"]


@dataclass(frozen=True)
class ImageReader:
    """Reads the images of one request, within the limits.

    Args:
        transform: Resizes the images to the network's size. None leaves them as they are.
        config: The limits.
    """

    transform: ImageTransform | None
    config: ServiceConfig

    def read_files(self, files: Sequence[tuple[str, bytes]]) -> list[Pixels]:
        """Decode image files, and resize the images to the network's size.

        Args:
            files: The name and the content of each file.

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
            images.append(self._transform(image))
        return images

    def _decode(self, name: str, content: bytes, max_pixels: int) -> Any:
        """Decode one file to an image of Pillow's.

        Args:
            name: What error messages call it.
            content: The bytes of the file.
            max_pixels: The most pixels that are left to the request.
        """
        try:
            image, _ = decode_image(content, name, formats=FORMATS, most=max_pixels)
        except TooLarge:
            raise self._too_many_pixels() from None
        except Unreadable as error:
            message = f"{name[:MAX_ECHO]} is {error.plain}; send {', '.join(FORMATS)} files."
            raise HTTPException(422, message) from None
        return image

    def read_arrays(self, arrays: Sequence[Any], white: int) -> list[Pixels]:
        """Convert images that were sent as numbers.

        They take the same path as decoded files, so both get the same scores.

        Args:
            arrays: Nested lists or arrays, each [h][w] or [h][w][c].
            white: The value of white, 255 (integers) or 1.

        Raises:
            HTTPException: 413 if there are too many images or pixels, 422 if an array is not an
                image.
        """
        self.require_count(len(arrays))
        pixels_left = self.config.max_pixels
        images = []
        for position, array in enumerate(arrays):
            values = _to_uint8(array, white, f"image {position}")
            pixels_left -= values.shape[0] * values.shape[1]
            if pixels_left < 0:
                raise self._too_many_pixels()
            image = pillow().fromarray(values)
            images.append(self._transform(image))
        return images

    def _transform(self, image: Any) -> Pixels:
        """Resize an image of Pillow's to the network's size, if it has one; return pixels [c, h, w]."""
        if self.transform is not None:
            image = self.transform.apply_to_image(image)
        return channels_first(image)

    def require_count(self, images: int) -> None:
        """Raise an error if there are no images, or too many.

        Raises:
            HTTPException: 422 if there is none, 413 if there are too many.
        """
        limit = self.config.max_images
        if images == 0:
            raise HTTPException(422, "the request has no images; send at least one.")
        if images > limit:
            message = f"the request has {images} images, but the limit is {limit}; send fewer."
            raise HTTPException(413, message)

    def require_pixels(self, shape: Sequence[int]) -> None:
        """Raise an error if a shape announces too many pixels, before any of them are read.

        Args:
            shape: [n, h, w] or [n, h, w, c].

        Raises:
            HTTPException: 413 if there are too many.
        """
        images, height, width = (int(length) for length in shape[:3])
        if images * height * width > self.config.max_pixels:
            raise self._too_many_pixels()

    def _too_many_pixels(self) -> HTTPException:
        """Return the error for images with too many pixels in total, to be raised: 413."""
        limit = self.config.max_pixels
        message = (
            f"the request's images have more than {limit:,} pixels in total; send smaller ones."
        )
        return HTTPException(413, message)


def _to_uint8(
    array: Any,
    white: int,
    where: str,
) -> UInt8[np.ndarray, "h w *colors"]:
    """Check the numbers of one image and scale them to 0…255.

    Args:
        array: A nested list or an array, [h][w] or [h][w][c].
        white: The value of white, 255 (integers) or 1.
        where: What error messages call the image.

    Returns:
        [h, w] for gray, [h, w, 3] for RGB.

    Raises:
        HTTPException: 422 if it is not an image.
    """
    values = _as_array(array)
    is_numeric = values.dtype.kind in "iuf"
    if not is_numeric or values.ndim not in (2, 3) or not values.size:
        message = "is not an array of numbers, [height][width] or [height][width][channels]."
        raise HTTPException(422, f"{where} {message}")
    if values.ndim == 3 and values.shape[2] not in (1, 3):
        message = f"has {values.shape[2]} channels; send 1 for gray or 3 for RGB."
        raise HTTPException(422, f"{where} {message}")
    is_in_range = (values >= 0).all() and (values <= white).all()  # false for NaN
    if not is_in_range:
        message = (
            f"has numbers outside 0 to {white}; rescale them, or set `white` (in /v2: `datatype`)."
        )
        raise HTTPException(422, f"{where} {message}")
    if white == 255 and values.dtype.kind == "f" and (values % 1 != 0).any():
        message = (
            "has fractional numbers, but `white` is 255; for numbers from 0 to 1, set `white` to 1 "
            "(in /v2: `datatype` FP32)."
        )
        raise HTTPException(422, f"{where} {message}")
    pixels = np.rint(values * (255 / white)).astype(np.uint8)
    has_one_channel = pixels.shape[2:] == (1,)
    return pixels[..., 0] if has_one_channel else pixels


def _as_array(array: Any) -> np.ndarray:
    """Convert nested lists to an array; an empty one if rows differ in length, so it is refused."""
    try:
        return np.asarray(array)
    except ValueError:
        return np.empty(0, dtype=object)
