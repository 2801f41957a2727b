"""The report in a browser: right numbers at the line, by mouse and keys, at every width, in the
dark, and offline.
"""

import csv
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qualms import Threshold, metrics
from qualms.report.content import Content
from qualms.report.page import write_page
from tests.helpers.browsing import WIDTHS, percent
from tests.helpers.report_contents import LONG, NASTY, bare, full, group

pytestmark = pytest.mark.browser
Open = Callable[..., Any]
FULL = full()
CONTROLS = "a[href], button, select, input, summary, [tabindex='0']"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report with everything, written once."""
    return write_page(FULL, tmp_path_factory.mktemp("report") / "report.html", resamples=10)


@pytest.fixture
def opened(look: Open, report: Path, tmp_path: Path) -> Open:
    """Write a report and look at it."""

    def written(content: Content = FULL, **options: Any) -> Any:
        path = (
            report
            if content is FULL
            else write_page(content, tmp_path / "report.html", resamples=10)
        )
        page = look(path, **options)
        page.locator("#ridge-rows .ridge").first.wait_for()
        return page

    return written


def told(page: Any, name: str) -> float:
    """A number of the threshold's, which must also be what is shown."""
    found = page.locator(f"#{name}")
    value, text = (
        float(found.get_attribute("data-value")),
        found.evaluate("e => e.firstChild.textContent"),
    )
    assert text == (f"{value:.4g}" if name == "threshold" else percent(value))
    return value


def check_numbers(page: Any, content: Content, method: str) -> None:
    """The numbers on the page, against those that Python finds at the line's position."""
    share = float(page.locator("#coverage").input_value()) / 100
    known = content.known.scores[method]
    threshold = Threshold.from_scores(known, coverage=share)
    covered = float(threshold.accept(known).double().mean())
    assert told(page, "threshold") == pytest.approx(threshold.value, rel=1e-12)
    assert told(page, "covered") == pytest.approx(covered)
    right = 1 - metrics.selective_risk(known, content.known.correct, covered)
    assert told(page, "accuracy") == pytest.approx(right)
    passing = [float(threshold.accept(g.scores[method]).double().mean()) for g in content.unknown]
    for i, through in enumerate(passing, 1):
        assert told(page, f"let-through-{i}") == pytest.approx(through)
    answer = page.locator("#answer").text_content()
    assert answer == (
        f"At {percent(covered)} of digits accepted by {method}, {percent(passing[0])} of letters pass and "
        f"{percent(passing[1])} of noise."
    )
    assert answer in page.locator("#line").get_attribute("aria-valuetext")


def choose(page: Any, method: str) -> None:
    number = page.locator("#method option", has_text=method).first.get_attribute("value")
    page.select_option("#method", value=number)


def test_the_line_moved_by_keyboard_shows_the_right_numbers(opened: Open) -> None:
    page = opened()
    field, line = page.locator("#coverage"), page.locator("#line")
    assert field.input_value() == "95"
    steps = (
        ["Home"],
        7 * ["ArrowRight"],
        4 * ["PageUp"],
        ["ArrowLeft"],
        ["PageUp"],
        ["End"],
        2 * ["PageDown"],
    )
    for method in ("exact", "tied", "wide", "flat"):
        choose(page, method)
        check_numbers(page, FULL, method)
        line.focus()
        seen = set()
        for keys in steps:
            for key in keys:
                page.keyboard.press(key)
            seen.add(field.input_value())
            check_numbers(page, FULL, method)
        assert len(seen) == 7
        assert {"0.5", "4", "100"} <= seen


def test_a_share_that_is_typed_moves_the_line(opened: Open) -> None:
    page = opened()
    before = page.locator("#line").bounding_box()["x"]
    page.locator("#coverage").fill("60")
    check_numbers(page, FULL, "exact")
    assert page.locator("#line").get_attribute("aria-valuenow") == "60"
    assert page.locator("#line").bounding_box()["x"] < before


def test_the_line_is_dragged_to_a_score(opened: Open) -> None:
    page = opened()
    box = page.locator("#ridges").bounding_box()
    axis = page.evaluate("JSON.parse(document.getElementById('data').textContent).methods[0].axis")
    score = axis["low"] + 0.3 * (axis["high"] - axis["low"])
    page.mouse.move(box["x"] + 0.7 * box["width"], box["y"] + 30)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.3 * box["width"], box["y"] + 40, steps=3)
    known = np.sort(FULL.known.scores["exact"])
    expected = known[known <= score][-1]
    assert told(page, "threshold") == pytest.approx(expected)
    page.mouse.up()
    page.mouse.move(box["x"] + 0.9 * box["width"], box["y"] + 40)
    assert told(page, "threshold") == pytest.approx(expected)
    at = page.locator("#line").bounding_box()
    place = (expected - axis["low"]) / (axis["high"] - axis["low"])
    assert at["x"] + at["width"] / 2 == pytest.approx(box["x"] + place * box["width"], abs=1)


