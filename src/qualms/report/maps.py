"""Images with a prediction and scores at every pixel in, one HTML file out: image, prediction and
scores in a row.
"""

import base64
import colorsys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int, Shaped, UInt8

from qualms.data import Images
from qualms.data.decode import pillow
from qualms.disk import require_writable
from qualms.errors import QualmsError
from qualms.metrics import auroc, pixel_metrics
from qualms.report.gallery import LARGEST, class_name, png
from qualms.report.offline import filled, packed, require_packages, write_html

SHOWN = 12  # images; the numbers are of all
STEPS = 200  # places of the threshold, each half a percent of the known pixels
NO_SCORE = 255
COVERAGE = 95  # where the threshold stands first, in percent
# Okabe and Ito, then some; the first class is often the background. Colors of more classes go round
# the circle.
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
MEASURES = {  # what the table shows: its heading, and what it means
    "auroc": ("AUROC", "unknown pixels against all known ones, of all images together"),
    "aupr": ("AUPR", "average precision, unknown pixels positive"),
    "fpr95": ("FPR95", "known pixels that are flagged when 95 % of the unknown ones are"),
    "wrong": (
        "AUROC, wrong",
        "known pixels that are predicted wrong against those predicted right",
    ),
}


@dataclass(frozen=True, eq=False)
class Maps:
    """All that a page of maps shows. Maps are arrays [images, height, width].

    Args:
        title: of the page.
        images: the page shows the first twelve; its numbers are of all.
        prediction: the class that the network gives each pixel.
        scores: of each pixel, by method; NaN where there is none.
        labels: the class of each pixel, where it is known.
        classes: the names of the network's classes.
        unknown: labels of what the network has not learnt.
        ignore_index: the label of pixels that do not count.
        about: short facts by name, such as the network's name and the seed.
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
            raise QualmsError("the page has no scores; give those of at least one method.")
        shape = (len(self.images), *self.images.size)
        maps = {
            "the prediction": self.prediction,
            **{f"the scores of {m}": s for m, s in self.scores.items()},
        }
        for what, values in (
            maps | ({} if self.labels is None else {"the labels": self.labels})
        ).items():
            if values.shape != shape:
                raise QualmsError(
                    f"the images have shape {shape} without their channels, and {what} {values.shape}; give a number "
                    "for each pixel."
                )
        if not all(np.isfinite(scores[self.counts]).any() for scores in self.scores.values()):
            raise QualmsError("a method has no score at any pixel that counts; leave it out.")

    @property
    def counts(self) -> Bool[np.ndarray, "n h w"]:
        """Pixels that have a label, or all where there are no labels."""
        return (
            np.ones(self.prediction.shape, bool)
            if self.labels is None
            else self.labels != self.ignore_index
        )

    @property
    def strange(self) -> Bool[np.ndarray, "n h w"]:
        """Pixels of what the network has not learnt."""
        if self.labels is None:
            return np.zeros(self.prediction.shape, bool)
        return np.isin(self.labels, list(self.unknown)) & self.counts


def write_maps(maps: Maps, path: str | Path) -> Path:
    """Write the page as one HTML file."""
    require_packages("jinja2", "PIL")
    require_writable(path)
    rows = _table(maps)
    order = [row["method"] for row in rows]
    colors = _colors(maps)
    shown = range(min(SHOWN, len(maps.images)))
    kinds = {"label": maps.labels, "prediction": maps.prediction}
    html = filled(
        "page.maps.html.jinja",
        styles=("page.css", "page.maps.css"),
        scripts=("page.values.js", "page.maps.js"),
        title=maps.title,
        facts=[f"{name}: {value}" for name, value in maps.about.items()],
        known="known pixels" if maps.strange.any() else "pixels",
        has_unknown=bool(maps.strange.any()),
        labeled=maps.labels is not None,
        methods=order,
        columns={key: MEASURES[key] for key in rows[0] if key != "method"},
        rows=rows,
        coverage=COVERAGE,
        legend=_legend(maps, colors),
        scenes=[
            {
                "name": maps.images.ids[i] if maps.images.ids else f"image {i}",
                "image": png(maps.images, i),
                **{
                    k: _painted(values[i], colors)
                    for k, values in kinds.items()
                    if values is not None
                },
            }
            for i in shown
        ],
        total=len(maps.images),
        data={
            "size": _thin(maps.prediction[0]).shape,
            "methods": [_method(maps, m, shown) for m in order],
        },
    )
    return write_html(path, html)


def _table(maps: Maps) -> list[dict[str, Any]]:
    """What each method achieves, the highest AUROC first."""
    rows = []
    for method, scores in maps.scores.items():
        row: dict[str, Any] = {"method": method}
        if maps.labels is not None:
            if maps.strange.any():
                row |= pixel_metrics(scores, maps.labels, maps.unknown, maps.ignore_index)
            known = maps.counts & ~maps.strange
            right = maps.prediction == maps.labels
            if (known & right).any() and (known & ~right).any():
                row |= {"wrong": auroc(scores[known & right], scores[known & ~right])}
        rows.append(row)
    return sorted(rows, key=lambda row: -row.get("auroc", row.get("wrong", 0.0)))


def _method(maps: Maps, method: str, shown: range) -> dict[str, Any]:
    """The threshold at each place, what it does to all pixels, and where each pixel that is shown
    is flagged.
    """
    scores = maps.scores[method].astype(np.float64)
    counts, strange = maps.counts & np.isfinite(scores), maps.strange
    known, unknown = np.sort(scores[counts & ~strange]), np.sort(scores[counts & strange])
    thresholds = known[np.ceil(np.arange(1, STEPS + 1) / STEPS * len(known) - 1e-9).astype(int) - 1]
    accepted = np.searchsorted(known, thresholds, "right")
    found: dict[str, Any] = {
        "name": method,
        "thresholds": packed(thresholds),
        "accepted": packed(accepted / len(known)),
        "flagged": packed(1 - np.searchsorted(unknown, thresholds, "right") / len(unknown))
        if len(unknown)
        else None,
        "right": None,
    }
    if maps.labels is not None:
        right = np.sort(scores[counts & ~strange & (maps.prediction == maps.labels)])
        found["right"] = packed(np.searchsorted(right, thresholds, "right") / accepted)
    levels = [packed(_thin(levels_of(scores[i], thresholds)).reshape(-1)) for i in shown]
    return found | {"levels": levels}


def levels_of(
    scores: Float[np.ndarray, "h w"], thresholds: Float[np.ndarray, " k"]
) -> UInt8[np.ndarray, "h w"]:
    """How many of the rising thresholds flag each pixel; `NO_SCORE` where there is none."""
    return np.where(np.isnan(scores), NO_SCORE, np.searchsorted(thresholds, scores, "left")).astype(
        np.uint8
    )


def _thin(values: Shaped[np.ndarray, "h w *c"]) -> Shaped[np.ndarray, "k l *c"]:
    """Every so many pixels of a large map: none is mixed with others."""
    step = -(-max(values.shape[:2]) // LARGEST)
    return values[::step, ::step]


def _colors(maps: Maps) -> dict[int, str]:
    """Of every class that there is, by its number."""
    found = np.unique(maps.prediction).tolist()
    if maps.labels is not None:
        found += np.unique(maps.labels).tolist()
    kept = sorted({*found, *range(len(maps.classes))} - {*maps.unknown, maps.ignore_index})
    return {c: _color(c) for c in kept} | dict.fromkeys(
        sorted(set(found) & set(maps.unknown)), UNKNOWN_COLOR
    )


def _color(number: int) -> str:
    if 0 <= number < len(COLORS):
        return COLORS[number]
    rgb = colorsys.hsv_to_rgb(
        number * 0.618 % 1, 0.55, 0.9
    )  # the golden angle: neighbors are far apart
    return "#" + "".join(f"{round(255 * part):02x}" for part in rgb)


def _legend(maps: Maps, colors: Mapping[int, str]) -> list[tuple[str, str]]:
    """Names with their colors; what is unknown has one."""
    named = [
        (class_name(c, tuple(maps.classes)), color)
        for c, color in colors.items()
        if c not in maps.unknown
    ]
    return named + ([("unknown", UNKNOWN_COLOR)] if maps.strange.any() else [])


def _painted(classes: Int[np.ndarray, "h w"], colors: Mapping[int, str]) -> str:
    """Classes as a data address of a picture; what has no color is transparent."""
    small = _thin(classes)
    picture = np.zeros((*small.shape, 4), np.uint8)
    for number, color in colors.items():
        picture[small == number] = (*bytes.fromhex(color[1:]), 255)
    file = BytesIO()
    pillow().fromarray(picture).save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
