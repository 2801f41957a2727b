"""The examples run as they are, and say what they are for."""

import runpy
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "examples"
SAYS = {
    "quickstart.py": "AUROC",
    "own_model.py": "exported, the same scores: True",
    "active_learning.py": "uncertain and different",
    "theory.py": "Proposition 4",
}


@pytest.mark.slow
@pytest.mark.timeout(900)  # the checks of shapes that the tests switch on make thousands of small calls slow
@pytest.mark.parametrize("name", SAYS)
def test_an_example_runs(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [name])
    runpy.run_path(str(FOLDER / name), run_name="__main__")
    assert SAYS[name] in capsys.readouterr().out


def test_every_example_is_run() -> None:
    assert {path.name for path in FOLDER.glob("*.py")} == set(SAYS)