def test_what_is_beyond_the_axis_is_counted(opened: Open) -> None:
    values = np.append(np.linspace(0, 1, 199), 1e6)
    known = replace(group("digits", 200, 0), scores={"exact": values})
    page = opened(Content("t", known))
    assert page.locator(".outside").first.inner_text() == "1 below the axis, 1 above the axis"


def test_a_row_chooses_its_method_by_click_and_by_keyboard(opened: Open) -> None:
    page = opened()
    row = page.locator("#methods tbody tr", has_text="tied")
    row.locator("td").first.click()
    assert page.locator("#method option:checked").inner_text() == "tied"
    check_numbers(page, FULL, "tied")
    button = page.locator("#methods .pick", has_text="wide")
    button.focus()
    page.keyboard.press("Enter")
    assert button.get_attribute("aria-pressed") == "true"
    assert page.locator("[aria-pressed='true']").count() == 1
    check_numbers(page, FULL, "wide")


def test_another_method_changes_drawings_numbers_and_images(opened: Open) -> None:
    page = opened()

    def state() -> list[Any]:
        drawn = [
            page.locator(f"#{i}").inner_html() for i in ("ridge-rows", "roc", "lift", "pictures")
        ]
        captions = [
            page.locator(f"#{i}").inner_text()
            for i in ("ridges-summary", "roc-summary", "layers-summary")
        ]
        return [
            *drawn,
            *captions,
            told(page, "threshold"),
            page.locator("#gallery .chosen").inner_text(),
        ]

    choose(page, "exact")
    first = state()
    choose(page, "tied")
    assert all(a != b for a, b in zip(first, state(), strict=True))
    choose(page, "exact")
    assert state() == first


def test_the_default_comes_first_with_its_badge_and_ties_are_tinted(opened: Open) -> None:
    page = opened()
    assert page.locator("#method option:checked").inner_text() == "exact (default)"
    assert page.locator("tr", has=page.locator(".badge")).locator(".pick").all_inner_texts() == [
        "exact"
    ]
    tinted = page.locator("tr.tied .pick").all_inner_texts()
    assert tinted[:2] == ["exact", "wide"]
    assert "flat" not in tinted
    assert "(tinted)" in page.locator("#summary").inner_text()


def test_methods_that_are_not_for_use_unfold(opened: Open) -> None:
    page = opened()
    row = page.locator("#methods tr", has_text="flat")
    assert not row.is_visible()
    page.locator("#unfold").focus()
    page.keyboard.press("Enter")
    assert row.is_visible()
    assert page.locator("#unfold").get_attribute("aria-expanded") == "true"
    assert page.locator("#unfold").inner_text() == "Hide 1 more"


def test_the_table_sorts_by_any_column(opened: Open) -> None:
    content, page = FULL, opened()
    page.locator("#more").check()
    heading = page.locator("#methods thead th", has_text="rAULC")
    heading.locator("button").focus()
    page.keyboard.press("Enter")
    names = page.locator("#methods tbody:not(#folded) .pick")
    lift = {
        m: metrics.raulc(s, content.known.correct)
        for m, s in content.known.scores.items()
        if m != "flat"
    }
    assert heading.get_attribute("aria-sort") == "descending"
    assert names.all_inner_texts() == sorted(lift, key=lambda m: -lift[m])
    page.keyboard.press("Enter")
    assert names.all_inner_texts() == sorted(lift, key=lambda m: lift[m])
    page.locator("#methods thead button").first.click()
    assert names.all_inner_texts() == sorted(lift)
    assert page.locator("#methods [aria-sort]").count() == 1


def test_the_header_of_the_table_stays_in_sight(opened: Open) -> None:
    scores = {f"m{i}": np.arange(30.0) for i in range(40)}
    page = opened(Content("t", replace(bare().known, scores=scores)))
    page.locator("#methods tbody tr").nth(30).scroll_into_view_if_needed()
    page.locator("#methods tbody tr").nth(20).evaluate(
        "e => e.scrollIntoView({block: 'center', behavior: 'instant'})"
    )
    bar, head = (
        page.locator(".bar").bounding_box(),
        page.locator("#methods thead th").first.bounding_box(),
    )
    assert head["y"] == pytest.approx(bar["y"] + bar["height"], abs=2)


def test_more_columns_show_what_the_narrow_table_leaves_out(opened: Open) -> None:
    page = opened()
    aupr = page.locator("#methods thead th", has_text="AUPR").first
    assert not aupr.is_visible()
    page.locator("#more").focus()
    page.keyboard.press("Space")
    assert aupr.is_visible()
    assert "[" in page.locator("#methods tbody .range").first.inner_text()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("content", [FULL, bare()], ids=["full", "bare"])
