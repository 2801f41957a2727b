"""The bytes of one image file to pixels in color, and what was done on the way."""

import re
import warnings
from collections.abc import Iterable, Sequence
from io import BytesIO
from typing import Any

import numpy as np

from qualms.data.places import import_extra
from qualms.data.png import require_whole
from qualms.errors import QualmsError

ORIENTATION = 0x0112  # the number of that tag in EXIF
UPRIGHT = {  # what undoes each orientation, by Pillow's names
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}


# Pixels that a file may claim, whatever its length, and for each byte of it: PNG can have 8,000 of
# one bit in a byte. Blank pages as WEBP or TIFF can have more, and are refused where they are
# large: room would be made for any claim.
ANYWAY, A_BYTE = 2**25, 10_000
AT_ONCE = 2**20  # numbers that are scaled together


class Unreadable(QualmsError):
    """An image or text that cannot be read; `reason` goes on from "it is", and `plain` leaves out
    what was raised.
    """

    def __init__(self, where: str, reason: str, raised: Exception | None = None) -> None:
        self.plain = reason
        self.reason = reason if raised is None else f"{reason} ({type(raised).__name__})"
        super().__init__(f"{where} is {self.reason}; replace or remove it.")


class TooLarge(Unreadable):
    """An image of more pixels than are read; nothing of it was decoded."""


def decode_image(
    content: bytes, where: str, *, formats: Sequence[str] | None = None, most: int | None = None
) -> tuple[Any, list[str]]:
    """The first frame of an image file as Pillow's image in mode RGB, upright, and what was done:
    keys of `DONE`.

    Args:
        content: the file's bytes.
        where: what errors call it.
        formats: the file formats that are read, by Pillow's names; all by default.
        most: the number of pixels that are read, if it is lower than Pillow's own limit.
    """
    image, done = _read(content, where, formats, most)
    turn = UPRIGHT.get(_orientation(image))
    if turn is not None:
        image = image.transpose(pillow().Transpose[turn])
        done.append("orientation")
    if image.mode.startswith("I;16") or image.mode in ("I", "F"):
        image = _scaled(image, where)
        done.append("more bits")
    image = _in_color(image, where, done)
    return image, list(dict.fromkeys(done))


# What can be done to an image, and how it is told of so many of them.
DONE = {
    "frames": "{n} {images} {have} several frames, of which the first was read",
    "orientation": "{n} {images} {were} turned upright, as the EXIF orientation says",
    "more bits": "{n} {images} {were} scaled from more than 8 bits to 8",
    "grayscale": "{n} grayscale {images} {were} converted to color",
    "palette": "{n} {images} with a palette {were} converted to color",
    "transparency": "{n} {images} {were} transparent in places, which was dropped",
    "CMYK": "{n} CMYK {images} {were} converted to RGB",
    "colors": "{n} {images} in other colors than RGB {were} converted to it",
}


def open_image(content: bytes, where: str) -> Any:
    """One image as Pillow has it, with all the pixels of its first frame read."""
    return _read(content, where)[0]


def pillow() -> Any:
    """Pillow's Image module, or an error that says how to install it."""
    return import_extra("PIL.Image", "pillow", "images")


def _read(
    content: bytes, where: str, formats: Sequence[str] | None = None, most: int | None = None
) -> tuple[Any, list[str]]:
    library = pillow()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # about sizes below the limit, and notes inside the file that are damaged
            image = library.open(BytesIO(content), formats=formats)
            # Once the pixels are there, both can no longer be told.
            done = ["frames"] if _has_frames(image) else []
            done += (
                ["more bits"]
                if any(";16" in str(tile[3]) for tile in getattr(image, "tile", ()))
                else []
            )
            if most is not None and image.width * image.height > most:
                raise _too_large(where, image.width * image.height, most)
            believed = max(ANYWAY, A_BYTE * len(content))
            if image.width * image.height > believed:
                claim = f"its header claims {image.width * image.height:,} pixels in {len(content):,} bytes"
                raise Unreadable(
                    where, f"too large for its length: {claim}, and at most {believed:,} are read"
                )
            image.load()
            if image.format == "PNG":
                require_whole(content, image)
    except library.DecompressionBombError as error:
        claimed, limit = (int(number) for number in re.findall(r"\d+", str(error))[:2])
        raise _too_large(where, claimed, limit) from None
    except (Unreadable, MemoryError):  # that memory runs out says nothing of the file
        raise
    except Exception as error:  # Pillow raises whatever comes up
        raise Unreadable(where, "cut or not an image", error) from None
    return image, done


def _too_large(where: str, claimed: int, limit: int) -> TooLarge:
    return TooLarge(
        where, f"too large: its header claims {claimed:,} pixels, and at most {limit:,} are read"
    )


def many(count: int, template: str) -> str:
    """A sentence of `DONE` about so many images."""
    one = count == 1
    words = {
        "images": "image" if one else "images",
        "were": "was" if one else "were",
        "have": "has" if one else "have",
    }
    return template.format(n=count, **words)


def told(done: Iterable[tuple[str, int]]) -> list[str]:
    """What was done, each with the number of images, in sentences."""
    counts = dict(done)
    return [many(counts[what], template) for what, template in DONE.items() if counts.get(what)]


def _has_frames(image: Any) -> bool:
    """Whether there is a second frame; their number is not asked for, since to count them all of
    them are visited.
    """
    first = image.tell()
    try:
        return bool(getattr(image, "is_animated", False))
    except Exception:  # of frames that nobody asked for
        return False
    finally:
        if image.tell() != first:  # else another frame would be read, of another size
            image.seek(first)


def _orientation(image: Any) -> int:
    try:
        return int(image.getexif().get(ORIENTATION, 1))
    except Exception:  # damaged notes do not make the pixels worse
        return 1


def _scaled(image: Any, where: str) -> Any:
    """Gray of more than 8 bits, scaled to 8 and not cut off: 16 bits by 257, so that white stays
    white.
    """
    values = np.asarray(image)
    low, high = float(values.min()), float(values.max())
    most = 1.0 if image.mode == "F" else 65535.0
    if not (low >= 0 and high <= most):
        raise Unreadable(
            where,
            f"made of 32-bit numbers from {low:g} to {high:g}, of which 0 to {most:g} can be scaled to bytes",
        )
    scaled = np.empty(values.size, np.uint8)
    for start in range(0, values.size, AT_ONCE):
        some = values.reshape(-1)[start : start + AT_ONCE].astype(np.float64)
        scaled[start : start + AT_ONCE] = np.rint(some * (255 / most))
    return pillow().fromarray(scaled.reshape(values.shape))


def _in_color(image: Any, where: str, done: list[str]) -> Any:
    mode = image.mode
    if mode in ("P", "PA"):
        done.append("palette")
        image = image.convert(
            "RGBA"
        )  # a palette may hold transparency, which RGB alone warns about
    elif mode in ("1", "L", "LA", "La"):
        done.append("grayscale")
    elif not mode.startswith("RGB"):
        done.append("CMYK" if mode == "CMYK" else "colors")
    if mode in ("La", "RGBa"):
        image = image.convert(f"{mode[:-1]}A")
    if image.mode in ("LA", "RGBA") and image.getchannel("A").getextrema()[0] < 255:
        done.append("transparency")
    image.info.pop("transparency", None)  # one color that stands for none: it stays that color
    try:
        return image if image.mode == "RGB" else image.convert("RGB")
    except ValueError:
        raise Unreadable(where, f"an image in colors that cannot become RGB ({mode})") from None
