"""What a request holds, files or numbers, to pixels: nothing larger than the limits is ever
decode_image.
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
from qualms.service.settings import Settings

# Formats that Pillow reads by itself: for others it may start a program such as Ghostscript.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
ECHO = 80  # characters of a request that an error repeats
Pixels = UInt8[np.ndarray, "_ _ _"]  # [c, h, w]; those of one request may differ


@dataclass(frozen=True)
class Intake:
    """How images come in: in the network's size if it has one, within the limits."""

    fit: ImageTransform | None
    settings: Settings

    def of_files(self, files: Sequence[tuple[str, bytes]]) -> list[Pixels]:
        """Image files by name."""
        self.require_count(len(files))
        left, found = self.settings.pixels, []
        for name, content in files:
            try:
                image, _ = decode_image(content, name, formats=FORMATS, most=left)
            except TooLarge:
                raise self._too_many_pixels() from None
            except Unreadable as error:
                raise HTTPException(
                    422, f"{name[:ECHO]} is {error.plain}; send {', '.join(FORMATS)} files."
                ) from None
            left -= image.width * image.height
            found.append(self._fitted(image))
        return found

    def of_numbers(self, arrays: Sequence[Any], white: int) -> list[Pixels]:
        """Nested lists or arrays, each [h][w] or [h][w][c], in which white is 255 (whole numbers)
        or 1.
        """
        self.require_count(len(arrays))
        left, found = self.settings.pixels, []
        for i, array in enumerate(arrays):
            pixels = _bytes(array, white, f"image {i}")
            left -= pixels.shape[0] * pixels.shape[1]
            if left < 0:
                raise self._too_many_pixels()
            found.append(
                self._fitted(pillow().fromarray(pixels))
            )  # on the path of files: scores agree
        return found

    def _fitted(self, image: Any) -> Pixels:
        """An image of Pillow's, as the network takes it."""
        return channels_first(image if self.fit is None else self.fit.apply_to_image(image))

    def require_count(self, images: int) -> None:
        """An error if a request has no image, or too many."""
        if images == 0:
            raise HTTPException(422, "the request holds no image; send at least one.")
        if images > self.settings.images:
            raise HTTPException(
                413,
                f"the request holds {images} images, and at most {self.settings.images} are taken; send fewer.",
            )

    def require_pixels(self, shape: Sequence[int]) -> None:
        """An error if images of this shape, [n][h][w] and perhaps channels, have too many pixels."""
        images, height, width = (int(side) for side in shape[:3])
        if images * height * width > self.settings.pixels:
            raise self._too_many_pixels()

    def _too_many_pixels(self) -> HTTPException:
        most = self.settings.pixels
        return HTTPException(
            413, f"the images of the request have more than {most:,} pixels; send smaller ones."
        )


def _bytes(array: Any, white: int, where: str) -> UInt8[np.ndarray, "h w *colors"]:
    try:
        values = np.asarray(array)
    except ValueError:
        values = np.empty(0, dtype=object)
    if values.dtype.kind not in "iuf" or values.ndim not in (2, 3) or not values.size:
        raise HTTPException(
            422, f"{where} is not a table of numbers, [height][width] or [height][width][channels]."
        )
    if values.ndim == 3 and values.shape[2] not in (1, 3):
        raise HTTPException(
            422, f"{where} has {values.shape[2]} channels; send 1 for gray, or 3 for color."
        )
    if not (values >= 0).all() or not (values <= white).all():  # not a number is neither
        raise HTTPException(
            422,
            f"{where} has numbers outside 0 to {white}; rescale them, or set `white` (in /v2 `datatype`).",
        )
    if white == 255 and values.dtype.kind == "f" and (values % 1 != 0).any():
        raise HTTPException(
            422,
            f"{where} has fractions, but white is 255; for 0 to 1, set `white` to 1 (in /v2 FP32).",
        )
    pixels = np.rint(values * (255 / white)).astype(np.uint8)
    return pixels[..., 0] if pixels.shape[2:] == (1,) else pixels