def test_nothing_overflows_and_the_table_is_not_clipped(
    opened: Open, content: Content, width: int
) -> None:
    groups = [replace(g, scores={**g.scores, LONG: g.scores["exact"]}) for g in content.groups]
    page = opened(
        replace(content, title=LONG, known=groups[0], unknown=groups[1:], about={LONG: LONG}),
        width=width,
    )
    choose(page, LONG)
    page.keyboard.press("Home")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    card = page.locator("#table-card").bounding_box()
    table = page.locator("#methods").bounding_box()
    assert table["x"] >= card["x"]
    assert table["x"] + table["width"] <= card["x"] + card["width"] + 0.5
    spilling = """() => [...document.querySelectorAll("main *, header *")].filter((e) => {
      const box = e.getBoundingClientRect();
      return box.width > 2 && box.height > 2 && !e.closest(".hidden, .range, .file")
        && (box.right > innerWidth + 1 || box.left < -1);
    }).map((e) => e.outerHTML.slice(0, 200))"""
    assert page.evaluate(spilling) == []
    cut = """() => [...document.querySelectorAll("#methods th, #methods td")]
      .filter((e) => e.offsetParent && e.scrollWidth > e.clientWidth + 1).map((e) => e.outerHTML.slice(0, 200))"""
    assert page.evaluate(cut) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("content", [FULL, bare()], ids=["full", "bare"])
def test_axe_finds_no_barrier(
    opened: Open, axe: str, content: Content, width: int, scheme: str
) -> None:
    page = opened(content, width=width, scheme=scheme, bypass_csp=True)
    page.evaluate(axe)
    for change in ("0", "document.querySelectorAll('#more, #unfold').forEach((e) => e.click())"):
        page.evaluate(change)
        found = page.evaluate("axe.run()")
        said = [
            (v["id"], v["help"], [n["html"][:150] for n in v["nodes"]][:3])
            for v in found["violations"]
        ]
        assert said == []


def test_the_dark_scheme_changes_page_and_drawings_at_once(opened: Open) -> None:
    page = opened()
    ask = """() => [getComputedStyle(document.body).backgroundColor,
      ...["#ridge-rows path", "#roc .curve", "#roc .gridline", "#methods .dot", ".tick"].map((s) => {
        const style = getComputedStyle(document.querySelector(s));
        return style.fill + style.stroke + style.backgroundColor + style.color;
      })]"""
    light = page.evaluate(ask)
    page.emulate_media(color_scheme="dark")
    dark = page.evaluate(ask)
    assert all(a != b for a, b in zip(light, dark, strict=True))


def test_every_image_says_what_it_is(opened: Open) -> None:
    page = opened()
    alts = page.eval_on_selector_all("#pictures img", "all => all.map(i => i.alt)")
    assert len(alts) == 3 * 2 * 8
    assert all(
        ", predicted " in alt and ", score " in alt and "\N{NO-BREAK SPACE}%" in alt for alt in alts
    )
    assert page.eval_on_selector_all(
        "img", "all => all.every(i => i.complete && i.naturalWidth === 8)"
    )
    known = FULL.known
    index = int(np.argmin(known.scores["exact"]))
    caption = page.locator("#pictures li").first.inner_text().splitlines()
    assert caption[0] == known.images.ids[index]
    assert known.confidence is not None
    assert caption[1].endswith(percent(known.confidence[index]))
    assert known.images.classes[known.predicted[index]] in caption[1]
    assert caption[-1].startswith("score ")


def test_confident_mistakes_have_a_strip_of_their_own(opened: Open) -> None:
    page = opened()
    known = FULL.known
    assert known.correct is not None
    assert known.confidence is not None
    worst = known.images.ids[int(np.argmax(np.where(known.correct, 0, known.confidence)))]
    first = page.locator("#worst li").first
    assert first.locator(".file").inner_text() == worst
    assert page.locator("#worst li").count() == min(16, int((~known.correct).sum()))
    assert page.locator("#worst img.wrong").count() == page.locator("#worst li").count()
    assert page.locator("#worst li .is-wrong").first.inner_text().endswith(": wrong")


def test_the_edge_of_an_image_follows_the_line(opened: Open) -> None:
    page = opened()
    known = FULL.known.scores["exact"]
    for share in ("95", "40"):
        page.locator("#coverage").fill(share)
        accepted = Threshold.from_scores(known, coverage=float(share) / 100).accept(known)
        shown = page.eval_on_selector_all(
            "#gallery li[data-group='0']",
            """all => all.map((e) => [Number(e.dataset.index), e.querySelector(".edge").className.slice(5),
                                      e.querySelector(".state").textContent])""",
        )
        assert {state for _, state, _ in shown} == {"accepted", "flagged"}
        for index, edge, word in shown:
            assert edge == word == ("accepted" if accepted[index] else "flagged")


