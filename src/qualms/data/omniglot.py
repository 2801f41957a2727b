"""Omniglot: characters of fifty alphabets.

Each drawing is a file ALPHABET/characterNN/*.png, dark ink on white, 28x28 or the original 105x105.
"""

from pathlib import Path

import numpy as np

from qualms.data.decode import open_image, pillow
from qualms.data.images import Images, build_images
from qualms.data.places import find_first, read_file_bytes
from qualms.errors import QualmsError

# The size of MNIST's images, since networks for MNIST score these images.
SIZE = 28
SPLIT_FOLDERS = {"train": "images_background", "test": "images_evaluation"}


def read_omniglot(root: Path, split: str) -> Images:
    """Read Omniglot, drawings of characters, as bright ink on black like MNIST's digits.

    Args:
        root: the folder of datasets; the drawings are in it, in `omniglot` or in `omniglot-py`.
        split: "train" for the background set, "test" for the evaluation set.

    Returns:
        Gray images [n, 1, 28, 28]; each character is a class.
    """
    folder = SPLIT_FOLDERS[split]
    candidates = [root / outer / folder for outer in ("omniglot-py", "omniglot", ".")]
    path = find_first(candidates, folder)
    pixels: list[np.ndarray] = []
    labels: list[int] = []
    classes: list[str] = []
    for character_folder in sorted(path.glob("*/*")):
        # Hidden files and folders are those of the operating system.
        if not character_folder.is_dir() or character_folder.name.startswith("."):
            continue
        for file in sorted(character_folder.glob("*.png")):
            if file.name.startswith("."):
                continue
            pixels.append(_read_drawing(file)[None])  # [1, 28, 28]
            labels.append(len(classes))
        classes.append(f"{character_folder.parent.name}/{character_folder.name}")
    if not pixels:
        raise QualmsError(
            f"{path} contains no ALPHABET/characterNN/*.png; unpack {folder}.zip there."
        )
    return build_images("omniglot", path, np.stack(pixels), labels, tuple(classes))


def _read_drawing(file: Path) -> np.ndarray:
    """Read one drawing as bytes [28, 28], bright ink on black; other sizes are resized."""
    image = open_image(read_file_bytes(file), str(file)).convert("L")
    if image.size != (SIZE, SIZE):
        image = image.resize((SIZE, SIZE), pillow().Resampling.LANCZOS)
    # The files have dark ink on white.
    return 255 - np.array(image)
