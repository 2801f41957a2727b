"""The commands for a user's own images: score, report, demo, and those that tell what there is."""

import json
import re
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

import qualms
from qualms.cli import doctor_command as doctor_module
from tests.helpers.commands import own, run


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("score", "nowhere", *own()), "nowhere is neither a dataset"),
        (("score", "pictures", "--model", "digits-cnn"), "digits-cnn has no weights"),
        (
            ("score", "pictures", "--model", "digits-cnn", "--weights", "weights.pt"),
            "pass --mean and --std",
        ),
        (
            ("report", "--id", "digits", "--weights", "weights.pt", "--cycles", "none.jsonl"),
            "none.jsonl cannot be read",
        ),
    ],
)
def test_mistakes_are_told_in_one_sentence(
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    told: str,
) -> None:
    assert run(monkeypatch, *words) == 1
    err = capsys.readouterr().err
    assert told in err
    assert err.count("\n") == 1


def test_methods_lists_the_registry(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "methods") == 0
    out = capsys.readouterr().out
    assert all(f"\n{method.name} " in f"\n{out}" for method in qualms.list_methods())
    assert run(monkeypatch, "methods", "--json") == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["name"] for row in rows] == [method.name for method in qualms.list_methods()]


def test_doctor_says_what_is_there_and_what_is_not(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert run(monkeypatch, "doctor", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    states = {row["package"]: row["state"] for row in found["packages"]}
    assert states["pyarrow"] == "missing"
    assert states["torch"] == version("torch")
    assert found["a score"] == "works"
    assert {row["dataset"]: row["state"] for row in found["datasets"]}["digits"] == "360"


def test_doctor_knows_every_package_that_the_commands_need() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["app"]]
    names = {re.match(r"[\w-]+", requirement).group() for requirement in wanted}  # type: ignore[union-attr]
    assert names <= {package for _, package, _ in doctor_module.PACKAGES}


def test_doctor_fails_when_scores_do(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no kernel\nfor this")

    monkeypatch.setattr(doctor_module, "score", broken)
    assert run(monkeypatch, "doctor") == 1
    assert "a score: fails: no kernel" in capsys.readouterr().out


@pytest.mark.slow
def test_a_report_keeps_its_scores_where_bench_finds_them(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    common = (
        "--id",
        "digits",
        "--ood",
        "letters",
        "--weights",
        "weights.pt",
        "--count",
        "40",
        "--methods",
        "regrad,msp",
    )
    assert run(monkeypatch, "report", *common, "--out", "page.html") == 0
    page = (here / "page.html").read_text()
    assert all(
        word in page for word in ("What digits-cnn does not know", "letters", "regrad", "Layers")
    )
    (rows,) = (here / "runs").glob("*.jsonl")
    before = [line for line in rows.read_text().splitlines() if '"scores"' in line]
    assert run(monkeypatch, "bench", "ood", *common) == 0
    assert [line for line in rows.read_text().splitlines() if '"scores"' in line] == before


@pytest.mark.slow
def test_the_demo_writes_a_page_and_a_table(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "demo") == 0
    out = capsys.readouterr().out
    rows = {line.split("|")[1].strip(): line for line in out.splitlines() if line.startswith("| ")}
    left_out = {"mc-dropout", "mc-batchnorm"}
    assert {method.name for method in qualms.list_methods()} - left_out <= set(rows)
    assert "- mc-dropout: mc-dropout needs a dropout layer" in out
    known_well = float(rows["regrad+layers+smooth"].split("|")[2].split("/")[0])
    assert known_well > 80
    page = here / "demo" / "report.html"
    assert f"The page: {page}" in out
    assert 1e5 < page.stat().st_size < 2e6
