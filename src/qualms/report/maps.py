"""Images with a score at every pixel in, one HTML file out: image, labels, prediction and scores."""

import colorsys
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
from qualms.report.offline import pack_array, render_template, require_packages, write_html

MAX_IMAGES = 12  # that are shown; the numbers are of all
STEPS = 200  # places of the threshold, each half a percent of the known pixels
NO_SCORE = 255
COVERAGE = 95  # the first place of the threshold, in percent
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
MEASURES = {  # what the table shows: its heading, and an explanation
    "auroc": ("AUROC", "unknown pixels against all known ones, of all images together"),
    "aupr": ("AUPR", "average precision, with unknown pixels as the positive class"),
    "fpr95": ("FPR95", "known pixels that are flagged when 95 % of the unknown ones are"),
    "wrong": (
        "AUROC, wrong",
        "wrongly predicted known pixels against rightly predicted ones",
    ),
}


@dataclass(frozen=True, eq=False)
class Maps:
    """Everything that a page of maps shows. Maps are arrays of shape [n, height, width].

    Args:
        title: The title of the page.
        images: The page shows the first twelve; its numbers are of all.
        prediction: The predicted class of each pixel.
        scores: By method, the score of each pixel; NaN where there is none.
        labels: The class of each pixel, if it is known.
        classes: The names of the network's classes.
        unknown: Labels of what the network was not trained on.
        ignore_index: The label of pixels that do not count.
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
        if not self.scores:
            raise QualmsError("the page has no scores; pass those of at least one method.")
        self._require_shape("the prediction", self.prediction)
        for method, scores in self.scores.items():
            self._require_shape(f"the scores of {method}", scores)
        self._require_shape("the labels", self.labels)
        for method, scores in self.scores.items():
            if not np.isfinite(scores[self.counts]).any():
                raise QualmsError(f"{method} has no score at any pixel that counts; leave it out.")

    def _require_shape(self, what: str, values: np.ndarray | None) -> None:
        shape = (len(self.images), *self.images.size)
        if values is not None and values.shape != shape:
            raise QualmsError(
                f"the images have shape {shape} without their channels, and {what} {values.shape}; "
                "give a number for each pixel."
            )

    @property
    def counts(self) -> Bool[np.ndarray, "n h w"]:
        """The pixels that have a label, or all if there are no labels."""
        if self.labels is None:
            return np.ones(self.prediction.shape, bool)
        return self.labels != self.ignore_index

    @property
    def strange(self) -> Bool[np.ndarray, "n h w"]:
        """The pixels of what the network was not trained on."""
        if self.labels is None:
            return np.zeros(self.prediction.shape, bool)
        return np.isin(self.labels, list(self.unknown)) & self.counts


def write_maps(maps: Maps, path: str | Path) -> Path:
    """Write a page of maps as one HTML file.

    Args:
        maps: What it shows.
        path: The file.

    Returns:
        The path of the file.
    """
    require_packages("jinja2", "PIL")
    require_writable(path)
    rows = _rank_methods(maps)
    methods = [row["method"] for row in rows]
    colors = _colors(maps)
    shown = range(min(MAX_IMAGES, len(maps.images)))
    html = render_template(
        "page.maps.html.jinja",
        styles=("page.css", "page.maps.css"),
        scripts=("page.values.js", "page.maps.js"),
        title=maps.title,
        facts=[f"{name}: {value}" for name, value in maps.about.items()],
        known="known pixels" if maps.strange.any() else "pixels",
        has_unknown=bool(maps.strange.any()),
        labeled=maps.labels is not None,
        methods=methods,
        columns={key: MEASURES[key] for key in rows[0] if key != "method"},
        rows=rows,
        coverage=COVERAGE,
        legend=_legend(maps, colors),
        scenes=[_scene(maps, i, colors) for i in shown],
        total=len(maps.images),
        data={
            "size": _thin(maps.prediction[0]).shape,
            "methods": [_method_data(maps, method, shown) for method in methods],
        },
    )
    return write_html(path, html)


def _rank_methods(maps: Maps) -> list[dict[str, Any]]:
    """Return the measures of each method, in descending order of AUROC."""
    rows = []
    for method, scores in maps.scores.items():
        row: dict[str, Any] = {"method": method}
        if maps.labels is not None:
            if maps.strange.any():
                row |= pixel_metrics(scores, maps.labels, maps.unknown, maps.ignore_index)
            known = maps.counts & ~maps.strange
            right = known & (maps.prediction == maps.labels)
            wrong = known & ~right
            if right.any() and wrong.any():
                row["wrong"] = auroc(scores[right], scores[wrong])
        rows.append(row)
    return sorted(rows, key=lambda row: -row.get("auroc", row.get("wrong", 0.0)))


def _scene(maps: Maps, i: int, colors: Mapping[int, str]) -> dict[str, str]:
    """Return the pictures of an image."""
    scene = {
        "name": maps.images.ids[i] if maps.images.ids else f"image {i}",
        "image": image_url(maps.images, i),
        "prediction": _paint(maps.prediction[i], colors),
    }
    if maps.labels is not None:
        scene["label"] = _paint(maps.labels[i], colors)
    return scene


def _method_data(maps: Maps, method: str, shown: range) -> dict[str, Any]:
    """Return what the page's script reads about a method.

    That is the threshold at each of its places, the shares of all pixels that it accepts and flags,
    and for each pixel that is shown the number of thresholds that flag it.
    """
    scores = maps.scores[method].astype(np.float64)
    counts = maps.counts & np.isfinite(scores)
    known = np.sort(scores[counts & ~maps.strange])
    unknown = np.sort(scores[counts & maps.strange])
    shares = np.arange(1, STEPS + 1) / STEPS
    places = np.ceil(shares * len(known) - 1e-9).astype(int) - 1
    thresholds = known[places]
    accepted = np.searchsorted(known, thresholds, "right")
    found: dict[str, Any] = {
        "name": method,
        "thresholds": pack_array(thresholds),
        "accepted": pack_array(accepted / len(known)),
        "flagged": None,
        "right": None,
        "levels": [],
    }
    if len(unknown):
        passed = np.searchsorted(unknown, thresholds, "right") / len(unknown)
        found["flagged"] = pack_array(1 - passed)
    if maps.labels is not None:
        is_right = counts & ~maps.strange & (maps.prediction == maps.labels)
        right = np.sort(scores[is_right])
        found["right"] = pack_array(np.searchsorted(right, thresholds, "right") / accepted)
    for i in shown:
        levels = _thin(threshold_levels(scores[i], thresholds))
        found["levels"].append(pack_array(levels.reshape(-1)))
    return found


def threshold_levels(
    scores: Float[np.ndarray, "h w"], thresholds: Float[np.ndarray, " k"]
) -> UInt8[np.ndarray, "h w"]:
    """Count the thresholds, in ascending order, that flag each pixel.

    Pixels without a score have `NO_SCORE`.
    """
    levels = np.searchsorted(thresholds, scores, "left")
    return np.where(np.isnan(scores), NO_SCORE, levels).astype(np.uint8)


def _thin(values: Shaped[np.ndarray, "h w *c"]) -> Shaped[np.ndarray, "k l *c"]:
    """Keep every k-th pixel of a large map, so that no pixel is mixed with others."""
    step = -(-max(values.shape[:2]) // MAX_SIDE)
    return values[::step, ::step]


def _colors(maps: Maps) -> dict[int, str]:
    """Return the color of each class that occurs or has a name."""
    occurring = set(np.unique(maps.prediction).tolist())
    if maps.labels is not None:
        occurring |= set(np.unique(maps.labels).tolist())
    known = occurring | set(range(len(maps.classes)))
    known -= {*maps.unknown, maps.ignore_index}
    colors = {number: _color(number) for number in sorted(known)}
    for number in sorted(occurring & set(maps.unknown)):
        colors[number] = UNKNOWN_COLOR
    return colors


def _color(number: int) -> str:
    """Return the color of a class; those beyond the list go around the color wheel."""
    if 0 <= number < len(COLORS):
        return COLORS[number]
    hue = number * 0.618 % 1  # the golden angle sets consecutive numbers far apart
    rgb = colorsys.hsv_to_rgb(hue, 0.55, 0.9)
    return "#" + "".join(f"{round(255 * part):02x}" for part in rgb)


def _legend(maps: Maps, colors: Mapping[int, str]) -> list[tuple[str, str]]:
    """Return names with their colors; all unknown classes share an entry."""
    entries = []
    for number, color in colors.items():
        if number not in maps.unknown:
            entries.append((class_name(number, tuple(maps.classes)), color))
    if maps.strange.any():
        entries.append(("unknown", UNKNOWN_COLOR))
    return entries


def _paint(classes: Int[np.ndarray, "h w"], colors: Mapping[int, str]) -> str:
    """Return a map of classes as a data URL; classes without a color are transparent."""
    small = _thin(classes)
    picture = np.zeros((*small.shape, 4), np.uint8)
    for number, color in colors.items():
        picture[small == number] = (*bytes.fromhex(color[1:]), 255)
    return png_url(pillow().fromarray(picture))
