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

    Pixel values, which the package stores as 0 to 16, are rescaled to 0 to 255.

    Args:
        root: not used; the images come with the package.
        split: "train" for the first 80 % of the images, "test" for the rest.

    Returns:
        Gray images [n, 1, 8, 8] with ten classes.
    """
    sklearn_datasets = import_extra("sklearn.datasets", "scikit-learn", "its digits")
    dataset = sklearn_datasets.load_digits()
    n_train = len(dataset.images) * 4 // 5
    samples = slice(n_train) if split == "train" else slice(n_train, None)
    # None inserts the channel axis: [n, 1, 8, 8].
    pixels = np.rint(dataset.images[samples, None] * (255 / 16))
    return build_images("digits", "scikit-learn", pixels, dataset.target[samples], DIGITS)


def read_letters(root: Path, split: str) -> Images:
    """Draw the letters a to z and A to Z in Pillow's font, in four heights for each split.

    No network for digits was trained on letters, so they serve as unknown images.

    Args:
        root: not used; the font comes with Pillow.
        split: "train" or "test"; selects the heights in `LETTER_HEIGHTS`.

    Returns:
        Gray images [n, 1, 28, 28] with 52 classes: bright letters, centered on black.
    """
    image_module = import_extra("PIL.Image", "pillow", "letters")
    draw_module = import_extra("PIL.ImageDraw", "pillow", "letters")
    font_module = import_extra("PIL.ImageFont", "pillow", "letters")
    middle = (LETTER_SIZE / 2, LETTER_SIZE / 2)
    pixels = []
    labels = []
    for height in LETTER_HEIGHTS[split]:
        font = font_module.load_default(height)
        for label, letter in enumerate(ascii_letters):
            canvas = image_module.new("L", (LETTER_SIZE, LETTER_SIZE))
            # "mm" anchors the text by its middle, horizontally and vertically.
            draw_module.Draw(canvas).text(middle, letter, fill=255, font=font, anchor="mm")
            pixels.append(np.asarray(canvas)[None])  # [1, 28, 28]
            labels.append(label)
    classes = tuple(ascii_letters)
    return build_images("letters", "Pillow's font", np.stack(pixels), np.array(labels), classes)


def read_photos(root: Path, split: str) -> Images:
    """Cut scikit-learn's two sample photographs into patches, which serve as natural images.

    Each photograph is divided into patches as a chessboard is into squares; the two splits share
    no patch.

    Args:
        root: not used; the photographs come with scikit-learn.
        split: "train" for the dark squares of the chessboard, "test" for the light ones.

    Returns:
        Color images [n, 3, 32, 32] with two classes, one for each photograph.
    """
    sklearn_datasets = import_extra("sklearn.datasets", "scikit-learn", "its photographs")
    pixels = []
    labels = []
    for label, name in enumerate(PHOTOS):
        photo = np.asarray(sklearn_datasets.load_sample_image(f"{name}.jpg"))
        n_rows = photo.shape[0] // PATCH
        n_columns = photo.shape[1] // PATCH
        for row, column in np.ndindex(n_rows, n_columns):
            is_light = (row + column) % 2 == 1
            if is_light != (split == "test"):
                continue
            top, left = row * PATCH, column * PATCH
            patch = photo[top : top + PATCH, left : left + PATCH]
            pixels.append(patch.transpose(2, 0, 1))  # channels first
            labels.append(label)
    return build_images("photos", "scikit-learn", np.stack(pixels), np.array(labels), PHOTOS)
