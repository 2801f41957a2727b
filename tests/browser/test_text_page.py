"""The page about texts in a browser: right shades and marks, notes by mouse and keys, at every
width, in the dark.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qualms import Threshold
from qualms.report.text_page import write_text_page
from qualms.texts.document import ScoredDocument
from qualms.texts.spans import worst_span
from tests.helpers.scored_texts import (
    LIKELY,
    METHODS,
    NASTY,
    PAPER,
    STORY,
    cut,
    noise,
    scored,
    some,
)

pytestmark = pytest.mark.browser
Open = Callable[..., Any]
SOME = some()
NAMES = [each.document.name for each in SOME]
WIDTHS = (1440, 768, 360)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page that most tests look at, written once."""
    return write_text_page(
        SOME, tmp_path_factory.mktemp("texts") / "texts.html", "Some texts", {"Model": "made up"}
    )


@pytest.fixture
def opened(look: Open, written: Path, tmp_path: Path) -> Open:
    """Write a page about texts and look at it."""

    def written_and_opened(documents: Sequence[ScoredDocument] = SOME, **options: Any) -> Any:
        new = documents is not SOME
        page = look(
            write_text_page(documents, tmp_path / "t.html", "Texts", {}) if new else written,
            **options,
        )
        for number in range(len(documents)):
            page.locator(f"#document-{number}").scroll_into_view_if_needed()
            page.locator(f"#document-{number} .t").first.wait_for()
        return page

    return written_and_opened


def values(method: str, documents: Sequence[ScoredDocument] = SOME) -> np.ndarray:
    """The scores of all tokens that are in a text and have one."""
    found = np.concatenate([np.array(each.scores[method][1:]) for each in documents])
    return found[~np.isnan(found)]


def classes(page: Any, number: int) -> list[list[str]]:
    found = page.eval_on_selector_all(
        f"#document-{number} .t", "all => all.map((e) => e.className)"
    )
    return [each.split() for each in found]


def check_shades(page: Any, method: str, share: float) -> None:
    """Every token's shade and mark, against what Python finds."""
    every = values(method)
    threshold = Threshold.from_scores(every, coverage=1 - share)
    marked = 0
    for number, each in enumerate(SOME):
        found = classes(page, number)
        assert len(found) == len(each.ids) - 1  # all but the one in front of the text
        for names, score in zip(found, each.scores[method][1:], strict=True):
            tenth = 0 if np.isnan(score) else int(10 * (every < score).mean() + 1e-9)
            assert names[:2] == ["t", f"s{tenth}"]
            assert ("m" in names) == (score > threshold.value)
            marked += "m" in names
    assert marked == (every > threshold.value).sum()
    assert page.locator("#marked").inner_text().split() == [str(marked), "of", str(len(every))]
    told = page.locator("#marked-share").text_content()
    assert told.endswith(
        f": {marked} token{'s' * (marked != 1)} with a score above {threshold.value:.4g}"
    )
    assert page.locator("#share").get_attribute("aria-valuetext") == told


def slide(page: Any, percent: float) -> None:
    page.locator("#share").fill(str(percent))


def token(page: Any, number: int, index: int) -> Any:
    return page.locator(f"#document-{number} .t").nth(index)


def names_in_order(page: Any) -> list[str]:
    listed = page.locator("#list .name").all_inner_texts()
    assert page.locator("article h2").all_inner_texts() == listed
    return listed


def test_texts_are_shown_as_they_are(opened: Open) -> None:
    page = opened()
    for number, each in enumerate(SOME):
        body = page.locator(f"#document-{number} .text")
        assert body.evaluate("e => e.textContent") == each.document.text
        tokens = page.eval_on_selector_all(
            f"#document-{number} .t", "all => all.map((e) => e.textContent)"
        )
        assert tokens == each.tokens[1:]
        assert body.evaluate("e => getComputedStyle(e).whiteSpaceCollapse") == "preserve"


@pytest.mark.parametrize("share", [10, 0, 0.5, 25, 50])
def test_the_slider_marks_the_right_tokens(opened: Open, share: float) -> None:
    page = opened()
    slide(page, share)
    check_shades(page, "regrad", share / 100)


def test_the_slider_moves_by_keys(opened: Open) -> None:
    page = opened()
    page.locator("#share").focus()
    for _ in range(4):
        page.keyboard.press("ArrowRight")
    assert page.locator("#share").input_value() == "12"
    check_shades(page, "regrad", 0.12)


