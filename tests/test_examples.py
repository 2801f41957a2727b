"""The examples run as they are, and say what they are for."""

import runpy
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[1] / "examples"
NOTEBOOK = FOLDER / "quickstart.ipynb"
SAYS = {
    "quickstart.py": "AUROC",
    "own_model.py": "exported, the same scores: True",
    "active_learning.py": "uncertain and different",
    "pixels.py": "unknown pixels",
    "theory.py": "Proposition 4",
}


@pytest.mark.slow
@pytest.mark.timeout(
    900
)  # the checks of shapes that the tests switch on make thousands of small calls slow
@pytest.mark.parametrize("name", SAYS)
def test_an_example_runs(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", [name])
    monkeypatch.chdir(tmp_path)  # one of them writes a page
    runpy.run_path(str(FOLDER / name), run_name="__main__")
    assert SAYS[name] in capsys.readouterr().out


def test_every_example_is_run() -> None:
    assert {path.name for path in FOLDER.glob("*.py")} == set(SAYS)
    assert list(FOLDER.rglob("*.ipynb")) == [NOTEBOOK]


def notebook() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Jupyter announces changes to come as it is imported
        import nbformat
    return nbformat.read(NOTEBOOK, as_version=4)


def test_the_notebook_is_committed_without_outputs() -> None:
    cells = [cell for cell in notebook().cells if cell.cell_type == "code"]
    assert cells
    assert not any(cell.outputs or cell.execution_count for cell in cells)


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore"
)  # Jupyter's own; warnings of qualms are looked for in the outputs
def test_every_cell_of_the_notebook_runs(tmp_path: Path) -> None:
    from nbclient import NotebookClient

    book = notebook()
    NotebookClient(
        book, timeout=600, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()  # raises if one fails
    outputs = [output for cell in book.cells if cell.cell_type == "code" for output in cell.outputs]
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    assert "Warning" not in printed
    assert "AUROC" in printed
    assert "95% of the digits are accepted" in printed
    assert "letter 11: called a" in printed
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
