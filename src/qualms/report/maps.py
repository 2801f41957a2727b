"""The page of images with a score at every pixel: image, labels, prediction and scores."""

import colorsys
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int, Shaped, UInt8

from qualms.data import Images
from qualms.data.decode import pillow
from qualms.disk import require_writable
from qualms.errors import QualmsError
from qualms.metrics import auroc, pixel_metrics
from qualms.report.gallery import MAX_SIDE, class_name, image_url, png_url
from qualms.report.offline import (
    format_facts,
    pack_array,
    render_template,
    require_packages,
    write_html,
)

MAX_IMAGES = 12  # images that are shown; the numbers of the page are over all images
# The number of thresholds: from one to the next, half a percent more known pixels are accepted.
STEPS = 200
NO_SCORE = 255  # the level of pixels without a score
COVERAGE = 95  # the first threshold, in percent
# The colors of Okabe and Ito, and a few more; the first class is often the background.
COLORS = [
    "#3b414a",
    "#56b4e9",
    "#e69f00",
    "#009e73",
    "#f0e442",
    "#0072b2",
    "#d55e00",
    "#cc79a7",
    "#a6761d",
    "#b2df8a",
    "#8c6bb1",
]
UNKNOWN_COLOR = "#ff2fd0"
# By measure, the heading of its column in the table, and an explanation.
MEASURES = {
    "auroc": ("AUROC", "unknown against known pixels, pooled over all images"),
    "aupr": ("AUPR", "average precision, with unknown pixels as the positive class"),
    "fpr95": ("FPR95", "known pixels that are flagged when 95 % of the unknown ones are"),
    "wrong": (
        "AUROC, wrong",
        "known pixels predicted wrongly against those predicted correctly",
    ),
}