def test_another_method_changes_shades_marks_spans_and_order(opened: Open) -> None:
    page = opened()
    check_shades(page, "regrad", 0.1)
    before = [classes(page, number) for number in range(3)]
    page.select_option("#method", label="entropy")
    check_shades(page, "entropy", 0.1)
    assert all(classes(page, number) != before[number] for number in range(3))
    assert "entropy" in page.locator("#answer").inner_text()
    assert names_in_order(page) == sorted(NAMES, key=lambda name: -worst(name, "entropy"))
    page.select_option("#method", label="regrad")
    assert [classes(page, number) for number in range(3)] == before


def worst(name: str, method: str) -> float:
    span = worst_span(SOME[NAMES.index(name)].scores[method][1:])
    assert span is not None
    return span.score


def test_shades_differ_and_marked_tokens_are_underlined(opened: Open) -> None:
    page = opened()
    style = "e => [getComputedStyle(e).backgroundColor, getComputedStyle(e).textDecorationLine]"
    shades = [page.locator(f"article .t.s{step}").first.evaluate(style)[0] for step in range(10)]
    assert len(set(shades)) == 10
    assert page.locator("article .m").first.evaluate(style)[1] == "underline"
    assert page.locator(".t.s3:not(.m)").first.evaluate(style)[1] == "none"


def test_the_worst_span_is_outlined_and_quoted(opened: Open) -> None:
    page = opened()
    for method in METHODS:
        page.select_option("#method", label=method)
        for number, each in enumerate(SOME):
            span = worst_span(each.scores[method][1:])
            assert span is not None
            marked = page.locator(f"#document-{number} mark.worst")
            assert marked.count() == 1
            assert marked.evaluate("e => e.textContent") == "".join(
                each.tokens[1:][span.start : span.end]
            )
            assert (
                f"worst span {span.score:.4g}"
                in page.locator(f"#document-{number} .numbers").inner_text()
            )
            assert page.locator(f"#row-{number} .worst-score").inner_text() == f"{span.score:.4g}"
    page.select_option("#method", label="regrad")
    first = max(NAMES, key=lambda name: worst(name, "regrad"))
    quoted = page.locator(f"#document-{NAMES.index(first)} mark.worst").evaluate(
        "e => e.textContent"
    )
    answer = page.locator("#answer").inner_text()
    assert first in answer
    assert " ".join(quoted.split()) in answer


def test_texts_are_sorted_by_worst_span_or_by_name(opened: Open) -> None:
    page = opened()
    assert names_in_order(page) == ["c-story", "a-poem", "b-paper"]
    page.locator("#by-name").check()
    assert names_in_order(page) == ["a-poem", "b-paper", "c-story"]
    page.select_option("#method", label="entropy")
    assert names_in_order(page) == ["a-poem", "b-paper", "c-story"]
    page.locator("#by-worst").check()
    assert names_in_order(page) == sorted(NAMES, key=lambda name: -worst(name, "entropy"))


def test_pointing_at_a_token_shows_what_the_model_expected(opened: Open) -> None:
    page = opened()
    note, number, index = page.locator("#tip"), 1, 3
    assert note.is_hidden()
    token(page, number, index).hover()
    note.wait_for(state="visible")
    each, score = SOME[number], SOME[number].scores["regrad"][1 + index]
    rank = 100 * (values("regrad") < score).mean()
    log = each.next_log_probs[1 + index]
    text = note.inner_text().replace("\N{NO-BREAK SPACE}", " ")
    assert note.locator(".head code").inner_text() == each.tokens[1 + index].replace(" ", "␣")
    assert f"score {score:.4g}" in text
    assert f"higher than {round(rank, 1):g} % of all tokens" in text
    assert (
        f"followed by {each.tokens[2 + index].replace(' ', '␣')}: {round(100 * np.exp(log), 1):g} %"
        in text
    )
    assert f"log p −{-log:.4g}" in text
    assert note.locator(".likely code").all_inner_texts() == [
        "␣the",
        "␣dog",
        ".",
        "↵",
        NASTY.replace(" ", "␣"),
    ]
    shown = [
        each.replace("\N{NO-BREAK SPACE}", " ")
        for each in note.locator(".likely .much").all_inner_texts()
    ]
    assert shown == ["50 %", "25 %", "12.5 %", "6.3 %", "< 0.1 %"]
    page.mouse.move(5, 5)
    note.wait_for(state="hidden")


def test_the_token_that_came_is_ticked_among_the_likely_ones(opened: Open) -> None:
    document = scored("t", "a the cat", {"regrad": [1.0, 2.0]})
    page = opened([document])
    token(page, 0, 0).hover()
    assert page.locator("#tip .came code").all_inner_texts() == ["␣the"]
    token(page, 0, 1).hover()
    assert page.locator("#tip .came").count() == 0
    assert len(LIKELY) == page.locator("#tip .likely li").count()


