"""`qualms report --tokens`: a page about texts, and what is told before the work."""

import json
import os
import webbrowser
from pathlib import Path

import numpy as np
import pytest

from qualms.cli import input_texts
from qualms.data.texts import Document
from qualms.models.language import load_language_model
from qualms.texts.document_scores import score_documents
from qualms.texts.spans import worst_span_of
from tests.helpers.commands import run
from tests.helpers.pages import Page, unpacked
from tests.helpers.tiny_llama import LEARNT

STORY = "Once upon a time, there was a little girl."
OWN = ("--model", "hf:./lm", "--tokens")


def test_the_page_has_the_scores_of_the_library(
    story_here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    assert (
        run(monkeypatch, "report", "story.txt", *OWN, "--seed", "3", "--out", "page.html", "--open")
        == 0
    )
    told = capsys.readouterr()
    assert told.out == f"The page: {story_here.resolve() / 'page.html'}\n"
    assert "story.txt: 1 document\n" in told.err
    assert opened == [(story_here.resolve() / "page.html").as_uri()]
    page = Page((story_here / "page.html").read_text("utf-8"))
    assert "What lm does not know" in page.words
    assert {"Model: hf:./lm", "Seed: 3"} <= set(page.words)
    methods = ["regrad", "entropy"]
    (want,) = score_documents(
        load_language_model("hf:./lm"), [Document("story.txt", STORY)], methods, seed=3
    )
    assert page.data["methods"] == methods
    (found,) = page.data["documents"]
    assert (found["name"], found["text"]) == ("story.txt", STORY)
    for method, values in zip(methods, found["scores"], strict=True):
        assert np.allclose(unpacked(values), want.scores[method][1:], rtol=1e-4, equal_nan=True)
    span = worst_span_of(want, "regrad")
    assert span is not None
    assert unpacked(found["worstScores"])[0] == pytest.approx(span.score, rel=1e-4)


def test_a_folder_with_a_text_that_cannot_be_read_is_a_page_about_the_others(
    story_here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (story_here / "many").mkdir()
    for name, content in {
        "a.txt": STORY.encode(),
        "b.txt": LEARNT.encode(),
        "c.txt": b"\xff\xff",
    }.items():
        (story_here / "many" / name).write_bytes(content)
    words = ("report", "many", *OWN, "--methods", "entropy", "--json")
    assert run(monkeypatch, *words) == 4
    told = capsys.readouterr()
    assert json.loads(told.out) == {
        "page": "report.html",
        "Model": "hf:./lm",
        "Texts": f"{Path('many')}/ (folder)",
        "Seed": "0",
        "methods": ["entropy"],
    }
    assert "1 could not be read (c.txt is not in UTF-8" in told.err
    page = Page((story_here / "report.html").read_text("utf-8"))
    assert [each["name"] for each in page.data["documents"]] == ["a.txt", "b.txt"]
    assert run(monkeypatch, *words, "--strict") == 1
    assert "c.txt is not in UTF-8" in capsys.readouterr().err


@pytest.mark.usefixtures("no_model_is_loaded")
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ("story.txt", *OWN, "--id", "digits", "--size", "9"),
            "--id and --size cannot be used with --tokens",
        ),
        (
            ("story.txt", *OWN, "--ood", "letters"),
            "--ood cannot be used with --tokens; leave it out.",
        ),
        (("story.txt", *OWN, "--weights", "w.pt"), "--weights cannot be used with --tokens"),
        (
            ("story.txt", *OWN, "--count", "9", "--rows", "r.jsonl"),
            "--count and --rows cannot be used with --tokens",
        ),
        (
            ("story.txt", *OWN, "--engine", "exact"),
            "--engine exact would take one pass per class and token",
        ),
        (("story.txt", *OWN, "--methods", "heat"), "heat cannot score single positions"),
        (
            ("story.txt", *OWN, "--out", "story.txt/page.html"),
            "story.txt/page.html cannot be written",
        ),
        (OWN, "--tokens needs texts and a language model"),
        (("story.txt", "--tokens"), "--tokens needs texts and a language model"),
        (("nowhere.txt", *OWN), "there is no nowhere.txt in the working directory"),
        (
            ("story.txt", "--model", "hf:./lm"),
            "name the images that the network knows with --id, or pass --tokens",
        ),
        ((), "name the images that the network knows with --id"),
    ],
)
def test_what_cannot_end_well_is_told_before_the_work(
    story_here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    told: str,
) -> None:
    assert run(monkeypatch, "report", *words) == 1
    err = capsys.readouterr().err
    assert told in err
    assert err.count("\n") == 1
    assert not (story_here / "report.html").exists()


def test_a_run_that_is_stopped_says_that_nothing_was_kept(
    story_here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(input_texts, "load_language_model", stop)
    assert run(monkeypatch, "report", "story.txt", *OWN) == 130
    assert "stopped; nothing was kept, and no file was written." in capsys.readouterr().err
    assert not (story_here / "report.html").exists()


# A real model.

DATA = os.environ.get("QUALMS_DATA")


@pytest.mark.slow
@pytest.mark.data
@pytest.mark.skipif(DATA is None, reason="QUALMS_DATA is not set")
def test_a_model_of_stories_marks_science_and_not_stories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(str(DATA)) / "lm"
    monkeypatch.chdir(tmp_path)
    Path("texts").mkdir()
    for name in ("tinystories_valid_excerpt", "fortunes_science"):
        Path("texts", f"{name}.txt").write_text((root / "text" / f"{name}.txt").read_text()[:800])
    assert (
        run(monkeypatch, "report", "texts", "--model", f"hf:{root / 'stories260K'}", "--tokens")
        == 0
    )
    page = Page(Path("report.html").read_text("utf-8"))
    assert [i for i in page.ids if i.startswith("document-")] == ["document-0", "document-1"]
    science, story = (unpacked(each["scores"][0]) for each in page.data["documents"])
    limit = np.nanquantile(np.concatenate([science, story]), 0.9)
    assert page.data["documents"][0]["name"] == "fortunes_science.txt"
    assert (science > limit).mean() > 3 * (story > limit).mean()
