"""`qualms bench text`, on a tiny language model: what it prints, keeps and refuses."""

import json
import re
import sys
from pathlib import Path

import pytest

from qualms.cli import main

pytest.importorskip("transformers")
from tests.helpers.tiny_llama import LEARNT, write_language_model

OTHER = "Quarks, bosons & 3.14159: the gauge symmetry SU(2) x U(1) breaks at 246 GeV; cf. eq. (7). "


@pytest.fixture
def texts_here(data_here: Path) -> Path:
    write_language_model(data_here / "lm")
    (data_here / "known.txt").write_text(LEARNT * 8)
    (data_here / "other.txt").write_text(OTHER * 4)
    (data_here / "short.txt").write_text("Once upon a time")
    lines = [json.dumps({"text": OTHER[i:] + LEARNT}) for i in range(12)]
    (data_here / "more.jsonl").write_text("\n".join(lines))
    return data_here


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """Run `qualms bench text`; return the exit code."""
    monkeypatch.setattr(
        sys, "argv", ["qualms", "bench", "text", "--model", "hf:lm", "--device", "cpu", *words]
    )
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def test_it_prints_a_line_for_each_method_and_keeps_the_rows(
    texts_here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ("--window", "16", "--count", "6", "--tangents", "2", "--out", "rows.jsonl")
    command = (
        "--id",
        "known.txt",
        "--ood",
        "other.txt,more.jsonl",
        "--methods",
        "regrad,entropy,heat",
        *few,
    )
    assert run(monkeypatch, *command) == 0
    out = capsys.readouterr().out
    assert "known → other: 6 and 6 windows of 16 tokens, %" in out
    assert "known → more: 6 and 6 windows of 16 tokens, %" in out
    assert "| method     | tokens, AUROC / AUPR" in out
    assert "| spans of 8, AUROC / AUPR" in out
    assert "| whole windows, AUROC / AUPR" in out
    for name in ("regrad", "entropy", "surprise", "perplexity"):
        assert len(re.findall(rf"^\| {name} +\| \d+\.\d \[", out, re.MULTILINE)) >= 2
    assert "- heat: " in out
    assert "Rows: rows.jsonl. Seed 0." in out
    before = (texts_here / "rows.jsonl").read_bytes()
    assert run(monkeypatch, *command, "--json") == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["out"] for row in rows if row["row"] == "text"] == 12 * ["other"] + 12 * ["more"]
    assert (texts_here / "rows.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--id", "known.txt"), "text needs --ood"),
        (
            ("--id", "known.txt", "--ood", "known.txt"),
            "--ood names known.txt, the dataset that the network knows",
        ),
        (
            ("--id", "known.txt", "--ood", "other.txt", "--methods", ","),
            "--methods names no method",
        ),
        (("--id", "known.txt", "--ood", "gone.txt"), "there is no gone.txt"),
        (
            ("--id", "known.txt", "--ood", "short.txt", "--window", "30"),
            "no document of short has as many as 30 tokens",
        ),
        (("--id", "known.txt", "--ood", "other.txt", "--window", "40"), "reads at most 32 tokens"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_sentence(
    texts_here: Path,
    words: tuple[str, ...],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(monkeypatch, *words) == 1
    assert said in capsys.readouterr().err
