"""Omniglot: characters of fifty alphabets, one small image file for each drawing."""

from pathlib import Path

import numpy as np

from qualms.data.decode import open_image, pillow
from qualms.data.images import Images, build_images
from qualms.data.places import find_first, read_file_bytes
from qualms.errors import QualmsError

SIZE = 28  # MNIST's, whose networks meet these images
FOLDER = {"train": "images_background", "test": "images_evaluation"}


def read_omniglot(root: Path, split: str) -> Images:
    """Bright ink on black as in MNIST, 28x28; the files have it dark on white, 28x28 or the
    original 105x105.
    """
    folder = FOLDER[split]
    path = find_first((root / outer / folder for outer in ("omniglot-py", "omniglot", ".")), folder)
    characters = sorted(c for c in path.glob("*/*") if c.is_dir() and not c.name.startswith("."))
    files = [sorted(f for f in c.glob("*.png") if not f.name.startswith(".")) for c in characters]
    if not any(files):
        raise QualmsError(f"{path} holds no ALPHABET/characterNN/*.png; unpack {folder}.zip there.")
    pixels = np.stack([_drawing(file) for drawings in files for file in drawings])[:, None]
    labels = [label for label, drawings in enumerate(files) for _ in drawings]
    return build_images(
        "omniglot", path, pixels, labels, tuple(f"{c.parent.name}/{c.name}" for c in characters)
    )


def _drawing(file: Path) -> np.ndarray:
    """One drawing in gray, bright ink on black, resized to 28x28."""
    image = open_image(read_file_bytes(file), str(file)).convert("L")
    if image.size != (SIZE, SIZE):
        image = image.resize((SIZE, SIZE), pillow().Resampling.LANCZOS)
    return 255 - np.array(image)
