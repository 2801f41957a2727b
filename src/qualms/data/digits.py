"""Scikit-learn's handwritten digits, 8x8: they come with the package, so they need no file."""

from pathlib import Path

import numpy as np

from qualms.data.images import Images, build_images
from qualms.data.places import import_extra

DIGITS = tuple("0123456789")


def read_digits(root: Path, split: str) -> Images:
    """The first 80 % are for training, the rest for testing. Brightness, 0 to 16 in the package,
    becomes bytes.
    """
    found = import_extra("sklearn.datasets", "scikit-learn", "its digits").load_digits()
    edge = len(found.images) * 4 // 5
    part = slice(edge) if split == "train" else slice(edge, None)
    pixels = np.rint(found.images[part, None] * (255 / 16))
    return build_images("digits", "scikit-learn", pixels, found.target[part], DIGITS)