def test_layers_have_a_bar_for_each_group_where_the_method_has_layers(opened: Open) -> None:
    page = opened()
    assert page.locator(".layer h3").all_inner_texts() == [
        "Conv 5×5 · conv1",
        "Conv 3×3 · conv2",
        "Linear · fc",
    ]
    assert page.locator(".layer").first.locator(".who").all_inner_texts() == ["digits", "letters"]
    choose(page, "wide")
    assert page.locator(".layer").count() == 0
    assert "wide does not use gradients" in page.locator("#layers-summary").inner_text()
    assert not page.locator("#layer-bars").is_visible()


def test_the_scores_are_downloaded_with_the_decision(opened: Open, tmp_path: Path) -> None:
    page = opened()
    page.locator("#coverage").fill("70")
    page.locator("#download").focus()
    with page.expect_download() as waiting:
        page.keyboard.press("Enter")
    assert waiting.value.suggested_filename == "scores.csv"
    waiting.value.save_as(tmp_path / "scores.csv")
    with open(tmp_path / "scores.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    groups = [(g, i) for g in FULL.groups for i in range(len(g.images))]
    assert len(rows) == len(groups) == 300
    threshold = Threshold.from_scores(FULL.known.scores["exact"], coverage=0.7)
    for row, (g, i) in zip(rows, groups, strict=True):
        assert row["group"] == g.name
        assert row["id"] == (g.images.ids[i] if g.images.ids else str(i))
        assert [float(row[f"score_{m}"]) for m in FULL.methods] == [
            float(g.scores[m][i]) for m in FULL.methods
        ]
        assert g.confidence is not None
        assert float(row["confidence"]) == g.confidence[i]
        assert row["accepted"] == ("true" if g.scores["exact"][i] <= threshold.value else "false")


def test_every_figure_has_a_name_and_a_summary(opened: Open) -> None:
    page = opened()
    charts = page.locator(".chart").all()
    assert len(charts) == 2 + 2
    for chart in charts:
        assert chart.get_attribute("role") == "img"
        for name in chart.get_attribute("aria-labelledby").split():
            assert len(page.locator(f"#{name}").inner_text()) > 3
        assert chart.locator("path.curve").count() > 0
    assert page.locator("#ridges-summary").inner_text().startswith("Median scores: digits ")


def test_tab_reaches_every_control_and_shows_where_it_is(opened: Open) -> None:
    page = opened()
    there = f"[...document.querySelectorAll(`{CONTROLS}`)].filter((e) => e.offsetParent || e.className === 'skip')"
    count = page.evaluate(f"{there}.length")
    assert count > 15
    found = set()
    for step in range(count):
        page.keyboard.press("Tab")
        index, outline = page.evaluate(
            f"[{there}.indexOf(document.activeElement), getComputedStyle(document.activeElement).outlineStyle]"
        )
        assert outline != "none", step
        found.add(index)
    assert found == set(range(count))


def test_the_skip_link_leads_to_the_report(opened: Open) -> None:
    page = opened()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"


def test_names_that_look_like_markup_are_shown_as_they_are(opened: Open) -> None:
    page = opened(full(known=NASTY, title=NASTY))
    assert page.locator("h1").inner_text() == NASTY
    assert page.locator("#pictures h3").first.inner_text() == f"{NASTY}, known"
    assert page.locator(".ridge-name").first.text_content() == NASTY
    assert page.locator("script").count() == 2


@pytest.mark.parametrize("labeled", [False, True])
def test_a_report_of_known_images_alone_works(opened: Open, labeled: bool) -> None:
    page = opened(Content("Alone", group("digits", 30, 0, labeled=labeled)))
    assert page.locator("#accuracy").count() == labeled
    answer = page.locator("#answer").inner_text()
    assert (
        "predictions are right, compared with"
        if labeled
        else "images of digits and flags 1; without labels"
    ) in answer
    choose(page, "flat")
    assert told(page, "covered") == 1
    text = page.locator("body").inner_text()
    assert not any(word in text for word in ("NaN", "undefined", "Infinity", "null"))
    assert page.locator("#layers, #learning, #roc").count() == 0
    assert page.locator("#worst li").count() == (
        int((~group("digits", 30, 0, labeled=True).correct).sum()) if labeled else 0
    )
    assert ("have no labels" in page.locator("#worst").inner_text()) != labeled


@pytest.mark.parametrize("part", ["layers", "cycles", "unknown", "confidence"])
def test_a_missing_part_raises_no_errors(opened: Open, part: str) -> None:
    without: dict[str, Any] = {
        "layers": {"layers": {}},
        "cycles": {"cycles": ()},
        "unknown": {"unknown": (), "layers": {}},
        "confidence": {"known": replace(FULL.known, confidence=None)},
    }
    opened(replace(FULL, **without[part]))
