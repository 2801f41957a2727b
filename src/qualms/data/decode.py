"""Decode the bytes of one image file to pixels in color, and report what was changed."""

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from typing import Any, TypeVar

import numpy as np

from qualms.data.places import import_extra
from qualms.data.png import require_complete_png
from qualms.errors import QualmsError, explain_failure

T = TypeVar("T")

# The EXIF tag of the orientation.
ORIENTATION = 0x0112
# The values of the tag for images that are stored rotated or mirrored.
ROTATED_ORIENTATIONS = range(2, 9)

# Memory is allocated for as many pixels as a header claims. So a header is believed only up to what
# a file of its length can hold: MIN_BELIEVED_PIXELS in any file, or BELIEVED_PIXELS_PER_BYTE. A
# byte of PNG can hold 8,000 pixels of one bit. Blank pages as WEBP or TIFF can have more, and are
# refused if they are large.
MIN_BELIEVED_PIXELS = 2**25
BELIEVED_PIXELS_PER_BYTE = 10_000
# Pixel values that are scaled at a time.
SCALE_BLOCK = 2**20

# A dict from each kind of change to the sentence that reports it; n is the number of images.
CHANGES = {
    "frames": "{n} {images} {have} several frames; only the first was read",
    "orientation": "{n} {images} {were} rotated by EXIF orientation",
    "more bits": "{n} {images} {were} scaled from more than 8 bits to 8",
    "grayscale": "{n} grayscale {images} {were} converted to color",
    "palette": "{n} {images} with a palette {were} converted to color",
    "transparency": "{n} {images} {have} transparency, which was dropped",
    "CMYK": "{n} CMYK {images} {were} converted to RGB",
    "colors": "{n} {images} in other color spaces {were} converted to RGB",
}


class Unreadable(QualmsError):
    """Raised if an image or text cannot be read.

    Args:
        where: what the message calls the image or text.
        reason: why the image or text cannot be read; completes the sentence "it is …".
        error: the exception that a library raised; None if there was none.

    Attributes:
        bare_reason: the argument `reason`.
        reason: the argument `reason`, followed by the class of `error` in parentheses, if any.
    """

    def __init__(self, where: str, reason: str, error: Exception | None = None) -> None:
        self.bare_reason = reason
        self.reason = reason if error is None else f"{reason} ({type(error).__name__})"
        super().__init__(f"{where} is {self.reason}; replace or remove it.")


class TooLarge(Unreadable):
    """Raised if an image's header claims more pixels than the limit; no pixel was decoded."""


def pillow() -> Any:
    """Import Pillow's Image module, or raise an error that explains how to install it."""
    return import_extra("PIL.Image", "pillow", "images")


def decode_image(
    content: bytes,
    where: str,
    *,
    formats: Sequence[str] | None = None,
    max_pixels: int | None = None,
) -> tuple[Any, list[str]]:
    """Decode the first frame of an image file, upright and in color.

    Args:
        content: the file's bytes.
        where: what errors call the image.
        formats: the file formats that are accepted, by Pillow's names; all by default.
        max_pixels: the largest number of pixels that is decoded; None for Pillow's own limit, which
            always applies.

    Returns:
        Pillow's image in mode RGB; and what was changed, a list of keys of `CHANGES`.

    Raises:
        Unreadable: if the file is truncated, damaged or no image.
        TooLarge: if the file's header claims too many pixels.
    """
    image, changes = _open_first_frame(content, where, formats, max_pixels)
    # Read before the conversions below, since `_scale_to_bytes` returns an image without metadata.
    orientation = _read_or_default(lambda: int(image.getexif().get(ORIENTATION, 1)), default=1)
    if image.mode.startswith("I;16") or image.mode in ("I", "F"):
        image = _scale_to_bytes(image, where)
        changes.append("more bits")
    image = _convert_to_rgb(image, where, changes)
    if orientation in ROTATED_ORIENTATIONS:
        _rotate_upright(image, orientation)
        changes.append("orientation")
    unique_changes = list(dict.fromkeys(changes))
    return image, unique_changes


