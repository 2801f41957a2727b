"""Files of single images to arrays."""

from collections.abc import Iterable
from io import BytesIO
from typing import Any

import numpy as np
from jaxtyping import UInt8

from qualms.data.places import extra
from qualms.errors import QualmsError


def decoded(content: bytes, where: str, size: int | None) -> UInt8[np.ndarray, "h w 3"]:
    """One image in colour, resized to size x size if that is given. Grey becomes colour, transparency is left out."""
    image = opened(content, where)
    if image.mode[0] in "IF":
        raise QualmsError(f"{where} has more than 8 bits a channel ({image.mode}); convert it to 8 bits.")
    if image.mode == "P":
        image = image.convert("RGBA")  # a palette may hold transparency, which RGB alone warns about
    image = image.convert("RGB")
    if size is not None and image.size != (size, size):
        image = image.resize((size, size), pillow().Resampling.BILINEAR)
    return np.array(image)


def opened(content: bytes, where: str) -> Any:
    """One image as Pillow has it, with all its pixels read."""
    library = pillow()
    try:
        image = library.open(BytesIO(content))
        image.load()
    except Exception as error:  # Pillow raises whatever comes up, also for images too large to be true
        raise QualmsError(f"{where} is cut or not an image ({type(error).__name__}); replace or remove it.") from None
    return image


def pillow() -> Any:
    """Pillow's Image module, or an error that says how to install it."""
    return extra("PIL.Image", "pillow", "images")


def stacked(images: Iterable[tuple[str, np.ndarray]], where: object) -> UInt8[np.ndarray, "n 3 h w"]:
    """Images with their names, which all have one size, as one array."""
    found: list[np.ndarray] = []
    first = ""
    for name, image in images:
        if found and image.shape != found[0].shape:
            (h, w), (h2, w2) = found[0].shape[:2], image.shape[:2]
            raise QualmsError(
                f"the images in {where} differ in size: {first} is {w} x {h} and {name} is {w2} x {h2}; "
                "pass size= to resize them while reading."
            )
        first = first or name
        found.append(image)
    if not found:
        raise QualmsError(f"{where} holds no images; check that it is the one you meant.")
    return np.stack(found).transpose(0, 3, 1, 2)