def test_the_last_token_has_no_score_and_nothing_follows_it(opened: Open) -> None:
    page = opened()
    last = token(page, 1, len(SOME[1].ids) - 2)
    last.hover()
    note = page.locator("#tip").inner_text()
    assert "without a score" in note
    assert "end of the text" in note
    assert last.get_attribute("class") == "t s0"


def test_what_comes_after_the_text_is_not_taken_for_a_part_of_it(opened: Open) -> None:
    document = scored("t", "a b", {"regrad": [1.0]})
    ended = replace(
        document,
        ids=(*document.ids, 2),
        offsets=(*document.offsets, (0, 0)),
        scores={"regrad": (*document.scores["regrad"], 3.0)},
        alternatives=(LIKELY,) * 4,
        next_log_probs=(-1.0, -1.0, -2.0, np.nan),
    )
    page = opened([ended])
    assert page.locator(".t").all_inner_texts() == ["a", " b"]
    token(page, 0, 1).hover()
    assert "followed by a token that is not in the text: 13.5" in page.locator("#tip").inner_text()


def test_tokens_are_reached_by_keyboard_alone(opened: Open) -> None:
    page = opened()
    number = NAMES.index("c-story")
    scores = np.array(SOME[number].scores["regrad"][1:])
    span = worst_span(scores)
    assert span is not None
    page.locator("article .jump").first.focus()
    page.keyboard.press("Tab")
    focused = (
        "[document.activeElement.token, document.activeElement.getAttribute('aria-describedby')]"
    )
    assert page.evaluate(focused) == [span.start, "tip"]
    note = page.locator("#tip")
    assert f"score {scores[span.start]:.4g}" in note.inner_text()
    page.keyboard.press("ArrowRight")
    assert f"score {scores[span.start + 1]:.4g}" in note.inner_text()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowLeft")
    assert page.evaluate(focused)[0] == 0
    after = [i for i, names in enumerate(classes(page, number)) if "m" in names and i > 0]
    assert len(after) > 1
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    assert page.evaluate(focused)[0] == after[1]
    assert "; marked" in note.inner_text()
    page.keyboard.press("ArrowUp")
    assert page.evaluate(focused)[0] == after[0]
    page.keyboard.press("End")
    assert page.evaluate(focused)[0] == len(scores) - 1
    page.keyboard.press("Escape")
    assert note.is_hidden()
    page.keyboard.press("Shift+Tab")
    assert page.evaluate("document.activeElement.className") == "jump"
    assert page.locator(f"#document-{number} .t[tabindex]").count() == 1


def test_a_click_holds_the_note_of_a_token(opened: Open) -> None:
    page = opened()
    token(page, 0, 4).click()
    page.mouse.move(5, 5)
    head = page.locator("#tip .head code")
    assert head.inner_text() == SOME[0].tokens[5].replace(" ", "␣")
    assert page.evaluate("document.activeElement.token") == 4


def test_a_tap_shows_the_note(opened: Open) -> None:
    page = opened(width=360, has_touch=True)
    token(page, 0, 4).tap()
    page.locator("#tip").wait_for(state="visible")
    assert page.locator("#tip .head code").inner_text() == SOME[0].tokens[5].replace(" ", "␣")


def test_the_list_leads_to_a_text_and_a_button_to_its_worst_span(opened: Open) -> None:
    long = [noise(f"text {i}", f"{STORY}\n" * 40, i) for i in range(3)]
    page = opened(long, reduced_motion="reduce")
    page.locator("#list a", has_text="text 2").click()
    head = page.locator("#name-2").bounding_box()
    bar = page.locator(".bar").bounding_box()
    assert bar["y"] + bar["height"] <= head["y"] < 300
    page.locator("#document-2 .jump").click()
    seen = page.locator("#document-2 mark.worst").bounding_box()
    assert 0 < seen["y"] < 800
    span = worst_span(long[2].scores["regrad"][1:])
    assert span is not None
    assert page.evaluate("document.activeElement.token") == span.start


def test_a_click_on_the_strip_goes_there(opened: Open) -> None:
    long = noise("long", f"{STORY}\n" * 60, 1)
    page = opened([long], reduced_motion="reduce")
    box = page.locator("article .strip").bounding_box()
    page.locator("article .strip").click(position={"x": 0.5 * box["width"], "y": 2})
    assert page.evaluate("document.activeElement.token") == pytest.approx(
        (len(long.ids) - 1) / 2, abs=3
    )