def open_image(content: bytes, where: str) -> Any:
    """Open an image without converting its mode, and read all pixels of its first frame.

    Args:
        content: the file's bytes.
        where: what errors call the image.

    Returns:
        Pillow's image.
    """
    image, _ = _open_first_frame(content, where, formats=None, max_pixels=None)
    return image


def describe_changes(counts: Mapping[str, int]) -> list[str]:
    """Write one sentence for each kind of change, with the number of images it was made in.

    Args:
        counts: a dict from keys of `CHANGES` to numbers of images.
    """
    sentences = []
    for change, template in CHANGES.items():
        count = counts.get(change, 0)
        if count == 1:
            sentences.append(
                template.format(
                    n=1,
                    images="image",
                    were="was",
                    have="has",
                )
            )
        elif count:
            sentences.append(
                template.format(
                    n=count,
                    images="images",
                    were="were",
                    have="have",
                )
            )
    return sentences


def _open_first_frame(
    content: bytes,
    where: str,
    formats: Sequence[str] | None,
    max_pixels: int | None,
) -> tuple[Any, list[str]]:
    """Open an image and read its pixels, and note what Pillow changes or leaves out.

    Args:
        content: the file's bytes.
        where: what errors call the image.
        formats: the file formats that are accepted, by Pillow's names; None for all.
        max_pixels: the largest number of pixels that is decoded; None for Pillow's own limit.

    Returns:
        Pillow's image of the first frame in its own mode; and a list of keys of `CHANGES`: "frames"
        if the file has more frames, "more bits" if Pillow reduced its colors to 8 bits.
    """
    library = pillow()

    def explain(error: Exception) -> Unreadable:
        """Turn an exception of Pillow into the error that names the image."""
        if isinstance(error, library.DecompressionBombError):
            # The message is: Image size (CLAIMED pixels) exceeds limit of LIMIT pixels, …
            claimed, limit = re.findall(r"\d+", str(error))[:2]
            return _too_large_error(where, int(claimed), int(limit))
        return Unreadable(where, "truncated or not an image", error)

    # Running out of memory is not a defect of the file, so a MemoryError is not explained as one.
    with warnings.catch_warnings(), explain_failure(explain, let_through=(MemoryError,)):
        # Pillow warns about images just below its size limit, and about damaged metadata.
        warnings.simplefilter("ignore")
        image = library.open(BytesIO(content), formats=formats)
        changes = []
        if _has_frames(image):
            changes.append("frames")
        # Pillow reduces 16-bit color to 8 bits; only its decoder's raw mode, tile[3], tells.
        if any(";16" in str(tile[3]) for tile in getattr(image, "tile", ())):
            changes.append("more bits")
        _require_plausible_size(image, where, len(content), max_pixels)
        image.load()
        if image.format == "PNG":
            require_complete_png(content, image)
    return image, changes


def _require_plausible_size(image: Any, where: str, length: int, max_pixels: int | None) -> None:
    """Raise if a header claims more pixels than the limit, or than its file can hold.

    Args:
        image: a Pillow image of which only the header was read.
        where: what errors call the image.
        length: the length of the file in bytes.
        max_pixels: the limit, a number of pixels; None for no limit.

    Raises:
        TooLarge: if the header claims more than `max_pixels`.
        Unreadable: if the header claims more than a file of this length is believed to hold.
    """
    claimed = image.width * image.height
    if max_pixels is not None and claimed > max_pixels:
        raise _too_large_error(where, claimed, max_pixels)
    believed = max(MIN_BELIEVED_PIXELS, BELIEVED_PIXELS_PER_BYTE * length)
    if claimed > believed:
        raise Unreadable(
            where,
            f"too large for its file size: its header claims {claimed:,} pixels in "
            f"{length:,} bytes; the limit is {believed:,}",
        )


def _too_large_error(where: str, claimed: int, limit: int) -> TooLarge:
    """Create the error that a header claims more pixels than the limit.

    Args:
        where: what the error calls the image.
        claimed: the number of pixels in the header.
        limit: the largest number of pixels that is decoded.
    """
    return TooLarge(
        where, f"too large: its header claims {claimed:,} pixels; the limit is {limit:,}"
    )


