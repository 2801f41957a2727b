"""Patches of scikit-learn's two sample photographs: natural images without a file."""

from pathlib import Path

import numpy as np

from qualms.data.images import Images, build_images
from qualms.data.places import import_extra

SIZE = 32
NAMES = ("china", "flower")


def read_photos(root: Path, split: str) -> Images:
    """Every patch of 32x32 pixels on a chessboard: its dark fields for training, its light ones for
    testing.
    """
    load = import_extra("sklearn.datasets", "scikit-learn", "its photographs").load_sample_image
    pixels, labels = [], []
    for label, name in enumerate(NAMES):
        photo = np.asarray(load(f"{name}.jpg"))
        rows, columns = photo.shape[0] // SIZE, photo.shape[1] // SIZE
        for i in range(rows):
            for j in range(columns):
                if (i + j) % 2 == (split == "test"):
                    patch = photo[i * SIZE : (i + 1) * SIZE, j * SIZE : (j + 1) * SIZE]
                    pixels.append(patch.transpose(2, 0, 1))
                    labels.append(label)
    return build_images("photos", "scikit-learn", np.stack(pixels), np.array(labels), NAMES)
