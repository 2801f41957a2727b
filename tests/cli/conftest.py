"""A folder with a network for digits, and pictures of them."""

from pathlib import Path

import pytest
from PIL import Image

from qualms.data import load


@pytest.fixture
def here(weights_here: Path) -> Path:
    for folder, first in (("pictures", 0), ("known", 6)):
        (weights_here / folder).mkdir()
        for i, image in enumerate(load("digits").pixels[first : first + 6]):
            Image.fromarray(image[0].numpy()).save(weights_here / folder / f"{i:02d}.png")
    return weights_here
