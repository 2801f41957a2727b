"""The page of maps: its numbers are those of qualms, its pixels stand where they stood, and it is
one file.
"""

import base64
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import qualms
from qualms import Threshold, metrics
from qualms.data import Images
from qualms.report.maps import NO_SCORE, STEPS, Maps, write_maps
from tests.helpers.map_contents import IGNORED, UNKNOWN, bare, full
from tests.helpers.pages import Page
from tests.helpers.report_contents import NASTY


def written(maps: Maps, folder: Path) -> Page:
    return Page(write_maps(maps, folder / "maps.html").read_text("utf-8"))


def unpacked(found: dict[str, str]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(found["bytes"]), f"<{found['kind']}")


def pictures(page: Page) -> list[np.ndarray]:
    """Decode every picture of the page, in order, as RGBA."""
    sources = [
        str(attrs["src"]).partition("base64,")[2] for tag, attrs in page.elements if tag == "img"
    ]
    return [np.asarray(Image.open(BytesIO(base64.b64decode(s))).convert("RGBA")) for s in sources]


@pytest.mark.parametrize("maps", [full(), bare()], ids=["full", "bare"])
def test_the_page_is_well_formed_and_asks_for_nothing(maps: Maps, tmp_path: Path) -> None:
    page = written(maps, tmp_path)
    assert page.wrong == []
    assert page.open == []
    assert len(page.ids) == len(set(page.ids))
    for tag, attrs in page.elements:
        assert (
            not (attrs.get("src") or "data:")
            .removeprefix("data:image/png;base64,")
            .startswith("http")
        )
        assert tag != "canvas" or attrs["aria-label"]
    assert "default-src 'none'" in page.source
    assert NASTY not in page.source


def test_the_threshold_at_every_place_is_that_of_qualms(tmp_path: Path) -> None:
    maps = full()
    assert maps.labels is not None
    inside = (maps.labels != UNKNOWN) & (maps.labels != IGNORED)
    for method in written(maps, tmp_path).data["methods"]:
        scores = maps.scores[method["name"]]
        known, unknown = scores[inside], scores[maps.labels == UNKNOWN]
        right = (maps.prediction == maps.labels)[inside]
        for share in (0.5, 33, 95, 100):
            step = round(share / 100 * STEPS) - 1
            threshold = Threshold.from_scores(torch.from_numpy(known), coverage=share / 100)
            accepted = known <= threshold.value
            assert unpacked(method["thresholds"])[step] == threshold.value
            assert unpacked(method["accepted"])[step] == pytest.approx(accepted.mean())
            assert unpacked(method["flagged"])[step] == pytest.approx(
                (unknown > threshold.value).mean()
            )
            assert unpacked(method["right"])[step] == pytest.approx(right[accepted].mean())


def test_a_pixel_is_flagged_where_its_score_is_above_the_threshold(tmp_path: Path) -> None:
    maps = full()
    for method in written(maps, tmp_path).data["methods"]:
        thresholds = unpacked(method["thresholds"])
        for image, levels in enumerate(method["levels"]):
            found, scores = unpacked(levels).reshape(16, 24), maps.scores[method["name"]][image]
            assert ((found == NO_SCORE) == np.isnan(scores)).all()
            for step in (0, 100, 189, 199):
                flagged = (found > step) & (found != NO_SCORE)
                assert (flagged == (scores > thresholds[step])).all()


def test_labels_and_predictions_have_the_colors_of_the_legend(tmp_path: Path) -> None:
    maps = full()
    page = written(maps, tmp_path)
    styles = [
        str(a.get("style")) for tag, a in page.elements if tag == "i" and a.get("class") == "swatch"
    ]
    colors = [tuple(bytes.fromhex(style[-6:])) for style in styles]  # background, one, two, unknown
    assert len(set(colors)) == 4
    assert maps.labels is not None
    _, labels, prediction, _ = pictures(page)[:4]
    for number, color in zip((0, 1, 2, UNKNOWN), colors, strict=True):
        assert (labels[maps.labels[0] == number] == (*color, 255)).all()
        if number != UNKNOWN:
            assert (prediction[maps.prediction[0] == number] == (*color, 255)).all()
    assert (labels[maps.labels[0] == IGNORED][:, 3] == 0).all()  # transparent


def test_the_table_has_the_measures_of_qualms_and_the_best_method_first(tmp_path: Path) -> None:
    maps = full()
    page = written(maps, tmp_path)
    assert [method["name"] for method in page.data["methods"]][:2] == ["exact", "coarse"]
    words = [word.strip() for word in page.words if word.strip()]
    cells = words[words.index("exact", words.index("AUROC, wrong")) + 1 :][:4]
    assert maps.labels is not None
    want = metrics.pixel_metrics(maps.scores["exact"], maps.labels, UNKNOWN)
    known, right = (maps.labels < UNKNOWN), maps.prediction == maps.labels
    wrong = metrics.auroc(maps.scores["exact"][known & right], maps.scores["exact"][known & ~right])
    assert cells == [f"{100 * value:.1f}" for value in (*want.values(), wrong)]


def test_without_labels_there_are_maps_and_no_measures(tmp_path: Path) -> None:
    page = written(bare(), tmp_path)
    assert "glance" not in page.ids
    assert "flagged" not in page.ids
    assert len(pictures(page)) == 3 * 3  # image, prediction and the image below the flags
    assert all(
        method["flagged"] is None and method["right"] is None for method in page.data["methods"]
    )
    assert "of the pixels accepted" in " ".join(page.words)


def test_a_large_map_is_thinned_and_no_pixel_is_mixed_with_others(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    scores = random.normal(0, 1, (1, 200, 120))
    images = Images("large", torch.zeros(1, 3, 200, 120, dtype=torch.uint8), None)
    page = written(
        Maps("Large", images, np.zeros((1, 200, 120), np.int64), {"m": scores}), tmp_path
    )
    assert page.data["size"] == [67, 40]
    method = page.data["methods"][0]
    flagged = unpacked(method["levels"][0]).reshape(67, 40) > 99
    assert (flagged == (scores[0, ::3, ::3] > np.median(scores))).mean() > 0.999


def test_maps_of_other_shapes_are_refused(tmp_path: Path) -> None:
    maps = full()

    def error(**changes: Any) -> str:
        with pytest.raises(qualms.QualmsError) as caught:
            replace(maps, **changes)
        return str(caught.value)

    assert error(scores={}).startswith("the page has no scores")
    assert "and the scores of m (14, 16, 16); pass one number per pixel" in error(
        scores={"m": np.zeros((14, 16, 16))}
    )
    assert "and the labels (16, 24)" in error(labels=np.zeros((16, 24), np.int64))
    assert error(scores={"m": np.full((14, 16, 24), np.nan)}).startswith(
        "m has no score at any pixel"
    )
