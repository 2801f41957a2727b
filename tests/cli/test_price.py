"""The price comes first: before a command scores, and for every method of a network."""

import json
from pathlib import Path

import pytest

from qualms.cli import price_estimate as price
from qualms.cli.price_estimate import format_duration
from tests.helpers.commands import own, run

Told = pytest.CaptureFixture[str]


def test_a_run_begins_with_what_it_takes(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: Told
) -> None:
    assert run(monkeypatch, "score", "pictures", *own("--methods", "entropy")) == 0
    told = capsys.readouterr().err
    assert "6 images, about " in told
    assert "(1 forward pass each)" in told
    assert "cheaper" not in told


def test_a_long_run_names_what_is_cheaper_and_by_how_much(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: Told
) -> None:
    monkeypatch.setattr(price, "LONG_SECONDS", 0.0)
    assert run(monkeypatch, "score", "pictures", *own("--methods", "regrad+layers+smooth")) == 0
    told = capsys.readouterr().err
    assert "cheaper: without +smooth: about " in told
    assert "(1 forward pass each, " in told


def test_every_method_of_a_network_has_a_price_or_a_reason(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: Told
) -> None:
    assert (
        run(monkeypatch, "methods", "--model", "digits-cnn", "--weights", "weights.pt", "--json")
        == 0
    )
    found = {row["method"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert found["entropy"]["forward_passes"] == 1
    assert found["perturb-x"]["forward_passes"] == 101
    assert found["regrad"]["forward_passes"] > 10
    assert (
        found["regrad+layers+smooth"]["forward_passes"]
        > 5 * found["regrad+layers"]["forward_passes"]
    )
    assert "needs training data" in found["knn"]["why"]
    assert all(("why" in row) != ("forward_passes" in row) for row in found.values())
    assert run(monkeypatch, "methods", "--model", "digits-cnn", "--weights", "weights.pt") == 0
    assert "passes" in capsys.readouterr().out


def test_durations_are_for_people() -> None:
    assert [format_duration(s) for s in (0.04, 0.8, 6.2, 700, 12600)] == [
        "40 ms",
        "0.8 s",
        "6 s",
        "12 min",
        "3.5 h",
    ]