@dataclass(frozen=True, eq=False)
class Maps:
    """Everything that a page of maps shows. A map is an array of shape [n, height, width].

    Args:
        title: The title of the page.
        images: The images. The page shows the first `MAX_IMAGES`; its numbers are over all.
        prediction: The predicted class of each pixel.
        scores: A dict from the name of each method to a map of scores; NaN where there is no score.
        labels: The true class of each pixel; None if it is not known.
        classes: The names of the network's classes.
        unknown: The labels of classes that the network was not trained on.
        ignore_index: The label of pixels that are left out of all numbers.
        about: Short facts by name, such as the network's name and the seed.
    """

    title: str
    images: Images
    prediction: np.ndarray
    scores: Mapping[str, np.ndarray]
    labels: np.ndarray | None = None
    classes: Sequence[str] = ()
    unknown: Collection[int] = ()
    ignore_index: int = 255
    about: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise an error if scores are missing, or if a map has another shape than the images."""
        if not self.scores:
            raise QualmsError("the page has no scores; pass those of at least one method.")
        self._require_shape("the prediction", self.prediction)
        for method, scores in self.scores.items():
            self._require_shape(f"the scores of {method}", scores)
        self._require_shape("the labels", self.labels)
        for method, scores in self.scores.items():
            if not np.isfinite(scores[self.is_counted]).any():
                raise QualmsError(f"{method} has no score at any pixel that counts; leave it out.")

    def _require_shape(self, what: str, values: np.ndarray | None) -> None:
        """Raise an error unless a map has one value per pixel.

        Args:
            what: What error messages call the map.
            values: The map; None if it is not known.
        """
        shape = (len(self.images), *self.images.size)
        if values is not None and values.shape != shape:
            raise QualmsError(
                f"the images have shape {shape} without their channels, and {what} {values.shape}; "
                "pass one number per pixel."
            )

    @property
    def is_counted(self) -> Bool[np.ndarray, "n h w"]:
        """Whether each pixel counts: its label is not `ignore_index`, or there are no labels."""
        if self.labels is None:
            return np.ones(self.prediction.shape, bool)
        return self.labels != self.ignore_index

    @property
    def is_unknown(self) -> Bool[np.ndarray, "n h w"]:
        """Whether each pixel counts and has a label in `unknown`; False if there are no labels."""
        if self.labels is None:
            return np.zeros(self.prediction.shape, bool)
        return np.isin(self.labels, list(self.unknown)) & self.is_counted


def write_maps(maps: Maps, path: str | Path) -> Path:
    """Write a page of maps as one HTML file.

    Args:
        maps: The content of the page.
        path: The file.

    Returns:
        The path of the file.
    """
    require_packages("jinja2", "PIL")
    require_writable(path)
    rows = _rank_methods(maps)
    methods = [row["method"] for row in rows]
    colors = _colors_by_class(maps)
    shown_indices = range(min(MAX_IMAGES, len(maps.images)))
    has_unknown = bool(maps.is_unknown.any())
    # What the page calls the pixels of known classes; without unknown ones, these are all.
    known = "pixels"
    if has_unknown:
        known = "known pixels"
    data = {
        "size": _subsample(maps.prediction[0]).shape,
        "methods": [_method_data(maps, method, shown_indices) for method in methods],
    }
    html = render_template(
        "page.maps.html.jinja",
        styles=("page.css", "page.maps.css"),
        scripts=("page.values.js", "page.maps.js"),
        title=maps.title,
        facts=format_facts(maps.about),
        known=known,
        has_unknown=has_unknown,
        labeled=maps.labels is not None,
        methods=methods,
        # All methods have the same measures.
        columns={key: MEASURES[key] for key in rows[0] if key != "method"},
        rows=rows,
        coverage=COVERAGE,
        legend=_legend_entries(maps, colors),
        scenes=[_image_data(maps, index, colors) for index in shown_indices],
        total=len(maps.images),
        data=data,
    )
    return write_html(path, html)


def _rank_methods(maps: Maps) -> list[dict[str, Any]]:
    """Return a row with the measures of each method, in descending order of AUROC.

    Without unknown pixels, the order is that of the AUROC of wrong predictions.
    """
    rows = [{"method": method, **_compute_measures(maps, method)} for method in maps.scores]
    # Negative, since `sorted` is ascending.
    return sorted(rows, key=lambda row: -row.get("auroc", row.get("wrong", 0.0)))


def _compute_measures(maps: Maps, method: str) -> dict[str, float]:
    """Compute the measures of a method, as a dict with keys of `MEASURES`.

    Without labels, the dict is empty. `wrong`, the AUROC of wrong predictions, needs known pixels
    with right and with wrong ones; the other measures need unknown pixels.
    """
    if maps.labels is None:
        return {}
    scores = maps.scores[method]
    measures: dict[str, float] = {}
    if maps.is_unknown.any():
        measures |= pixel_metrics(scores, maps.labels, maps.unknown, maps.ignore_index)
    is_known = maps.is_counted & ~maps.is_unknown
    is_right = is_known & (maps.prediction == maps.labels)
    is_wrong = is_known & ~is_right
    if is_right.any() and is_wrong.any():
        measures["wrong"] = auroc(scores[is_right], scores[is_wrong])
    return measures


def _image_data(maps: Maps, index: int, colors: Mapping[int, str]) -> dict[str, str]:
    """Return the name of an image; and as data URLs the image, its predicted and its true classes.

    Args:
        maps: The content of the page.
        index: The index of the image.
        colors: The color of each class.
    """
    name = f"image {index}"
    if maps.images.ids:
        name = maps.images.ids[index]
    scene = {
        "name": name,
        "image": image_url(maps.images, index),
        "prediction": _paint_classes(maps.prediction[index], colors),
    }
    if maps.labels is not None:
        scene["label"] = _paint_classes(maps.labels[index], colors)
    return scene


def _method_data(maps: Maps, method: str, shown_indices: range) -> dict[str, Any]:
    """Return what the page's script reads about a method.

    A pixel is accepted if its score is at most the threshold, otherwise flagged. Threshold k
    accepts k of `STEPS` equal shares of the known pixels. The dict has the `thresholds`; for each
    of them the share of known pixels that it accepts (`accepted`), of unknown pixels that it flags
    (`flagged`), and of right predictions among the accepted known pixels (`right`); and for each
    shown pixel how many thresholds flag it (`levels`).

    Args:
        maps: The content of the page.
        method: The name of the method.
        shown_indices: The indices of the images that are shown.
    """
    scores = maps.scores[method].astype(np.float64)
    is_counted = maps.is_counted & np.isfinite(scores)
    known_scores = np.sort(scores[is_counted & ~maps.is_unknown])
    unknown_scores = np.sort(scores[is_counted & maps.is_unknown])
    shares = np.arange(1, STEPS + 1) / STEPS
    # Threshold k is the score that k of `STEPS` shares of the known pixels do not exceed.
    # Subtracting 1e-9 keeps rounding errors from moving an integer to the next one.
    threshold_indices = np.ceil(shares * len(known_scores) - 1e-9).astype(int) - 1
    thresholds = known_scores[threshold_indices]
    num_accepted = np.searchsorted(known_scores, thresholds, "right")
    data: dict[str, Any] = {
        "name": method,
        "thresholds": pack_array(thresholds),
        "accepted": pack_array(num_accepted / len(known_scores)),
        "flagged": None,
        "right": None,
        "levels": [],
    }
    if len(unknown_scores):
        share_accepted = np.searchsorted(unknown_scores, thresholds, "right") / len(unknown_scores)
        data["flagged"] = pack_array(1 - share_accepted)
    if maps.labels is not None:
        is_right = is_counted & ~maps.is_unknown & (maps.prediction == maps.labels)
        right_scores = np.sort(scores[is_right])
        num_accepted_right = np.searchsorted(right_scores, thresholds, "right")
        data["right"] = pack_array(num_accepted_right / num_accepted)
    for index in shown_indices:
        levels = _subsample(threshold_levels(scores[index], thresholds))
        data["levels"].append(pack_array(levels.reshape(-1)))
    return data


def threshold_levels(
    scores: Float[np.ndarray, "h w"], thresholds: Float[np.ndarray, " k"]
) -> UInt8[np.ndarray, "h w"]:
    """Count the thresholds below each pixel's score; pixels without a score get `NO_SCORE`.

    Args:
        scores: The scores of the pixels, of shape [height, width]; NaN where there is none.
        thresholds: The thresholds, in ascending order, of shape [k].
    """
    levels = np.searchsorted(thresholds, scores, "left")
    return np.where(np.isnan(scores), NO_SCORE, levels).astype(np.uint8)


def _subsample(values: Shaped[np.ndarray, "h w *c"]) -> Shaped[np.ndarray, "k l *c"]:
    """Keep every `step`-th row and column, so that no side has more than `MAX_SIDE` pixels.

    Pixels are not averaged, since a mean of class indices or levels says nothing.
    """
    step = math.ceil(max(values.shape[:2]) / MAX_SIDE)
    return values[::step, ::step]


def _colors_by_class(maps: Maps) -> dict[int, str]:
    """Return a dict from each class (its index) that occurs or has a name to its color.

    All unknown classes have the same color; `ignore_index` has none.
    """
    occurring = set(np.unique(maps.prediction).tolist())
    if maps.labels is not None:
        occurring |= set(np.unique(maps.labels).tolist())
    known = occurring | set(range(len(maps.classes)))
    known -= {*maps.unknown, maps.ignore_index}
    colors = {class_index: _class_color(class_index) for class_index in sorted(known)}
    for class_index in sorted(occurring & set(maps.unknown)):
        colors[class_index] = UNKNOWN_COLOR
    return colors


def _class_color(class_index: int) -> str:
    """Return the color of a class, such as `#56b4e9`: from `COLORS`, or else a hue of its own."""
    if 0 <= class_index < len(COLORS):
        return COLORS[class_index]
    # Steps of 0.618 of the circle, the golden ratio, give consecutive classes distant hues.
    hue = class_index * 0.618 % 1
    red, green, blue = colorsys.hsv_to_rgb(hue, 0.55, 0.9)
    return f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}"


def _legend_entries(maps: Maps, colors: Mapping[int, str]) -> list[tuple[str, str]]:
    """Return the names and colors of classes for the legend; all unknown classes share an entry."""
    classes = tuple(maps.classes)
    entries = []
    for class_index, color in colors.items():
        if class_index not in maps.unknown:
            entries.append((class_name(class_index, classes), color))
    if maps.is_unknown.any():
        entries.append(("unknown", UNKNOWN_COLOR))
    return entries


def _paint_classes(classes: Int[np.ndarray, "h w"], colors: Mapping[int, str]) -> str:
    """Draw an image's map of classes as a data URL; classes without color are transparent."""
    subsampled = _subsample(classes)
    picture = np.zeros((*subsampled.shape, 4), np.uint8)
    for class_index, color in colors.items():
        # Red, green and blue of a color such as `#56b4e9`, without transparency.
        picture[subsampled == class_index] = (*bytes.fromhex(color[1:]), 255)
    return png_url(pillow().fromarray(picture))
