"""The least and the most certain images of each group, as pictures that a page can hold."""

import base64
from dataclasses import dataclass
from io import BytesIO

import numpy as np

from qualms.data import Images
from qualms.data.decode import pillow
from qualms.errors import QualmsError
from qualms.report.content import Content, Group

EACH = 8  # images at either end
LARGEST = 96  # pixels; larger images are made smaller for the page


@dataclass(frozen=True)
class Picture:
    """One image: where it is, and what is said of it."""

    group: str
    index: int
    predicted: str
    label: str | None
    right: bool | None
    score: str

    @property
    def alt(self) -> str:
        """What a reader who does not see the image is told."""
        label = "" if self.label is None else f", label {self.label}"
        return f"{self.group}, predicted {self.predicted}{label}, score {self.score}"


def ends(scores: np.ndarray, each: int = EACH) -> tuple[list[int], list[int]]:
    """The images with the lowest scores and those with the highest, the extreme ones first; none is in both."""
    order = np.argsort(scores, kind="stable").tolist()
    return order[: min(each, (len(order) + 1) // 2)], order[::-1][: min(each, len(order) // 2)]


def pictures(content: Content, method: str, each: int = EACH) -> list[tuple[list[Picture], list[Picture]]]:
    """For each group its most certain and its least certain images, by this method."""
    classes = content.known.images.classes
    found = []
    for group in content.groups:
        certain, uncertain = ends(group.scores[method], each)
        found.append(
            (
                [_picture(group, method, i, classes, group is content.known) for i in certain],
                [_picture(group, method, i, classes, group is content.known) for i in uncertain],
            )
        )
    return found


def _picture(group: Group, method: str, index: int, classes: tuple[str, ...], known: bool) -> Picture:
    predicted = int(group.predicted[index])
    label = None if group.labels is None else int(group.labels[index])
    # The network's classes say nothing about the labels of images that it does not know.
    return Picture(
        group.name,
        index,
        _named(predicted, classes),
        None if label is None else _named(label, group.images.classes),
        predicted == label if known and label is not None else None,
        f"{group.scores[method][index]:#.3g}".rstrip("."),
    )


def _named(number: int, classes: tuple[str, ...]) -> str:
    return classes[number] if 0 <= number < len(classes) else str(number)


def png(images: Images, index: int) -> str:
    """One image as a data address."""
    library = pillow()
    pixels = images.pixels[index].cpu().permute(1, 2, 0).numpy()
    if pixels.shape[2] not in (1, 3):
        raise QualmsError(f"{images.name} has {pixels.shape[2]} channels; the report shows images with 1 or 3.")
    image = library.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
    image.thumbnail((LARGEST, LARGEST))
    file = BytesIO()
    image.save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
