"""`qualms score --tokens`: a table of every token of texts."""

import csv
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from qualms.data.texts import Document
from qualms.gradients.settings import Sketch
from qualms.models.language import load_language_model
from qualms.texts.document import ScoredDocument
from qualms.texts.document_scores import score_documents
from qualms.texts.generation import generate
from qualms.texts.token_table import TokenTable
from tests.helpers.commands import run
from tests.helpers.tiny_llama import LEARNT

STORY = "Once upon a time, there was a little girl."
TEXTS = (Document("girl", STORY), Document("line 3", "She was sad – 🙂"))


@pytest.fixture
def texts_here(story_here: Path) -> Path:
    rows = [{"text": TEXTS[0].text, "id": "girl"}, {"no": "text"}, {"text": TEXTS[1].text}]
    (story_here / "texts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return story_here


def own(*more: str) -> tuple[str, ...]:
    return ("--model", "hf:./lm", "--tokens", *more)


def rows(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def library(methods: Any = "regrad", documents: Any = TEXTS, **how: Any) -> list[ScoredDocument]:
    """Score documents by the library, without the command."""
    return list(score_documents(load_language_model("hf:./lm"), documents, methods, **how))


def test_a_story_gets_a_row_for_each_token_with_the_scores_of_the_library(
    texts_here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "score", "story.txt", *own()) == 0
    told = capsys.readouterr()
    assert "Loading weights" not in told.err  # a bar of transformers
    (want,) = library(documents=[Document("story.txt", STORY)])
    found = rows(texts_here / "scores.csv")
    columns = TokenTable([want]).columns()
    assert list(found[0]) == list(columns)
    assert "score_regrad" in columns  # not the smoothed default of images
    for name in ("document", "token", "position", "start", "end", "likeliest_next"):
        assert [row[name] for row in found] == list(map(str, columns[name]))
    for name in ("score_regrad", "likeliest_prob"):
        assert [float(row[name]) for row in found] == pytest.approx(columns[name], rel=1e-4)
    *known, last = (row["log_prob_next"] for row in found)
    assert list(map(float, known)) == pytest.approx(columns["log_prob_next"][:-1], rel=1e-4)
    assert last == ""
    first, second = told.out.splitlines()
    assert first == f"1 document, {len(want.ids)} tokens scored by regrad: scores.csv"
    assert second.startswith("most uncertain by regrad: story.txt, characters ")
    assert "story.txt: 1 document\n" in told.err


def test_lines_that_cannot_be_read_are_listed_and_the_rest_is_scored(
    texts_here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import pyarrow.parquet

    methods = "regrad,entropy"
    assert (
        run(
            monkeypatch,
            "score",
            "texts.jsonl",
            *own("--methods", methods, "--out", "out/scores.parquet"),
        )
        == 4
    )
    told = capsys.readouterr()
    want = TokenTable(library(["regrad", "entropy"])).columns()
    found = pyarrow.parquet.read_table(texts_here / "out" / "scores.parquet").to_pydict()
    assert list(found) == list(want)
    assert found["document"] == want["document"]
    assert found["score_entropy"] == pytest.approx(want["score_entropy"], rel=1e-4)
    assert "; 1 could not be read: out/scores.rejected.csv\nmost uncertain by regrad: " in told.out
    assert '  1 could not be read (line 2 is without a string in "text")\n' in told.err
    assert rows(texts_here / "out" / "scores.rejected.csv") == [
        {"id": "line 2", "reason": 'without a string in "text"'}
    ]
    assert run(monkeypatch, "score", "texts.jsonl", *own("--strict")) == 1
    assert "line 2 of texts.jsonl is without a string" in capsys.readouterr().err
    assert not (texts_here / "scores.csv").exists()


def test_json_lines_hold_nothing_that_json_does_not_know(
    texts_here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_constant(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    assert run(monkeypatch, "score", "story.txt", *own("--methods", "entropy", "--json")) == 0
    out = capsys.readouterr().out
    found = [json.loads(line, parse_constant=no_constant) for line in out.splitlines()]
    assert found[-1]["log_prob_next"] is None
    assert [row["token"] for row in found] == TokenTable(library("entropy", TEXTS[:1])).columns()[
        "token"
    ]
    assert (
        run(
            monkeypatch, "score", "story.txt", *own("--methods", "entropy", "--out", "scores.jsonl")
        )
        == 0
    )
    assert (texts_here / "scores.jsonl").read_text() == out
    capsys.readouterr()
    assert run(monkeypatch, "score", "story.txt", *own("--methods", "entropy", "--out", "-")) == 0
    told = capsys.readouterr()
    assert [row["token"] for row in csv.DictReader(told.out.splitlines(keepends=True))] == [
        row["token"] for row in found
    ]
    assert (
        f"1 document, {len(found)} tokens scored by entropy\nmost uncertain by entropy: story.txt"
        in told.err
    )


def test_a_carriage_return_does_not_break_a_line_of_the_table(
    texts_here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (texts_here / "returns.jsonl").write_text(json.dumps({"text": 'One\r\nday,\r"she"\n'}))
    assert run(monkeypatch, "score", "returns.jsonl", *own("--methods", "entropy")) == 0
    found = rows(texts_here / "scores.csv")
    assert "".join(row["token"] for row in found) == 'One\r\nday,\r"she"\n'
    assert (
        (texts_here / "scores.csv")
        .read_bytes()
        .startswith(b"document,position,token,start,end,score_entropy,")
    )
    assert b"likeliest_prob\nline 1,0," in (texts_here / "scores.csv").read_bytes()


@pytest.mark.slow
def test_tangents_and_the_seed_decide_the_sketch(
    texts_here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "score", "story.txt", *own("--tangents", "4", "--seed", "2")) == 0
    (want,) = library(documents=[Document("story.txt", STORY)], engine=Sketch(4), seed=2)
    (other,) = library(documents=[Document("story.txt", STORY)], seed=2)
    found = [float(row["score_regrad"]) for row in rows(texts_here / "scores.csv")]
    assert found == pytest.approx(want.scores["regrad"], rel=1e-4)
    assert found != pytest.approx(other.scores["regrad"], rel=1e-2)


def test_the_model_can_write_first_and_what_it_wrote_is_marked(
    texts_here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        run(monkeypatch, "score", "story.txt", *own("--methods", "entropy", "--generate", "6")) == 0
    )
    (written,) = generate(load_language_model("hf:./lm"), [Document("story.txt", STORY)], 6)
    assert written.text.startswith(STORY)
    (want,) = library("entropy", [written])
    found = rows(texts_here / "scores.csv")
    assert [row["token"] for row in found] == want.tokens
    marked = [row["generated"] for row in found]
    assert marked == [str(start >= len(STORY)) for start, _ in want.offsets]
    assert {"True", "False"} == set(marked)


def test_the_worst_span_is_told_with_its_document(
    texts_here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (texts_here / "many").mkdir()
    for name, text in {"a.txt": STORY, "b.txt": f"{LEARNT}\n{LEARNT}"}.items():
        (texts_here / "many" / name).write_text(text)
    assert run(monkeypatch, "score", "many", *own("--methods", "msp")) == 0
    documents = [
        Document(name, (texts_here / "many" / name).read_text()) for name in ("a.txt", "b.txt")
    ]
    means = {
        (
            sum(one.scores["msp"][at : at + 8]) / 8,
            one.document.name,
            one.offsets[at][0],
            one.offsets[at + 7][1],
        )
        for one in library("msp", documents)
        for at in range(1, len(one.ids) - 7)  # without the <s> in front
    }
    _, name, start, end = max(means)
    told = capsys.readouterr().out.splitlines()[-1]
    assert told.startswith(f"most uncertain by msp: {name}, characters {start} to {end}: ")


@pytest.mark.usefixtures("no_model_is_loaded")
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ("--size", "8", "--mean", "0.5"),
            "--size and --mean cannot be used with --tokens; leave them out.",
        ),
        (("--weights", "w.pt"), "--weights cannot be used with --tokens"),
        (("--classes", "3"), "--classes cannot be used with --tokens"),
        (("--train", "x"), "--train cannot be used with --tokens"),
        (("--shard-size", "3"), "--shard-size cannot be used with --tokens"),
        (("--runner", "ray"), "--runner cannot be used with --tokens"),
        (
            ("--reference", "x", "--coverage", "0.9"),
            "--reference and --coverage cannot be used with --tokens",
        ),
        (("--threshold", "t.json"), "--threshold cannot be used with --tokens"),
        (
            ("--engine", "exact"),
            "--engine exact would take one pass per class and token; use sketch.",
        ),
        (("--out", "shards/"), "--tokens writes one table; pass a file as --out."),
        (("--out", "scores.xlsx"), "--out scores.xlsx; name a .csv, .parquet or .jsonl file"),
        (("--out", "story.csv"), "story.csv already exists; pass --overwrite"),
        (("--methods", "heat"), "heat cannot score single positions"),
        (("--methods", ""), "--methods names no method"),
        (("--device", "cud"), "device 'cud' is not available"),
    ],
)
def test_what_cannot_end_well_is_told_before_the_work(
    texts_here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    told: str,
) -> None:
    (texts_here / "story.csv").write_text("mine")
    assert run(monkeypatch, "score", "story.txt", *own(*words)) == 1
    err = capsys.readouterr().err
    assert told in err
    assert err.count("\n") == 1
    assert not (texts_here / "scores.csv").exists()


@pytest.mark.usefixtures("no_model_is_loaded")
def test_what_is_said_of_texts_needs_tokens(
    texts_here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (("--generate", "3"), ("--tangents", "8")):
        assert run(monkeypatch, "score", "photos", "--model", "digits-cnn", *words) == 1
        assert (
            "--generate and --tangents apply only to texts; pass --tokens too"
            in capsys.readouterr().err
        )


def test_models_and_texts_that_are_not_there_are_told(
    texts_here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, told in {
        ("nowhere.txt", *own()): "there is no nowhere.txt in the working directory or data",
        (
            "story.txt",
            "--tokens",
            "--model",
            "hf:./none",
        ): "hf:./none names a folder that does not exist",
        (
            "story.txt",
            "--tokens",
            "--model",
            "digits-cnn",
        ): "digits-cnn does not name a language model; pass hf:",
        (
            "story.txt",
            *own("--generate", "31"),
        ): "cannot generate 31 new tokens; choose from 1 to 30.",
    }.items():
        assert run(monkeypatch, "score", *words) == 1
        assert told in capsys.readouterr().err
    assert not (texts_here / "scores.csv").exists()
    assert not list(texts_here.glob(".*.part"))


@pytest.mark.slow
def test_a_run_that_is_stopped_says_that_nothing_was_kept(texts_here: Path) -> None:
    (texts_here / "long.txt").write_text(f"{LEARNT} " * 2000)
    words = [sys.executable, "-m", "qualms", "score", "long.txt", *own()]
    env: dict[str, Any] = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        words, env=env, cwd=texts_here, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "long.txt: 1 document\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    assert (out, process.returncode) == ("", 130)
    assert err.splitlines()[-1] == "qualms: stopped; nothing was kept, and no file was written."
    assert not list(texts_here.glob("*.csv")) + list(texts_here.glob(".*.part"))


# A real model.

DATA = os.environ.get("QUALMS_DATA")
real = pytest.mark.skipif(DATA is None, reason="QUALMS_DATA is not set")


@pytest.mark.data
@real
def test_a_real_model_is_surer_of_a_story_than_of_science(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = Path(str(DATA)) / "lm"
    monkeypatch.chdir(tmp_path)
    Path("texts").mkdir()
    for name in ("tinystories_valid_excerpt", "fortunes_science"):
        Path("texts", f"{name}.txt").write_text((root / "text" / f"{name}.txt").read_text()[:700])
    model = f"hf:{root / 'stories260K'}"
    assert (
        run(
            monkeypatch,
            "score",
            "texts",
            "--model",
            model,
            "--tokens",
            "--methods",
            "regrad,entropy",
        )
        == 0
    )
    assert "most uncertain by regrad: fortunes_science.txt" in capsys.readouterr().out
    found = rows(tmp_path / "scores.csv")
    for score in ("score_regrad", "score_entropy"):
        story, science = (
            [float(row[score]) for row in found if row["document"] == f"{name}.txt"]
            for name in ("tinystories_valid_excerpt", "fortunes_science")
        )
        assert sum(story) / len(story) < 0.8 * sum(science) / len(science)