@pytest.mark.parametrize("width", WIDTHS)
def test_a_note_is_never_cut_off(opened: Open, width: int) -> None:
    page = opened(width=width)
    for index in range(0, len(SOME[2].ids) - 1, 7):
        token(page, 2, index).hover()
        box = page.locator("#tip").bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width
    assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_is_wider_than_the_page(opened: Open, width: int) -> None:
    name = "a-name-without-an-end-" * 12
    page = opened([noise(name, "x" * 400 + " " + PAPER, 1), noise(NASTY, STORY, 2)], width=width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    spilling = """() => [...document.querySelectorAll("main *, header *")].filter((e) => {
      const box = e.getBoundingClientRect();
      return box.width > 2 && box.height > 2 && (box.right > innerWidth + 1 || box.left < -1);
    }).map((e) => e.outerHTML.slice(0, 200))"""
    assert page.evaluate(spilling) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_axe_finds_no_barrier(opened: Open, axe: str, width: int, scheme: str) -> None:
    page = opened(width=width, scheme=scheme, bypass_csp=True)
    page.evaluate(axe)
    for change in (
        lambda: None,
        lambda: slide(page, 50),
        lambda: page.locator("article .jump").first.click(),
    ):
        change()
        found = page.evaluate("axe.run()")
        said = [
            (v["id"], v["help"], [n["html"][:150] for n in v["nodes"]][:3])
            for v in found["violations"]
        ]
        assert said == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_text_is_legible_on_every_shade(opened: Open, scheme: str) -> None:
    page = opened(scheme=scheme)
    ratio = """(e) => {
      const paint = (color, under) => {
        const c = new OffscreenCanvas(1, 1).getContext("2d");
        for (const each of [under, color]) { c.fillStyle = each; c.fillRect(0, 0, 1, 1); }
        return [...c.getImageData(0, 0, 1, 1).data].slice(0, 3);
      };
      const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
      const light = (rgb) => rgb.reduce((sum, v, i) => sum + linear(v / 255) * [0.2126, 0.7152, 0.0722][i], 0);
      const [own, card] = [getComputedStyle(e), getComputedStyle(e.closest("article")).backgroundColor];
      const [a, b] = [own.backgroundColor, own.color].map((each) => light(paint(each, card)));
      return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    }"""
    ratios = [page.locator(f"article .t.s{step}").first.evaluate(ratio) for step in range(10)]
    assert min(ratios) >= 4.5
    assert ratios == sorted(ratios, reverse=True)
    assert ratios[0] > 1.5 * ratios[9]


def test_texts_that_look_like_markup_are_shown_as_they_are(opened: Open) -> None:
    page = opened([noise(NASTY, f"{NASTY}\n{NASTY}", 1), noise("other", STORY, 2)])
    assert page.locator("#document-0 .text").evaluate("e => e.textContent") == f"{NASTY}\n{NASTY}"
    assert page.locator("#name-0").inner_text() == NASTY
    assert page.locator("b").count() == 0
    assert page.locator("script").count() == 2


def test_equal_scores_are_neither_shaded_nor_marked(opened: Open) -> None:
    page = opened([scored("flat", STORY, {"regrad": [1.0] * (len(cut(STORY)) - 1)})])
    assert {tuple(names) for names in classes(page, 0)} == {("t", "s0")}
    assert page.locator("#marked").inner_text().split()[0] == "0"


def test_a_text_becomes_elements_only_when_it_comes_near(look: Open, tmp_path: Path) -> None:
    long = [noise(f"text {i}", f"{STORY}\n" * 80, i) for i in range(4)]
    page = look(write_text_page(long, tmp_path / "long.html", "t", {}), reduced_motion="reduce")
    page.locator("article .t").first.wait_for()
    last = page.locator("article").last
    assert last.locator(".t").count() == 0
    assert last.locator(".text").evaluate("e => e.textContent") == long[0].document.text
    last.locator(".jump").click()
    assert last.locator(".t").count() == len(long[0].ids) - 1


@pytest.mark.slow
def test_twenty_thousand_tokens_stay_usable(look: Open, tmp_path: Path) -> None:
    long = noise("long", f"{PAPER}\n" * 700, 1)
    assert len(long.ids) > 20_000
    page = look(write_text_page([long, noise("short", STORY, 2)], tmp_path / "long.html", "t", {}))
    page.locator("#document-0 .t").first.wait_for()
    page.locator("#by-name").check()
    took = page.evaluate(
        """() => ["method", "share"].map((id) => {
          const [control, start] = [document.getElementById(id), performance.now()];
          control.value = "1";
          control.dispatchEvent(new Event("input"));
          control.dispatchEvent(new Event("change"));
          document.body.getBoundingClientRect();
          return performance.now() - start;
        })"""
    )
    assert max(took) < 5000  # a sixth of that on a quiet machine
    assert page.locator("#document-0 .t").count() == len(long.ids) - 1
