"""Datasets that come with scikit-learn and Pillow, so that they need no file."""

from pathlib import Path
from string import ascii_letters

import numpy as np

from qualms.data.class_names import DIGITS
from qualms.data.images import Images, build_images
from qualms.data.places import import_extra

LETTER_SIZE = 28  # pixels a side
# Heights of the font in pixels: the two splits share none.
LETTER_HEIGHTS = {"train": (25, 28, 31, 34), "test": (26, 29, 32, 35)}

PATCH = 32  # pixels a side
PHOTOS = ("china", "flower")


def read_digits(root: Path, split: str) -> Images:
    """Read scikit-learn's handwritten digits.

    Brightness, 0 to 16 in the package, becomes bytes.

    Args:
        root: not used; the images come with the package.
        split: "train" for the first 80 % of the images, "test" for the rest.

    Returns:
        Gray images [n, 1, 8, 8] with ten classes.
    """
    package = import_extra("sklearn.datasets", "scikit-learn", "its digits")
    dataset = package.load_digits()
    edge = len(dataset.images) * 4 // 5
    part = slice(edge, None)
    if split == "train":
        part = slice(edge)
    pixels = np.rint(dataset.images[part, None] * (255 / 16))
    return build_images("digits", "scikit-learn", pixels, dataset.target[part], DIGITS)


def read_letters(root: Path, split: str) -> Images:
    """Draw a to z and A to Z in Pillow's font: writing that no network for digits was trained on.

    Args:
        root: not used; the font comes with the package.
        split: decides the heights of the letters, four for each split.

    Returns:
        Gray images [n, 1, 28, 28] with 52 classes, bright on dark, each letter in the middle.
    """
    images = import_extra("PIL.Image", "pillow", "letters")
    draw = import_extra("PIL.ImageDraw", "pillow", "letters")
    fonts = import_extra("PIL.ImageFont", "pillow", "letters")
    middle = (LETTER_SIZE / 2, LETTER_SIZE / 2)
    pixels = []
    labels = []
    for height in LETTER_HEIGHTS[split]:
        font = fonts.load_default(height)
        for label, letter in enumerate(ascii_letters):
            canvas = images.new("L", (LETTER_SIZE, LETTER_SIZE))
            draw.Draw(canvas).text(middle, letter, 255, font, anchor="mm")
            pixels.append(np.asarray(canvas)[None])
            labels.append(label)
    classes = tuple(ascii_letters)
    return build_images("letters", "Pillow's font", np.stack(pixels), np.array(labels), classes)


def read_photos(root: Path, split: str) -> Images:
    """Cut scikit-learn's two sample photographs into patches: natural images.

    The patches are the fields of a chessboard.

    Args:
        root: not used; the photographs come with the package.
        split: "train" for the dark fields of the chessboard, "test" for the light ones.

    Returns:
        Color images [n, 3, 32, 32] with two classes, the photographs.
    """
    package = import_extra("sklearn.datasets", "scikit-learn", "its photographs")
    pixels = []
    labels = []
    for label, name in enumerate(PHOTOS):
        photo = np.asarray(package.load_sample_image(f"{name}.jpg"))
        rows = photo.shape[0] // PATCH
        columns = photo.shape[1] // PATCH
        for i, j in np.ndindex(rows, columns):
            if (i + j) % 2 != (split == "test"):
                continue
            top, left = i * PATCH, j * PATCH
            patch = photo[top : top + PATCH, left : left + PATCH]
            pixels.append(patch.transpose(2, 0, 1))
            labels.append(label)
    return build_images("photos", "scikit-learn", np.stack(pixels), np.array(labels), PHOTOS)
