"""Scenes for segmentation, made from what comes with scikit-learn and Pillow: several digits, and
things unknown.

A network learns background and the digits 0 to 7. What it has never seen is pasted into test
scenes: the digits 8 and 9, letters, or patches of photographs. All objects are shrunk to the 8x8
pixels that the digits have and enlarged alike, so that nothing is told by its sharpness.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from qualms.data.digits import read_digits
from qualms.data.letters import read_letters
from qualms.data.normalization import Normalization
from qualms.data.photos import read_photos
from qualms.errors import QualmsError
from qualms.random import generator

SIZE = 48
CLASSES = ("background", *"01234567")
UNKNOWN, IGNORED = 254, 255  # labels of pixels that are of no class
KINDS = ("digits", "letters", "photos")  # of unknown objects
LIKE_DIGITS = "bDIilOoSsZz"  # letters that one may well call 6, 0, 1, 5 or 2
NORMALIZATION = Normalization((0.3,), (0.3,))
OBJECT = 8  # pixels of an object before it is enlarged
LEAST, MOST = 12, 20  # and after
OBJECTS = (2, 4)  # known ones in a scene, if there is room
TRIES = 20  # places that are tried for each
INK, PAPER = (
    0.45,
    0.15,
)  # how opaque the pixels of an object are at least, and those of the background at most


@dataclass(frozen=True, eq=False)
class Scenes:
    """Gray images, and the class of each pixel: 0 to 8 of `CLASSES`, `UNKNOWN`, or `IGNORED` at the
    edge of ink.
    """

    pixels: UInt8[Tensor, "n 1 h w"]
    labels: Int64[Tensor, "n h w"]

    def __len__(self) -> int:
        return len(self.pixels)


def scenes(count: int, split: str = "test", unknown: str | None = None, seed: int = 0) -> Scenes:
    """Scenes of two to four known digits each, and of one unknown object if `unknown` names a kind
    of `KINDS`.

    Scene i follows from its number and the arguments alone, not from how many are made. Digits,
    letters and photographs are those of the split.
    """
    if count < 1 or split not in ("train", "test") or unknown not in (None, *KINDS):
        raise QualmsError(
            f"{count} scenes of split {split!r} with unknown objects {unknown!r} cannot be made; ask for at least one, "
            f"for train or test, and for None or one of {', '.join(KINDS)}."
        )
    digits = read_digits(Path(), split)
    assert digits.labels is not None
    known = digits.take((digits.labels < len(CLASSES) - 1).nonzero().flatten())
    assert known.labels is not None
    ink, others = _small(known.pixels), None if unknown is None else _objects(unknown, split)
    purpose = (split == "test", 0 if unknown is None else 1 + KINDS.index(unknown))
    made = [
        _scene(ink, known.labels, others, generator(seed, *map(int, purpose), i))
        for i in range(count)
    ]
    return Scenes(
        torch.stack([image for image, _ in made]), torch.stack([labels for _, labels in made])
    )


def _small(pixels: UInt8[Tensor, "n c h w"]) -> Float[Tensor, "n 8 8"]:
    """Of 0 to 1, in gray."""
    gray = pixels.float().mean(1, keepdim=True) / 255
    return F.interpolate(gray, (OBJECT, OBJECT), mode="bilinear", antialias=True)[:, 0]


def _cropped(letter: UInt8[Tensor, "c h w"]) -> UInt8[Tensor, "c k l"]:
    """Without its margin: the digits have none."""
    _, rows, columns = letter.nonzero(as_tuple=True)
    return letter[
        :, int(rows.min()) : int(rows.max()) + 1, int(columns.min()) : int(columns.max()) + 1
    ]


def _objects(kind: str, split: str) -> tuple[Float[Tensor, "n 8 8"], bool]:
    """Unknown objects, and whether they are ink on nothing; else they cover all that is under them."""
    if kind == "photos":
        return _small(read_photos(Path(), split).pixels), False
    if kind == "letters":
        letters = read_letters(Path(), split)
        assert letters.labels is not None
        kept = [
            i
            for i, label in enumerate(letters.labels.tolist())
            if letters.classes[label] not in LIKE_DIGITS
        ]
        ink = torch.cat([_small(_cropped(letters.pixels[i])[None]) for i in kept])
        return ink / ink.amax(
            (1, 2), keepdim=True
        ), True  # thin lines, as dark as those of the digits
    digits = read_digits(Path(), split)
    assert digits.labels is not None
    return _small(digits.pixels[digits.labels >= len(CLASSES) - 1]), True


def _scene(
    ink: Float[Tensor, "n 8 8"],
    digits: Int64[Tensor, " n"],
    others: tuple[Float[Tensor, "m 8 8"], bool] | None,
    source: torch.Generator,
) -> tuple[UInt8[Tensor, "1 h w"], Int64[Tensor, "h w"]]:
    """The unknown object takes its place first, so that there is room for it."""
    scene = _Canvas(source)
    if others is not None:
        shapes, is_ink = others
        shape = shapes[scene.whole(len(shapes))]
        scene.paste(shape if is_ink else torch.ones_like(shape), UNKNOWN, None if is_ink else shape)
    for _ in range(OBJECTS[0] + scene.whole(OBJECTS[1] - OBJECTS[0] + 1)):
        i = scene.whole(len(ink))
        scene.paste(ink[i], int(digits[i]) + 1)
    return scene.pixels(), scene.labels


class _Canvas:
    """A background of slowly changing brightness, on which objects find free places."""

    def __init__(self, source: torch.Generator) -> None:
        self.source = source
        corners = 0.4 * torch.rand(1, 1, 2, 2, generator=source)
        self.image = F.interpolate(corners, (SIZE, SIZE), mode="bilinear", align_corners=True)[0, 0]
        self.labels = torch.zeros(SIZE, SIZE, dtype=torch.long)
        self.taken = torch.zeros(SIZE, SIZE, dtype=torch.bool)

    def whole(self, end: int) -> int:
        """A random number from 0 to below `end`."""
        return int(torch.randint(end, (), generator=self.source))

    def paste(
        self, opaque: Float[Tensor, "8 8"], label: int, picture: Float[Tensor, "8 8"] | None = None
    ) -> None:
        """An object in a random size, at a place where there is none yet; left out if none is
        found.
        """
        size = LEAST + self.whole(MOST - LEAST + 1)
        brightness = 0.75 + 0.25 * torch.rand((), generator=self.source)
        for _ in range(TRIES):
            top, left = self.whole(SIZE - size + 1), self.whole(SIZE - size + 1)
            place = slice(top, top + size), slice(left, left + size)
            if not self.taken[place].any():
                break
        else:
            return
        alpha = _enlarged(opaque, size)
        color = brightness if picture is None else _enlarged(picture, size)
        self.image[place] = (1 - alpha) * self.image[place] + alpha * color
        self.labels[place] = torch.where(
            alpha >= INK, label, torch.where(alpha > PAPER, IGNORED, 0)
        )
        self.taken[place] = True

    def pixels(self) -> UInt8[Tensor, "1 h w"]:
        """With noise."""
        noisy = self.image + 0.04 * torch.randn(SIZE, SIZE, generator=self.source)
        return (255 * noisy).round().clamp(0, 255).to(torch.uint8)[None]


def _enlarged(shape: Float[Tensor, "8 8"], size: int) -> Float[Tensor, "k k"]:
    return F.interpolate(shape[None, None], (size, size), mode="bilinear")[0, 0]
