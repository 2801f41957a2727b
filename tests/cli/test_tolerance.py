"""`--tolerance`: every command that scores takes it, and what it writes says so."""

import json
from pathlib import Path

import numpy as np
import pytest

import qualms
from qualms.data import load
from qualms.models import load_model
from tests.helpers.commands import NORMAL, own, rows, run

METHOD = "regrad+layers"


def test_scores_are_those_of_the_library(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        run(monkeypatch, "score", "pictures", *own("--methods", METHOD, "--tolerance", "0.3")) == 0
    )
    images = load("digits").take(slice(0, 6))
    scorer = qualms.Scorer(load_model("digits-cnn", "weights.pt"), METHOD, tolerance=0.3)
    want = scorer(NORMAL.apply(images.pixels), numbers=images.numbers()).scores[METHOD]
    found = [float(row[f"score_{METHOD}"]) for row in rows(here / "scores.csv")]
    np.testing.assert_allclose(found, want.numpy(), rtol=1e-3)


def test_a_threshold_and_shards_remember_it(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = own("--methods", METHOD, "--tolerance", "0.3")
    assert run(monkeypatch, "threshold", "known", *words, "--out", "t.json") == 0
    provenance = qualms.Threshold.load("t.json").provenance
    assert provenance is not None
    assert provenance.tolerance == 0.3
    assert (
        run(monkeypatch, "score", "pictures", *words, "--threshold", "t.json", "--out", "many/")
        == 0
    )
    assert json.loads(Path("many/manifest.json").read_text())["tolerance"] == 0.3
    assert run(monkeypatch, "score", "pictures", *own("--methods", METHOD), "--out", "many/") == 1


def test_rows_of_a_task_are_those_of_one_tolerance(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--id", "digits", "--weights", "weights.pt", "--count", "6", "--methods", METHOD)
    for more in ((), ("--tolerance", "0.3"), ("--tolerance", "0.3")):
        assert run(monkeypatch, "bench", "calibration", *words, "--out", "rows.jsonl", *more) == 0
    assert run(monkeypatch, "report", *words, "--rows", "more.jsonl", "--tolerance", "0.3") == 0
    kept = [json.loads(line) for line in Path("rows.jsonl").read_text().splitlines()]
    engines = [row["engine"] for row in kept if row["row"] == "calibration"]
    assert engines == ["exact", "exact, tolerance 0.3"]
    shared = [json.loads(line) for line in Path("more.jsonl").read_text().splitlines()]
    assert {row["engine"] for row in shared if row["row"] == "scores"} == {"exact, tolerance 0.3"}


@pytest.mark.parametrize(
    "words", [("report",), ("bench", "ood"), ("bench", "runtime"), ("serve",), ("threshold",)]
)
def test_every_command_with_an_engine_has_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert run(monkeypatch, *words, "--help") == 0
    assert "--tolerance" in capsys.readouterr().out
