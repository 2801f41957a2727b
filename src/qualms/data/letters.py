"""Letters in the font that comes with Pillow: writing that no network for digits has learnt,
without a file.
"""

from pathlib import Path
from string import ascii_letters

import numpy as np

from qualms.data.images import Images, build_images
from qualms.data.places import import_extra

SIZE = 28
HEIGHTS = {
    "train": (25, 28, 31, 34),
    "test": (26, 29, 32, 35),
}  # of the font, in pixels: other sizes for each split


def read_letters(root: Path, split: str) -> Images:
    """A to z and A to Z, bright on dark, each in four sizes and in the middle of its image."""
    draw = import_extra("PIL.ImageDraw", "pillow", "letters")
    image, font = (
        import_extra("PIL.Image", "pillow", "letters"),
        import_extra("PIL.ImageFont", "pillow", "letters"),
    )
    pixels, labels = [], []
    for height in HEIGHTS[split]:
        shape = font.load_default(height)
        for label, letter in enumerate(ascii_letters):
            canvas = image.new("L", (SIZE, SIZE))
            draw.Draw(canvas).text((SIZE / 2, SIZE / 2), letter, 255, shape, anchor="mm")
            pixels.append(np.asarray(canvas)[None])
            labels.append(label)
    return build_images(
        "letters", "Pillow's font", np.stack(pixels), np.array(labels), tuple(ascii_letters)
    )
