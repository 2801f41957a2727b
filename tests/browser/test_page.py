"""The report in a browser: right numbers under the slider, by keyboard, on a phone, in the dark, and offline."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qualms import Threshold, metrics
from qualms.report.content import Content
from qualms.report.page import write_page
from tests.report.contents import LONG, NASTY, bare, full, group

pytestmark = pytest.mark.browser
Open = Callable[..., Any]
FULL = full()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report with everything, written once."""
    return write_page(FULL, tmp_path_factory.mktemp("report") / "report.html", resamples=10)


@pytest.fixture
def opened(browser: Any, report: Path, tmp_path: Path) -> Iterator[Open]:
    """Write a report and look at it; whatever goes wrong on the page fails the test in the end."""
    troubles: list[str] = []
    contexts = []

    def look(content: Content = FULL, width: int = 1200, scheme: str = "light") -> Any:
        context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
        contexts.append(context)
        path = report if content is FULL else write_page(content, tmp_path / "report.html", resamples=10)
        page = context.new_page()
        page.on("pageerror", lambda error: troubles.append(f"error: {error}"))
        page.on("dialog", lambda dialog: troubles.append(f"dialog: {dialog.message}"))
        page.on("console", lambda said: troubles.append(said.text) if said.type in ("error", "warning") else None)
        page.on("request", lambda asked: None if mine(asked.url, path) else troubles.append(f"asks for {asked.url}"))
        page.goto(path.as_uri())
        page.locator("#histogram .main-svg").first.wait_for()
        return page

    yield look
    for context in contexts:
        context.close()
    assert troubles == []


def wait_until(page: Any, expression: str) -> None:
    """Playwright's own waiting runs `eval` inside the page, which the page forbids."""
    for _ in range(100):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"never true: {expression}")


def mine(address: str, path: Path) -> bool:
    return address == path.as_uri() or address.startswith(("data:", "blob:"))


def told(page: Any, name: str) -> float:
    """A number of the threshold's, which must also be what is shown."""
    found = page.locator(f"#{name}")
    value, text = float(found.get_attribute("data-value")), found.inner_text()
    assert text == (f"{value:.4g}" if name == "threshold" else f"{100 * value:.1f} %")
    return value


def check_numbers(page: Any, content: Content, method: str) -> None:
    """The numbers on the page, against those that Python finds at the slider's position."""
    share = float(page.locator("#coverage").input_value()) / 100
    known = content.known.scores[method]
    threshold = Threshold.from_scores(known, coverage=share)
    covered = float(threshold.accept(known).double().mean())
    assert told(page, "threshold") == pytest.approx(threshold.value, rel=1e-12)
    assert told(page, "covered") == pytest.approx(covered)
    right = 1 - metrics.selective_risk(known, content.known.correct, covered)
    assert told(page, "accuracy") == pytest.approx(right)
    for i, other in enumerate(content.unknown, 1):
        through = float(threshold.accept(other.scores[method]).double().mean())
        assert told(page, f"let-through-{i}") == pytest.approx(through)
    spoken = page.locator("#coverage").get_attribute("aria-valuetext")
    assert f"{100 * covered:.1f} % of {content.known.name} accepted" in spoken


def test_the_slider_moved_by_keyboard_shows_the_right_numbers(opened: Open) -> None:
    page = opened()
    slider = page.locator("#coverage")
    assert slider.input_value() == "95"
    for method in ("exact", "tied", "wide", "flat"):
        page.select_option("#method", label=method)
        check_numbers(page, FULL, method)
        slider.focus()
        seen = set()
        for keys in (
            ["Home"],
            7 * ["ArrowRight"],
            4 * ["PageUp"],
            ["ArrowLeft"],
            ["PageUp"],
            ["End"],
            2 * ["PageDown"],
        ):
            for key in keys:
                page.keyboard.press(key)
            seen.add(slider.input_value())
            check_numbers(page, FULL, method)
        assert len(seen) == 7
        assert {"0.5", "4", "100"} <= seen


def test_the_line_in_the_histogram_follows_the_slider(opened: Open) -> None:
    page = opened()
    page.select_option("#method", label="exact")
    line = "document.querySelector('#histogram').layout.shapes[0].x0"
    values = FULL.known.scores["exact"]
    assert page.evaluate(line) == pytest.approx(Threshold.from_scores(values, coverage=0.95).value)
    page.locator("#coverage").focus()
    page.keyboard.press("Home")
    for _ in range(9):
        page.keyboard.press("ArrowRight")
    assert page.evaluate(line) == pytest.approx(Threshold.from_scores(values, coverage=0.05).value)


def test_another_method_changes_plots_numbers_and_images(opened: Open) -> None:
    page = opened()

    def state() -> list[Any]:
        drawn = [
            page.evaluate(f"JSON.stringify(document.querySelector('#{i}').data)")
            for i in ("histogram", "roc", "lift", "layers-0")
        ]
        images = page.eval_on_selector_all("#pictures img", "all => all.map(i => i.alt)")
        captions = [page.locator(f"#{i}-summary").inner_text() for i in ("histogram", "roc", "lift")]
        return [*drawn, images, *captions, told(page, "threshold"), page.locator("#gallery .chosen").inner_text()]

    page.select_option("#method", label="exact")
    first = state()
    page.locator("#method").focus()
    page.select_option("#method", label="wide")
    second = state()
    assert all(a != b for i, (a, b) in enumerate(zip(first, second, strict=True)) if i not in (1, 2, 3, 6, 7))
    page.select_option("#method", label="tied")
    assert all(a != b for a, b in zip(first, state(), strict=True))
    page.select_option("#method", label="exact")
    assert state() == first


