"""The images that a page shows, each as a picture inside the page."""

import base64
from io import BytesIO
from typing import Any

import numpy as np

from qualms.data import Images
from qualms.data.decode import pillow
from qualms.errors import QualmsError
from qualms.report.content import Group

MAX_EXTREMES = 8  # images at either end of the scores
MAX_MISTAKES = 16
MAX_SIDE = 96  # pixels; larger images are made smaller


def extreme_images(scores: np.ndarray, most: int = MAX_EXTREMES) -> tuple[list[int], list[int]]:
    """Return the images with the lowest and with the highest scores, the extreme ones first.

    No image is in both lists.

    Args:
        scores: The scores of the images, of shape [n].
        most: The largest number of images in each list.

    Returns:
        The indices of the images with the lowest scores, and of those with the highest.
    """
    order = np.argsort(scores, kind="stable").tolist()
    lowest = order[: min(most, (len(order) + 1) // 2)]
    highest = order[::-1][: min(most, len(order) // 2)]
    return lowest, highest


def confident_mistakes(group: Group, most: int = MAX_MISTAKES) -> list[int]:
    """Return the indices of wrongly predicted images, in descending order of confidence.

    Args:
        group: Images with predictions; without labels or confidences, the list is empty.
        most: The largest number of images in the list.
    """
    if group.correct is None or group.confidence is None:
        return []
    wrong = np.flatnonzero(~group.correct)
    order = np.argsort(-np.asarray(group.confidence)[wrong], kind="stable")
    return wrong[order][:most].tolist()


def class_name(number: int, classes: tuple[str, ...]) -> str:
    """Return the name of a class, or its number if it has none."""
    if 0 <= number < len(classes):
        return classes[number]
    return str(number)


def image_url(images: Images, index: int) -> str:
    """Return an image as the data URL of a PNG, whose sides have at most `MAX_SIDE` pixels.

    Args:
        images: Images with 1 or 3 channels.
        index: The index of the image.
    """
    pixels = images.pixels[index].cpu().permute(1, 2, 0).numpy()
    channels = pixels.shape[2]
    if channels not in (1, 3):
        raise QualmsError(
            f"{images.name} has {channels} channels; pass images with 1 or 3 to a report."
        )
    if channels == 1:
        pixels = pixels[:, :, 0]
    picture = pillow().fromarray(pixels)
    picture.thumbnail((MAX_SIDE, MAX_SIDE))
    return png_url(picture)


def png_url(picture: Any) -> str:
    """Encode a Pillow image as the data URL of a PNG file."""
    file = BytesIO()
    picture.save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
