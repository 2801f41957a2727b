"""The images that a page shows, each as a picture inside the page."""

import base64
from io import BytesIO
from typing import Any

import numpy as np

from qualms.data import Images
from qualms.data.decode import pillow
from qualms.errors import QualmsError
from qualms.report.content import Group

MAX_EXTREMES = 8  # images with the lowest scores, and as many with the highest, that are shown
MAX_MISTAKES = 16  # wrongly predicted images that are shown
MAX_SIDE = 96  # pixels; larger images are shrunk to it


def extreme_images(
    scores: np.ndarray, max_images: int = MAX_EXTREMES
) -> tuple[list[int], list[int]]:
    """Return the images with the lowest and with the highest scores, the extreme ones first.

    No image is in both lists.

    Args:
        scores: The scores of the images, of shape [n].
        max_images: The maximum number of images in each list.

    Returns:
        The indices of the images with the lowest scores, and of those with the highest.
    """
    order = np.argsort(scores, kind="stable").tolist()
    # Each list has at most half of the images, so that no image is in both.
    lowest = order[: min(max_images, (len(order) + 1) // 2)]
    highest = order[::-1][: min(max_images, len(order) // 2)]
    return lowest, highest


def confident_mistakes(group: Group, max_images: int = MAX_MISTAKES) -> list[int]:
    """Return the indices of wrongly predicted images, in descending order of confidence.

    Args:
        group: Images with predictions; without labels or confidences, the list is empty.
        max_images: The maximum number of images in the list.
    """
    if group.correct is None or group.confidence is None:
        return []
    wrong_indices = np.flatnonzero(~group.correct)
    # Negative, since argsort is ascending.
    order = np.argsort(-np.asarray(group.confidence)[wrong_indices], kind="stable")
    return wrong_indices[order][:max_images].tolist()


def class_name(index: int, classes: tuple[str, ...]) -> str:
    """Return the name of the class with an index, or the index as text if it has no name."""
    if 0 <= index < len(classes):
        return classes[index]
    return str(index)


def image_url(images: Images, index: int) -> str:
    """Return an image, shrunk to sides of at most `MAX_SIDE` pixels, as the data URL of a PNG file.

    Args:
        images: Images with 1 or 3 channels.
        index: The index of the image.
    """
    # [c, h, w] to [h, w, c], as Pillow has it.
    pixels = images.pixels[index].cpu().permute(1, 2, 0).numpy()
    channels = pixels.shape[2]
    if channels not in (1, 3):
        raise QualmsError(
            f"{images.name} has {channels} channels; pass images with 1 or 3 to a report."
        )
    # Pillow takes gray images as [h, w].
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
