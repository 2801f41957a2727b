"""Scenes for segmentation, drawn from images that come with scikit-learn and Pillow.

A scene has several digits, and perhaps one unknown object. A network learns the background and the
digits 0 to 7. Unknown objects, which it has never seen, are pasted into test scenes: the digits 8
and 9, letters, or patches of photographs. All objects are first shrunk to 8x8 pixels, the size of
scikit-learn's digits, and then enlarged, so that their sharpness does not give them away.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from qualms.data.bundled import read_digits, read_letters, read_photos
from qualms.data.normalization import Normalization
from qualms.errors import QualmsError
from qualms.random import generator

SIZE = 48  # pixels a side
CLASSES = ("background", *"01234567")
# Labels of pixels that belong to no class.
UNKNOWN, IGNORED = 254, 255
# The kinds of unknown objects.
KINDS = ("digits", "letters", "photos")
# Letters that look like 6, 0, 1, 5 or 2.
LIKE_DIGITS = "bDIilOoSsZz"
NORMALIZATION = Normalization((0.3,), (0.3,))
# Pixels a side of an object before it is enlarged.
OBJECT_SIDE = 8
# The smallest and the largest side of an enlarged object, in pixels.
PASTED_SIDES = (12, 20)
# The smallest and the largest number of known objects in a scene; fewer if there is no room.
KNOWN_COUNTS = (2, 4)
# Random squares that are tried for each object.
MAX_TRIES = 20
# Pixels of at least this opacity are labeled as the object.
INK_ALPHA = 0.45
# Pixels of at most this opacity are labeled as background.
PAPER_ALPHA = 0.15


@dataclass(frozen=True, eq=False)
class Scenes:
    """Gray images, and the class of each pixel.

    Args:
        pixels: bytes [n, 1, height, width].
        labels: integers [n, height, width]: 0 to 8, indices into `CLASSES`; `UNKNOWN`; or `IGNORED`
            at the edge of ink.
    """

    pixels: UInt8[Tensor, "n 1 h w"]
    labels: Int64[Tensor, "n h w"]

    def __len__(self) -> int:
        """Return the number of scenes."""
        return len(self.pixels)


@dataclass(frozen=True, eq=False)
class _Objects:
    """Objects that can be pasted into scenes.

    Args:
        shapes: the pixels of each object, from 0 to 1, [n, 8, 8].
        labels: for each object, the label of all its pixels, [n].
        is_ink: whether `shapes` is the opacity of the pixels, as for ink on transparent paper. If
            not, objects are opaque squares, and `shapes` is their brightness.
    """

    shapes: Float[Tensor, "n 8 8"]
    labels: Int64[Tensor, " n"]
    is_ink: bool = True


def scenes(count: int, split: str = "test", unknown: str | None = None, seed: int = 0) -> Scenes:
    """Draw scenes of two to four known digits each, and of one unknown object if requested.

    Scene i does not depend on `count`: fewer scenes are the start of more scenes.

    Args:
        count: the number of scenes.
        split: "train" or "test", the split of the digits, letters and photographs.
        unknown: the kind of unknown object, one of `KINDS`; None for scenes without one.
        seed: the seed of all random draws.
    """
    if count < 1 or split not in ("train", "test") or unknown not in (None, *KINDS):
        raise QualmsError(
            f"cannot make {count} scenes of split {split!r} with unknown objects {unknown!r}; "
            "pass a count of at least 1, the split train or test, and None or one of "
            f"{', '.join(KINDS)}."
        )
    known, _ = _split_digits(split)
    unknown_objects = None
    # Part of the seed, so that scenes with other kinds of objects differ.
    kind_index = 0
    if unknown is not None:
        unknown_objects = _read_unknown_objects(unknown, split)
        kind_index = 1 + KINDS.index(unknown)
    pixels = []
    labels = []
    for i in range(count):
        # A generator of its own for each scene, so that scenes do not depend on one another.
        random = generator(seed, int(split == "test"), kind_index, i)
        canvas = _draw_scene(known, unknown_objects, random)
        pixels.append(canvas.noisy_pixels())
        labels.append(canvas.labels)
    return Scenes(torch.stack(pixels), torch.stack(labels))


def _shrink(pixels: UInt8[Tensor, "n c h w"]) -> Float[Tensor, "n 8 8"]:
    """Convert images to gray from 0 to 1, and shrink them to 8x8 pixels."""
    gray = pixels.float().mean(1, keepdim=True) / 255
    size = (OBJECT_SIDE, OBJECT_SIDE)
    small = F.interpolate(gray, size, mode="bilinear", antialias=True)
    # Drop the axis of channels.
    return small[:, 0]


def _enlarge(shape: Float[Tensor, "8 8"], size: int) -> Float[Tensor, "k k"]:
    """Enlarge the pixels of one object to [size, size], bilinearly."""
    # `interpolate` takes [n, c, h, w].
    large = F.interpolate(shape[None, None], (size, size), mode="bilinear")
    return large[0, 0]


def _crop_margin(letter: UInt8[Tensor, "c h w"]) -> UInt8[Tensor, "c k l"]:
    """Crop a letter to the smallest rectangle around its ink, as digits have no margin either."""
    _, ink_rows, ink_columns = letter.nonzero(as_tuple=True)
    rows = slice(int(ink_rows.min()), int(ink_rows.max()) + 1)
    columns = slice(int(ink_columns.min()), int(ink_columns.max()) + 1)
    return letter[:, rows, columns]


def _split_digits(split: str) -> tuple[_Objects, _Objects]:
    """Return the digits 0 to 7, which networks learn, and the digits 8 and 9, labeled unknown."""
    digits = read_digits(Path(), split)
    # Digits always have labels.
    assert digits.labels is not None
    shapes = _shrink(digits.pixels)
    # Class 0 is the background, so digit i is class i + 1.
    labels = digits.labels + 1
    is_known = labels < len(CLASSES)
    known = _Objects(shapes[is_known], labels[is_known])
    return known, _label_unknown(shapes[~is_known])


def _label_unknown(shapes: Float[Tensor, "n 8 8"], is_ink: bool = True) -> _Objects:
    """Create objects that are all labeled `UNKNOWN`.

    Args:
        shapes: the pixels of each object.
        is_ink: whether these are opacities; see `_Objects`.
    """
    labels = torch.full((len(shapes),), UNKNOWN)
    return _Objects(shapes, labels, is_ink)


def _read_unknown_objects(kind: str, split: str) -> _Objects:
    """Read the objects of one of `KINDS`, all labeled `UNKNOWN`.

    Args:
        kind: "digits" for the digits 8 and 9, "letters" for the letters that do not look like
            digits, "photos" for patches of photographs.
        split: "train" or "test".
    """
    if kind == "photos":
        photos = read_photos(Path(), split)
        # A photograph covers the background: its pixels are brightness, not opacity.
        return _label_unknown(_shrink(photos.pixels), is_ink=False)
    if kind == "digits":
        _, unknown = _split_digits(split)
        return unknown
    letters = read_letters(Path(), split)
    # Letters always have labels.
    assert letters.labels is not None
    shapes = []
    for pixels, label in zip(letters.pixels, letters.labels.tolist(), strict=True):
        if letters.classes[label] not in LIKE_DIGITS:
            letter = _crop_margin(pixels)
            # `[None]` makes a batch of one image.
            shapes.append(_shrink(letter[None]))
    ink = torch.cat(shapes)
    # Thin lines fade when they are shrunk: scale each letter to full opacity, as digits have.
    strongest = ink.amax((1, 2), keepdim=True)
    return _label_unknown(ink / strongest)


def _draw_scene(known: _Objects, unknown: _Objects | None, random: torch.Generator) -> "_Canvas":
    """Draw one scene of known objects, and perhaps one unknown object.

    Args:
        known: the digits that a network learns.
        unknown: unknown objects, one of which is pasted; None for a scene without one.
        random: the generator of all random choices.
    """
    canvas = _Canvas(random)
    if unknown is not None:
        # First of all, so that there is room for it.
        canvas.paste(unknown, canvas.draw_integer(len(unknown.shapes)))
    low, high = KNOWN_COUNTS
    n_known = low + canvas.draw_integer(high - low + 1)
    for _ in range(n_known):
        canvas.paste(known, canvas.draw_integer(len(known.shapes)))
    return canvas


class _Canvas:
    """A background of slowly changing brightness, on which objects are pasted side by side.

    Args:
        random: the generator of all random choices.

    Attributes:
        image: the brightness of each pixel, about 0 to 1.
        labels: the label of each pixel, 0 for the background.
        is_taken: whether a pixel is in the square of a pasted object.
    """

    def __init__(self, random: torch.Generator) -> None:
        self.random = random
        # The background is dark: up to 0.4 at each corner, interpolated in between.
        corners = 0.4 * torch.rand(1, 1, 2, 2, generator=random)
        size = (SIZE, SIZE)
        image = F.interpolate(corners, size, mode="bilinear", align_corners=True)
        # `interpolate` returns [n, c, h, w].
        self.image = image[0, 0]
        self.labels = torch.zeros(SIZE, SIZE, dtype=torch.long)
        self.is_taken = torch.zeros(SIZE, SIZE, dtype=torch.bool)

    def draw_integer(self, end: int) -> int:
        """Draw an integer from 0 to `end - 1`."""
        return int(torch.randint(end, (), generator=self.random))

    def paste(self, objects: _Objects, i: int) -> None:
        """Paste object i in a random size at a random free place, and label its pixels.

        If no free place is found, nothing is pasted.
        """
        shape = objects.shapes[i]
        low, high = PASTED_SIDES
        size = low + self.draw_integer(high - low + 1)
        brightness = 0.75 + 0.25 * torch.rand((), generator=self.random)
        square = self._find_free_square(size)
        if square is None:
            return
        if objects.is_ink:
            alpha = _enlarge(shape, size)  # opacity
            color = brightness
        else:
            # Opaque everywhere.
            alpha = _enlarge(torch.ones_like(shape), size)
            color = _enlarge(shape, size)
        self.image[square] = (1 - alpha) * self.image[square] + alpha * color
        # Pixels that are neither clearly ink nor clearly paper are ignored.
        background_or_ignored = torch.where(alpha > PAPER_ALPHA, IGNORED, 0)
        label = int(objects.labels[i])
        self.labels[square] = torch.where(alpha >= INK_ALPHA, label, background_or_ignored)
        self.is_taken[square] = True

    def _find_free_square(self, size: int) -> tuple[slice, slice] | None:
        """Draw random squares until one overlaps no pasted object.

        Args:
            size: the side of the square in pixels.

        Returns:
            The rows and the columns of the square; None if `MAX_TRIES` squares were taken.
        """
        for _ in range(MAX_TRIES):
            top = self.draw_integer(SIZE - size + 1)
            left = self.draw_integer(SIZE - size + 1)
            square = slice(top, top + size), slice(left, left + size)
            if not self.is_taken[square].any():
                return square
        return None

    def noisy_pixels(self) -> UInt8[Tensor, "1 h w"]:
        """Add noise to the image, and convert it to bytes; each call draws new noise."""
        noise = torch.randn(SIZE, SIZE, generator=self.random)
        noisy = 255 * (self.image + 0.04 * noise)
        # `[None]` adds the axis of channels.
        return noisy.round().clamp(0, 255).to(torch.uint8)[None]
