"""The page about texts is one well-formed file: texts as they are, the worst first, nothing
fetched.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qualms import QualmsError
from qualms.report.text_page import ShownToken, shown_tokens, write_text_page
from qualms.texts.document import Document, ScoredDocument
from qualms.texts.spans import worst_span
from tests.helpers.pages import Page, check_offline, check_well_formed, unpacked
from tests.helpers.scored_texts import BEFORE, METHODS, NASTY, PAPER, STORY, noise, scored, some

Write = Callable[..., Page]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def written(
        documents: list[ScoredDocument], title: str = "Texts", about: dict[str, str] | None = None
    ) -> Page:
        return Page(
            write_text_page(documents, tmp_path / "texts.html", title, about or {}).read_text(
                "utf-8"
            )
        )

    return written


def browser_slice(text: str, start: int, end: int) -> str:
    """Slice a text as a browser does, by UTF-16 positions."""
    return text.encode("utf-16-le", "surrogatepass")[2 * start : 2 * end].decode("utf-16-le")


def shown(document: dict[str, Any]) -> list[str]:
    pairs = zip(unpacked(document["starts"]), unpacked(document["ends"]), strict=True)
    return [browser_slice(document["text"], start, end) for start, end in pairs]


def test_the_page_is_well_formed(write: Write) -> None:
    page = write(some(), about={"Model": "tiny"})
    check_well_formed(page)
    assert "Model: tiny" in page.words


def test_nothing_comes_from_elsewhere(write: Write) -> None:
    page = write(some())
    check_offline(page)


def test_texts_and_names_are_text_and_never_markup(write: Write) -> None:
    page = write(
        [noise(NASTY, f"a {NASTY} b", 1), noise("plain", "c d", 2)],
        title=NASTY,
        about={NASTY: NASTY},
    )
    assert "<script>alert" not in page.source
    assert "<b>" not in page.source
    assert [attrs.get("id") for tag, attrs in page.elements if tag == "script"] == ["data", None]
    assert page.words.count(NASTY) == 4  # twice as the title, in the list, above its text
    document = page.data["documents"][0]
    assert document["text"] == f"a {NASTY} b"
    assert document["name"] == NASTY
    assert NASTY in page.data["words"]


def test_the_text_that_the_model_knows_least_comes_first(write: Write) -> None:
    page = write(some())
    assert [str(i) for i in page.ids if str(i).startswith("document-")] == [
        "document-1",
        "document-2",
        "document-0",
    ]
    assert [str(i) for i in page.ids if str(i).startswith("row-")] == ["row-1", "row-2", "row-0"]
    names = [word for word in page.words if word in ("a-poem", "b-paper", "c-story")]
    assert names == ["c-story", "a-poem", "b-paper"] * 2


def test_a_text_without_scores_comes_last(write: Write) -> None:
    silent = noise("silent", STORY, 1)
    silent = replace(silent, scores={m: (math.nan,) * len(silent.ids) for m in METHODS})
    page = write([silent, noise("spoken", STORY, 1)])
    assert [i for i in page.ids if i.startswith("document-")] == ["document-1", "document-0"]
    assert page.data["documents"][0]["worst"] == [None, None]


def test_tokens_stand_where_a_browser_finds_them(write: Write) -> None:
    text = "😀 one\r\n𝔘𝔫 due\ttre"
    page = write([noise("plain", text, 1)])
    assert page.data["documents"][0]["text"] == text
    assert shown(page.data["documents"][0]) == ["😀", " one", "\r", "\n", "𝔘𝔫", " due", "\t", "tre"]


def test_scores_arrive_without_a_digit_lost_and_only_of_tokens_in_the_text(write: Write) -> None:
    documents = some()
    page = write(documents)
    assert page.data["methods"] == list(METHODS)
    for document, found in zip(documents, page.data["documents"], strict=True):
        for method, values in zip(METHODS, found["scores"], strict=True):
            assert np.array_equal(unpacked(values), document.scores[method][1:], equal_nan=True)
            assert BEFORE not in unpacked(values)
        assert np.array_equal(unpacked(found["logs"]), document.next_log_probs[1:], equal_nan=True)


def test_the_worst_span_is_that_of_the_tokens_in_the_text(write: Write) -> None:
    document = noise("story", STORY, 5)
    found = write([document]).data["documents"][0]
    for k, method in enumerate(METHODS):
        span = worst_span(document.scores[method][1:])
        assert span is not None
        assert found["worst"][k] == {"start": span.start, "end": span.end}
        assert unpacked(found["worstScores"])[k] == span.score


def test_the_likeliest_tokens_arrive_in_order(write: Write) -> None:
    document = scored("t", "a b c", {"regrad": [1.0, 2.0]})
    rows = ((), ((" b", 0.9), (" x", 0.1)), ((" c", 0.75),), ())
    data = write([replace(document, alternatives=rows)]).data
    found = data["documents"][0]
    assert found["width"] == 2
    words = [data["words"][code] if code >= 0 else None for code in unpacked(found["codes"])]
    assert words == [" b", " x", " c", None, None, None]
    assert unpacked(found["probs"]).tolist() == [0.9, 0.1, 0.75, 0, 0, 0]


def test_the_bytes_of_a_character_are_shown_as_one_token_with_their_highest_score(
    write: Write,
) -> None:
    offsets = ((0, 0), (0, 1), (1, 2), (1, 2), (1, 2), (2, 4))
    assert shown_tokens(offsets) == [
        ShownToken(0, 1, (1,)),
        ShownToken(1, 2, (2, 3, 4)),
        ShownToken(2, 4, (5,)),
    ]
    values = (9.0, 1.0, 2.0, 7.0, 3.0, math.nan)
    likely = tuple(((str(i), 0.5),) for i in range(6))
    document = ScoredDocument(
        Document("t", "a😀 b"), tuple(range(6)), offsets, {"m": values}, likely, (-1.0,) * 6
    )
    data = write([document]).data
    found = data["documents"][0]
    assert shown(found) == ["a", "😀", " b"]
    assert np.array_equal(unpacked(found["scores"][0]), [1.0, 7.0, math.nan], equal_nan=True)
    assert unpacked(found["counts"]).tolist() == [1, 3, 1]
    assert found["worst"] == [{"start": 0, "end": 2}]
    assert unpacked(found["worstScores"]).tolist() == [(1 + 2 + 7 + 3) / 4]
    assert [data["words"][code] for code in unpacked(found["codes"])] == [
        "1",
        "4",
        "5",
    ]  # after the whole character


def test_tokens_that_overlap_are_cut_where_the_one_before_ends() -> None:
    assert shown_tokens([(0, 3), (2, 5), (5, 5), (6, 8)]) == [
        ShownToken(0, 3, (0,)),
        ShownToken(3, 5, (1,)),
        ShownToken(6, 8, (3,)),
    ]


def test_an_empty_text_makes_a_page(write: Write) -> None:
    empty = ScoredDocument(
        Document("empty", ""), (1,), ((0, 0),), dict.fromkeys(METHODS, (1.0,)), ((),), (math.nan,)
    )
    assert write([empty, noise("other", STORY, 1)]).wrong == []
    assert write([empty]).data["documents"][0]["worst"] == [None, None]


def test_texts_scored_by_different_methods_are_refused(write: Write) -> None:
    with pytest.raises(
        QualmsError, match=r"two is scored by gen, and one by regrad, entropy; score all texts"
    ):
        write([noise("one", STORY, 1), scored("two", "a b", {"gen": [1.0]})])
    with pytest.raises(QualmsError, match="there are no texts"):
        write([])
    with pytest.raises(QualmsError, match="bare has no scores"):
        write([scored("bare", "a b", {})])


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(QualmsError, match=r"page\.html cannot be written"):
        write_text_page(some(), tmp_path / "file" / "page.html", "t", {})


def test_the_page_is_light(write: Write) -> None:
    long = noise("long", f"{PAPER}\n" * 250, 1)
    assert len(long.ids) > 7000
    assert len(write([long]).source) < 1_500_000
