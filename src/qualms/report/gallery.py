"""Which images a page shows, and each as a picture that it can hold."""

import base64
from io import BytesIO

import numpy as np

from qualms.data import Images
from qualms.data.decode import pillow
from qualms.errors import QualmsError
from qualms.report.content import Group

EACH = 8  # images at either end
WORST = 16  # confident mistakes
LARGEST = 96  # pixels; larger images are made smaller for the page


def ends(scores: np.ndarray, each: int = EACH) -> tuple[list[int], list[int]]:
    """The images with the lowest scores and those with the highest, the extreme ones first; none is
    in both.
    """
    order = np.argsort(scores, kind="stable").tolist()
    return order[: min(each, (len(order) + 1) // 2)], order[::-1][: min(each, len(order) // 2)]


def confident_and_wrong(group: Group, most: int = WORST) -> list[int]:
    """The images that the network gets wrong, those first for which it is the most confident."""
    if group.correct is None or group.confidence is None:
        return []
    wrong = np.flatnonzero(~group.correct)
    return wrong[np.argsort(-np.asarray(group.confidence)[wrong], kind="stable")][:most].tolist()


def class_name(number: int, classes: tuple[str, ...]) -> str:
    """The name of a class, or its number where it has none."""
    return classes[number] if 0 <= number < len(classes) else str(number)


def png(images: Images, index: int) -> str:
    """One image as a data address."""
    library = pillow()
    pixels = images.pixels[index].cpu().permute(1, 2, 0).numpy()
    if pixels.shape[2] not in (1, 3):
        raise QualmsError(
            f"{images.name} has {pixels.shape[2]} channels; the report shows images with 1 or 3."
        )
    image = library.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
    image.thumbnail((LARGEST, LARGEST))
    file = BytesIO()
    image.save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