def test_the_first_method_is_the_best(opened: Open) -> None:
    content, page = FULL, opened()
    means = {
        m: np.mean([metrics.auroc(content.known.scores[m], g.scores[m]) for g in content.unknown])
        for m in content.methods
    }
    assert page.locator("#method option:checked").inner_text() == max(means, key=lambda m: means[m])
    assert page.locator("#methods tbody th").all_inner_texts() == sorted(means, key=lambda m: -means[m])


def test_the_table_sorts_by_any_column(opened: Open) -> None:
    content, page = FULL, opened()
    heading = page.locator("#methods thead th").nth(6)
    assert "rAULC" in heading.inner_text()
    heading.locator("button").focus()
    page.keyboard.press("Enter")
    lift = {m: metrics.raulc(s, content.known.correct) for m, s in content.known.scores.items()}
    assert heading.get_attribute("aria-sort") == "descending"
    assert page.locator("#methods tbody th").all_inner_texts() == sorted(lift, key=lambda m: -lift[m])
    page.keyboard.press("Enter")
    assert page.locator("#methods tbody th").all_inner_texts() == sorted(lift, key=lambda m: lift[m])
    page.locator("#methods thead button").first.click()
    assert page.locator("#methods tbody th").all_inner_texts() == sorted(lift)
    assert page.locator("#methods [aria-sort]").count() == 1


def test_the_dark_scheme_changes_page_and_plots_at_once(opened: Open) -> None:
    page = opened()
    ask = """() => {
      const plot = document.querySelector("#histogram");
      const title = document.querySelector("#glance-0 .xtitle");
      return [getComputedStyle(document.body).backgroundColor, plot.layout.font.color, plot.data[0].line.color,
              plot.data[1].fillcolor, getComputedStyle(title).fill];
    }"""
    light = page.evaluate(ask)
    page.emulate_media(color_scheme="dark")
    wait_until(page, "document.querySelector('#histogram').layout.font.color === '#e8ebef'")
    dark = page.evaluate(ask)
    assert all(a != b for a, b in zip(light, dark, strict=True))
    assert "var(" not in "".join(light + dark)


@pytest.mark.parametrize("content", [FULL, bare()], ids=["full", "bare"])
def test_nothing_overflows_on_a_phone(opened: Open, content: Content) -> None:
    groups = [replace(g, scores={**g.scores, LONG: g.scores["exact"]}) for g in content.groups]
    page = opened(replace(content, title=LONG, known=groups[0], unknown=groups[1:], about={LONG: LONG}), width=375)
    page.select_option("#method", label=LONG)
    for width in (375, 320):
        page.set_viewport_size({"width": width, "height": 800})
        plots = "[...document.querySelectorAll('.plot .main-svg')].map(p => p.getBoundingClientRect().right)"
        wait_until(page, f"Math.max(...{plots}) <= {width}")
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_every_image_says_what_it_is(opened: Open) -> None:
    page = opened()
    alts = page.eval_on_selector_all("img", "all => all.map(i => i.alt)")
    assert len(alts) == 3 * 2 * 8
    assert all(", predicted " in alt and ", score " in alt for alt in alts)
    loaded = page.eval_on_selector_all("img", "all => all.every(i => i.complete && i.naturalWidth === 8)")
    assert loaded
    crisp = page.eval_on_selector_all(
        "img", "all => all.every(i => getComputedStyle(i).imageRendering === 'pixelated')"
    )
    assert crisp


def test_every_figure_has_a_name_and_a_summary(opened: Open) -> None:
    page = opened()
    plots = page.locator(".plot").all()
    assert len(plots) == 2 + 3 + 2 + 2
    for plot in plots:
        assert plot.get_attribute("role") == "img"
        for name in plot.get_attribute("aria-labelledby").split():
            assert len(page.locator(f"#{name}").inner_text()) > 3
        assert plot.locator(".main-svg").count() > 0


def test_tab_reaches_every_control_and_shows_where_it_is(opened: Open) -> None:
    page = opened()
    controls = "a[href], button, select, input, textarea, [tabindex='0']"
    count = page.evaluate(f"document.querySelectorAll(`{controls}`).length")
    assert count > 12
    found = set()
    for step in range(count):
        page.keyboard.press("Tab")
        index, outline = page.evaluate(
            f"""() => [[...document.querySelectorAll(`{controls}`)].indexOf(document.activeElement),
                       getComputedStyle(document.activeElement).outlineStyle]"""
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
    content = full(known=NASTY, title=NASTY)
    page = opened(content)
    assert page.locator("h1").inner_text() == NASTY
    assert page.locator("#pictures h3").first.inner_text() == f"{NASTY}, known"
    legend = page.locator("#histogram .legendtext").first.text_content()
    assert legend == f"{NASTY[:27]}…"
    assert page.locator("script").count() == 3


@pytest.mark.parametrize("labelled", [False, True])
def test_a_report_of_known_images_alone_works(opened: Open, labelled: bool) -> None:
    page = opened(Content("Alone", group("digits", 30, 0, labelled=labelled)))
    assert page.locator("#accuracy").count() == labelled
    page.select_option("#method", label="flat")
    assert told(page, "covered") == 1
    text = page.locator("body").inner_text()
    assert not any(word in text for word in ("NaN", "undefined", "Infinity", "null"))
    assert page.locator("#layers, #learning, #roc").count() == 0


@pytest.mark.parametrize("part", ["layers", "cycles", "unknown"])
def test_a_missing_part_raises_no_errors(opened: Open, part: str) -> None:
    without: dict[str, Any] = {
        "layers": {"layers": None},
        "cycles": {"cycles": ()},
        "unknown": {"unknown": (), "layers": None},
    }
    opened(replace(FULL, **without[part]))
