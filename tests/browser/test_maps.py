"""The page of maps in a browser: right numbers at the threshold, right pixels, at every width, in
the dark, offline.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qualms import Threshold
from qualms.report.maps import Maps, write_maps
from tests.helpers.browsing import WIDTHS, percent
from tests.helpers.map_contents import IGNORED, UNKNOWN, bare, full
from tests.helpers.report_contents import LONG

pytestmark = pytest.mark.browser
Open = Callable[..., Any]
FULL = full()
PIXELS = """canvas => {
  const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", { willReadFrequently: true });
  copy.drawImage(canvas, 0, 0);
  return Array.from(copy.getImageData(0, 0, canvas.width, canvas.height).data);
}"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("maps")
    made = {"full": FULL, "bare": bare()}
    return {name: write_maps(maps, folder / f"{name}.html") for name, maps in made.items()}


@pytest.fixture
def opened(look: Open, pages: dict[str, Path]) -> Open:
    """Look at one of the pages."""
    return lambda name="full", **options: look(pages[name], **options)


def check(page: Any, maps: Maps, method: str, share: float) -> None:
    """Every number, and every pixel of two images, at a threshold that is computed from the scores."""
    assert maps.labels is not None
    scores, inside = maps.scores[method], maps.labels < UNKNOWN
    value = Threshold.from_scores(torch.from_numpy(scores[inside]), coverage=share / 100).value
    accepted, unknown = scores[inside] <= value, scores[maps.labels == UNKNOWN]
    right = (maps.prediction == maps.labels)[inside][accepted]
    want = {"accepted": accepted.mean(), "flagged": (unknown > value).mean(), "right": right.mean()}
    for name, number in want.items():
        assert float(page.locator(f"#{name}").get_attribute("data-value")) == pytest.approx(number)
        assert page.locator(f"#{name}").inner_text() == percent(number)
    assert float(page.locator("#threshold").get_attribute("data-value")) == value
    assert page.locator("#answer").text_content() == (
        f"At {percent(want['accepted'])} of the known pixels accepted by {method}, {percent(want['flagged'])} of the "
        "unknown pixels are flagged."
    )
    for image in (0, 11):
        scene = page.locator(f"[data-scene='{image}']")
        drawn = np.array(scene.locator(".flags").evaluate(PIXELS)).reshape(16, 24, 4)
        assert ((drawn[..., 0] == 255) == (scores[image] > value)).all()
        assert ((drawn[..., 3] == 0) == (maps.labels[image] == IGNORED)).all()
        flagged = (scores[image] > value).sum() / np.isfinite(scores[image]).sum()
        assert (
            scene.locator(".flagged-here").inner_text()
            == f"{percent(flagged)} of its pixels flagged"
        )


def test_the_threshold_moved_by_keyboard_flags_the_right_pixels(opened: Open) -> None:
    page = opened()
    check(page, FULL, "exact", 95)
    field = page.locator("#coverage")
    field.focus()
    for keys, share in ((["Home"], 0.5), (["End"], 100), (["ArrowLeft"] * 11, 94.5)):
        for key in keys:
            page.keyboard.press(key)
        assert float(field.input_value()) == share
        assert page.locator("#covered").inner_text() == percent(share / 100)
        check(page, FULL, "exact", share)


def test_another_method_shows_other_scores(opened: Open) -> None:
    page = opened()
    canvas = page.locator("[data-scene='3'] .scores")
    first = canvas.evaluate(PIXELS)
    page.select_option("#method", label="coarse")
    check(page, FULL, "coarse", 95)
    assert canvas.evaluate(PIXELS) != first
    assert page.locator("#maps .chosen").inner_text() == "coarse"
    page.locator("#methods .pick", has_text="exact").focus()
    page.keyboard.press("Enter")
    assert page.locator("#method option:checked").inner_text() == "exact"
    assert page.locator("[aria-pressed='true']").all_inner_texts() == ["exact"]
    assert canvas.evaluate(PIXELS) == first


def test_a_higher_score_is_lighter(opened: Open) -> None:
    drawn = np.array(opened().locator("[data-scene='0'] .scores").evaluate(PIXELS)).reshape(
        16, 24, 4
    )
    scores = FULL.scores["exact"][0]
    there = np.isfinite(scores)
    light = drawn[..., :3].sum(-1)[there][np.argsort(scores[there])]
    assert (np.diff(light) >= 0).all()
    assert light[0] < 60
    assert light[-1] > 600


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["full", "bare"])
def test_nothing_overflows(opened: Open, name: str, width: int) -> None:
    page = opened(name, width=width)
    page.select_option("#method", label=LONG)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    boxes = page.locator("[data-scene='0'] .panel").all()
    assert len(boxes) == (5 if name == "full" else 4)
    for box in (each.bounding_box() for each in boxes):
        assert box["width"] > 100
        assert box["height"] == pytest.approx(box["width"] * 16 / 24, abs=1)


@pytest.mark.parametrize("width", WIDTHS)
def test_no_number_of_the_table_is_broken_or_cut(opened: Open, width: int) -> None:
    page = opened(width=width)
    broken = """() => [...document.querySelectorAll("#methods td")].filter((cell) => {
      const text = document.createRange();
      text.selectNodeContents(cell);
      return text.getClientRects().length > 1 || cell.scrollWidth > cell.clientWidth;
    }).length"""
    assert page.evaluate(broken) == 0
    heads = page.eval_on_selector_all(
        "#methods thead th", "all => all.map((e) => e.scrollWidth - e.clientWidth)"
    )
    assert max(heads) == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["full", "bare"])
def test_axe_finds_no_barrier(opened: Open, axe: str, name: str, width: int, scheme: str) -> None:
    page = opened(name, width=width, scheme=scheme, bypass_csp=True)
    page.evaluate(axe)
    found = page.evaluate("axe.run()")
    assert [(v["id"], [n["html"][:150] for n in v["nodes"]][:3]) for v in found["violations"]] == []


def test_without_labels_the_answer_says_what_is_accepted(opened: Open) -> None:
    page = opened("bare")
    said = page.locator("#answer").text_content()
    assert said == f"At {page.locator('#accepted').inner_text()} of the pixels accepted by coarse."
    assert page.locator("#methods").count() == 0


def test_without_a_script_images_predictions_and_the_table_are_there(opened: Open) -> None:
    page = opened(java_script_enabled=False)
    assert page.locator(".panel img").count() == 12 * 4
    assert page.locator("#methods tbody tr").count() == 3
    assert "need JavaScript" in page.locator("noscript").inner_text()