def _read_or_default(read: Callable[[], T], default: T) -> T:
    """Read a value of a file's metadata, or return a default if the metadata is damaged.

    Damaged metadata is no error, since the pixels may be intact.

    Args:
        read: a function that returns the value; any exception it raises counts as damage.
        default: the value to return for damaged metadata.
    """
    try:
        return read()
    except Exception:  # noqa: BLE001 (damaged bytes lead to any exception in Pillow)
        return default


def _has_frames(image: Any) -> bool:
    """Whether a Pillow image has a second frame; the image's current frame stays selected.

    The frames are not counted with `n_frames`, since that would visit all of them.
    """
    current = image.tell()
    is_animated = _read_or_default(
        lambda: bool(getattr(image, "is_animated", False)), default=False
    )
    # Pillow may have moved to another frame, possibly of another size: go back.
    if image.tell() != current:
        image.seek(current)
    return is_animated


def _rotate_upright(image: Any, orientation: int) -> None:
    """Rotate and mirror an image in place, as its EXIF orientation asks for.

    Args:
        image: a Pillow image; its metadata is removed.
        orientation: the value of the EXIF orientation, one of `ROTATED_ORIENTATIONS`.
    """
    # `exif_transpose` reads the orientation from the metadata, and writes all other metadata again,
    # which fails if it is damaged. So remove all metadata, and put back the orientation alone.
    image.info.clear()
    image.getexif()[ORIENTATION] = orientation
    import_extra("PIL.ImageOps", "pillow", "images").exif_transpose(image, in_place=True)


def _scale_to_bytes(image: Any, where: str) -> Any:
    """Scale a gray image of more than 8 bits to 8 bits.

    Integers are divided by 257, so that 65535, white in 16 bits, becomes 255; floats from 0 to 1
    are multiplied by 255.

    Args:
        image: a Pillow image of one channel.
        where: what errors call the image.

    Returns:
        A Pillow image in mode L, without metadata.

    Raises:
        Unreadable: if a value is outside the range of black to white.
    """
    values = np.asarray(image)
    low, high = float(values.min()), float(values.max())
    white = 1.0 if image.mode == "F" else 65535.0  # mode F holds floats
    if not (low >= 0 and high <= white):
        raise Unreadable(
            where,
            f"a 32-bit image with values from {low:g} to {high:g}; only 0 to {white:g} can be "
            "scaled to 8 bits",
        )
    scaled = np.empty(values.size, np.uint8)
    flat = values.reshape(-1)
    # Block by block, so that the copies in float64 stay small.
    for start in range(0, values.size, SCALE_BLOCK):
        block = slice(start, start + SCALE_BLOCK)
        scaled[block] = np.rint(flat[block].astype(np.float64) * (255 / white))
    return pillow().fromarray(scaled.reshape(values.shape))


def _convert_to_rgb(image: Any, where: str, changes: list[str]) -> Any:
    """Convert an image to mode RGB, and append what was changed to a list.

    Args:
        image: a Pillow image of at most 8 bits a channel.
        where: what errors call the image.
        changes: a list of keys of `CHANGES`; keys for this conversion are appended to it.

    Returns:
        A Pillow image in mode RGB.
    """
    mode = image.mode
    if mode in ("P", "PA"):
        changes.append("palette")
        # Via RGBA, since a palette may have transparent colors, about which Pillow warns when it
        # converts straight to RGB.
        image = image.convert("RGBA")
    elif mode in ("1", "L", "LA", "La"):
        changes.append("grayscale")
    elif mode == "CMYK":
        changes.append("CMYK")
    elif not mode.startswith("RGB"):
        changes.append("colors")
    # "a" marks colors that were multiplied by their opacity; Pillow converts these modes only to
    # LA and RGBA, with plain colors.
    if mode in ("La", "RGBa"):
        image = image.convert(f"{mode[:-1]}A")
    if image.mode in ("LA", "RGBA") and image.getchannel("A").getextrema()[0] < 255:
        changes.append("transparency")
    # The entry declares one color transparent, about which Pillow would warn in the conversion;
    # without the entry, such pixels keep that color.
    image.info.pop("transparency", None)
    if image.mode == "RGB":
        return image
    try:
        return image.convert("RGB")
    except ValueError:
        raise Unreadable(where, f"an image that cannot be converted to RGB (mode {mode})") from None
