"""Commands run inside the test, and the tables that they write."""

import csv
import sys
from pathlib import Path

import pytest

from qualms.cli import main
from qualms.data import DATASETS


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """The exit code of a command."""
    monkeypatch.setattr(sys, "argv", ["qualms", *words])
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


NORMAL = DATASETS["digits"].normalization


def own(*more: str) -> tuple[str, ...]:
    return (
        "--model",
        "digits-cnn",
        "--weights",
        "weights.pt",
        "--mean",
        "0.3053",
        "--std",
        "0.376",
        *more,
    )


def rows(path: Path) -> list[dict[str, str]]:
    with open(path) as file:
        return list(csv.DictReader(file))
