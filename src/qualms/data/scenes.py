"""Scenes for segmentation, made from what comes with scikit-learn and Pillow.

A scene has several digits, and perhaps one unknown object. A network learns background and the
digits 0 to 7. What it has never seen is pasted into test scenes: the digits 8 and 9, letters, or
patches of photographs. All objects are shrunk to the 8x8 pixels that the digits have and enlarged
alike, so that they cannot be recognized by their sharpness.
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
UNKNOWN, IGNORED = 254, 255  # labels of pixels that are of no class
KINDS = ("digits", "letters", "photos")  # of unknown objects
LIKE_DIGITS = "bDIilOoSsZz"  # letters that look like 6, 0, 1, 5 or 2
NORMALIZATION = Normalization((0.3,), (0.3,))
OBJECT = 8  # pixels a side of an object before it is enlarged
# The least and the most pixels a side of an enlarged object.
SIDES = (12, 20)
# The least and the most known objects in a scene, if there is room.
OBJECTS = (2, 4)
TRIES = 20  # random places that are tried for each object
INK = 0.45  # pixels of at least this opacity are labeled as the object
PAPER = 0.15  # pixels of at most this opacity are labeled as background


@dataclass(frozen=True, eq=False)
class Scenes:
    """Gray images, and the class of each pixel.

    Args:
        pixels: bytes [n, 1, height, width].
        labels: 0 to 8, positions in `CLASSES`, or `UNKNOWN`, or `IGNORED` at the edge of ink,
            [n, height, width].
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
        shapes: the brightness of each object's pixels, from 0 to 1, [n, 8, 8].
        labels: the label of each object's pixels, [n].
        is_ink: whether brightness is opacity, as of ink on transparent paper; else objects are
            opaque squares.
    """

    shapes: Float[Tensor, "n 8 8"]
    labels: Int64[Tensor, " n"]
    is_ink: bool = True


def scenes(count: int, split: str = "test", unknown: str | None = None, seed: int = 0) -> Scenes:
    """Draw scenes of two to four known digits each, and of one unknown object if requested.

    Scene i follows from its number and the arguments alone, not from how many are made.

    Args:
        count: the number of scenes.
        split: "train" or "test", for digits, letters and photographs.
        unknown: a kind of `KINDS`, or None.
        seed: decides the draws.
    """
    if count < 1 or split not in ("train", "test") or unknown not in (None, *KINDS):
        raise QualmsError(
            f"cannot make {count} scenes of split {split!r} with unknown objects {unknown!r}; "
            "pass a count of at least 1, the split train or test, and None or one of "
            f"{', '.join(KINDS)}."
        )
    known, _ = _split_digits(split)
    others = None
    kind = 0
    if unknown is not None:
        others = _unknown_objects(unknown, split)
        kind = 1 + KINDS.index(unknown)
    pixels = []
    labels = []
    for i in range(count):
        draws = generator(seed, int(split == "test"), kind, i)
        scene = _draw_scene(known, others, draws)
        pixels.append(scene.pixels())
        labels.append(scene.labels)
    return Scenes(torch.stack(pixels), torch.stack(labels))


def _shrink(pixels: UInt8[Tensor, "n c h w"]) -> Float[Tensor, "n 8 8"]:
    """Convert images to gray from 0 to 1, and shrink them to the size of the digits."""
    gray = pixels.float().mean(1, keepdim=True) / 255
    size = (OBJECT, OBJECT)
    small = F.interpolate(gray, size, mode="bilinear", antialias=True)
    return small[:, 0]


def _enlarge(shape: Float[Tensor, "8 8"], size: int) -> Float[Tensor, "k k"]:
    """Enlarge an object to a number of pixels a side."""
    large = F.interpolate(shape[None, None], (size, size), mode="bilinear")
    return large[0, 0]


def _crop_margin(letter: UInt8[Tensor, "c h w"]) -> UInt8[Tensor, "c k l"]:
    """Crop a letter to the smallest rectangle around its ink, as the digits have no margin."""
    _, rows, columns = letter.nonzero(as_tuple=True)
    height = slice(int(rows.min()), int(rows.max()) + 1)
    width = slice(int(columns.min()), int(columns.max()) + 1)
    return letter[:, height, width]


def _split_digits(split: str) -> tuple[_Objects, _Objects]:
    """Return the digits 0 to 7, which networks learn, and 8 and 9, labeled as unknown."""
    digits = read_digits(Path(), split)
    assert digits.labels is not None
    shapes = _shrink(digits.pixels)
    is_known = digits.labels < len(CLASSES) - 1
    known = _Objects(shapes[is_known], digits.labels[is_known] + 1)  # class 0 is the background
    return known, _as_unknown(shapes[~is_known])


def _as_unknown(shapes: Float[Tensor, "n 8 8"], is_ink: bool = True) -> _Objects:
    """Label all pixels of some objects as unknown."""
    labels = torch.full((len(shapes),), UNKNOWN)
    return _Objects(shapes, labels, is_ink)


def _unknown_objects(kind: str, split: str) -> _Objects:
    """Read the objects of one of `KINDS`, all labeled as unknown.

    Args:
        kind: "digits" for 8 and 9, "letters" for those unlike digits, "photos" for patches.
        split: "train" or "test".
    """
    if kind == "photos":
        photos = read_photos(Path(), split)
        return _as_unknown(_shrink(photos.pixels), is_ink=False)
    if kind == "digits":
        _, unknown = _split_digits(split)
        return unknown
    letters = read_letters(Path(), split)
    assert letters.labels is not None
    shapes = []
    for pixels, label in zip(letters.pixels, letters.labels.tolist(), strict=True):
        if letters.classes[label] not in LIKE_DIGITS:
            shapes.append(_shrink(_crop_margin(pixels)[None]))
    ink = torch.cat(shapes)
    darkest = ink.amax((1, 2), keepdim=True)
    # Thin lines fade as they shrink; now as strong as digits'.
    return _as_unknown(ink / darkest)


def _draw_scene(known: _Objects, others: _Objects | None, draws: torch.Generator) -> "_Canvas":
    """Draw one scene; the unknown object is pasted first, so that there is room for it.

    Args:
        known: the digits that a network learns.
        others: unknown objects, one of which is pasted; None for a scene without one.
        draws: the random generator for all choices.
    """
    scene = _Canvas(draws)
    if others is not None:
        scene.paste(others, scene.draw(len(others.shapes)))
    low, high = OBJECTS
    for _ in range(low + scene.draw(high - low + 1)):
        scene.paste(known, scene.draw(len(known.shapes)))
    return scene


class _Canvas:
    """A background of slowly changing brightness, on which objects find free places.

    Args:
        draws: the random generator for all choices.

    Attributes:
        image: the brightness of each pixel, about 0 to 1.
        labels: the label of each pixel, 0 for the background.
        taken: whether a pixel is in the square of a pasted object.
    """

    def __init__(self, draws: torch.Generator) -> None:
        self.draws = draws
        corners = 0.4 * torch.rand(1, 1, 2, 2, generator=draws)
        size = (SIZE, SIZE)
        image = F.interpolate(corners, size, mode="bilinear", align_corners=True)
        self.image = image[0, 0]
        self.labels = torch.zeros(SIZE, SIZE, dtype=torch.long)
        self.taken = torch.zeros(SIZE, SIZE, dtype=torch.bool)

    def draw(self, end: int) -> int:
        """Draw a whole number from 0 to `end - 1`."""
        return int(torch.randint(end, (), generator=self.draws))

    def paste(self, objects: _Objects, i: int) -> None:
        """Paste object i in a random size and place; it is left out if no free place is found."""
        shape = objects.shapes[i]
        low, high = SIDES
        size = low + self.draw(high - low + 1)
        brightness = 0.75 + 0.25 * torch.rand((), generator=self.draws)
        place = self._find_place(size)
        if place is None:
            return
        if objects.is_ink:
            alpha = _enlarge(shape, size)
            color = brightness
        else:
            alpha = _enlarge(torch.ones_like(shape), size)
            color = _enlarge(shape, size)
        self.image[place] = (1 - alpha) * self.image[place] + alpha * color
        # Pixels that are neither clearly ink nor clearly paper do not count.
        edge = torch.where(alpha > PAPER, IGNORED, 0)
        self.labels[place] = torch.where(alpha >= INK, int(objects.labels[i]), edge)
        self.taken[place] = True

    def _find_place(self, size: int) -> tuple[slice, slice] | None:
        """Find a random square without an object.

        Args:
            size: the number of pixels a side.

        Returns:
            The rows and the columns of the square; None if none of `TRIES` places is free.
        """
        for _ in range(TRIES):
            top = self.draw(SIZE - size + 1)
            left = self.draw(SIZE - size + 1)
            rows = slice(top, top + size)
            columns = slice(left, left + size)
            place = rows, columns
            if not self.taken[place].any():
                return place
        return None

    def pixels(self) -> UInt8[Tensor, "1 h w"]:
        """Convert the image to bytes, with noise added; each call draws new noise."""
        noise = torch.randn(SIZE, SIZE, generator=self.draws)
        noisy = 255 * (self.image + 0.04 * noise)
        return noisy.round().clamp(0, 255).to(torch.uint8)[None]
