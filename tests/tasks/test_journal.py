"""Rows on disk: nothing that was written is lost, and a file belongs to one run."""

import json
from pathlib import Path

import pytest

from qualms.errors import QualmsError
from qualms.tasks.journal import Journal

ABOUT = {"network": "a", "std": (0.5, 0.25)}


def test_rows_are_there_again_when_the_file_is_opened_again(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "rows.jsonl"
    with Journal(path, ABOUT) as journal:
        journal.add({"row": "ood", "method": "regrad", "auroc": 0.1 + 0.2})
        journal.add({"row": "ood", "method": "entropy", "auroc": 0.5})
    with Journal(path, ABOUT) as journal:
        assert [row["method"] for row in journal] == ["regrad", "entropy"]
        assert journal.where(method="regrad") == [
            {"row": "ood", "method": "regrad", "auroc": 0.1 + 0.2}
        ]
        assert journal.where(method="regrad", row="calibration") == []


def test_a_row_is_on_disk_before_the_next_is_computed(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with Journal(path, ABOUT) as journal:
        journal.add({"row": 1})
        assert [json.loads(line)["row"] for line in path.read_text().splitlines()] == ["run", 1]


@pytest.mark.parametrize("kept", range(1, 20))
def test_a_line_that_was_cut_short_is_dropped_and_the_run_goes_on(
    tmp_path: Path, kept: int
) -> None:
    path = tmp_path / "rows.jsonl"
    with Journal(path, ABOUT) as journal:
        journal.add({"n": 1})
    whole = path.read_bytes()
    path.write_bytes(whole + json.dumps({"n": 2, "much": "longer"}).encode()[:kept])
    with Journal(path, ABOUT) as journal:
        assert list(journal) == [{"n": 1}]
        journal.add({"n": 3})
    assert path.read_bytes() == whole + b'{"n": 3}\n'


def test_a_kill_during_the_first_line_leaves_a_file_that_can_be_used(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"row": "ru')
    with Journal(path, ABOUT) as journal:
        journal.add({"n": 1})
    with Journal(path, ABOUT) as journal:
        assert list(journal) == [{"n": 1}]


def test_a_file_of_another_run_is_refused_by_what_differs(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with Journal(path, ABOUT):
        pass
    with pytest.raises(QualmsError, match=r"another std \(\[0.5, 0.25\], not \[0.5\]\)"):
        Journal(path, {**ABOUT, "std": [0.5]})
    with Journal(path, ABOUT):  # the refusal let go of the file
        pass


def test_two_runs_cannot_write_to_one_file(tmp_path: Path) -> None:
    with (
        Journal(tmp_path / "rows.jsonl", ABOUT),
        pytest.raises(QualmsError, match="in use by another run"),
    ):
        Journal(tmp_path / "rows.jsonl", ABOUT)


@pytest.mark.parametrize("line", ["not json", "[1]", "\x00\x00"])
def test_a_file_that_holds_something_else_is_refused_by_its_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "rows.jsonl"
    with Journal(path, ABOUT):
        pass
    path.write_text(path.read_text() + line + "\n" + "{}\n")
    before = path.read_bytes()
    with pytest.raises(QualmsError, match="line 2 of"):
        Journal(path, ABOUT)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "content",
    [b"notes without an end of line", b"PK\x03\x04\n\x00 weights\nand more", b'{"a": 1}\n{"b": 2}'],
)
def test_a_file_of_somebody_else_is_not_cut(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with pytest.raises(QualmsError, match=r"not a file of rows|line 1 of"):
        Journal(path, ABOUT)
    assert path.read_bytes() == content


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(QualmsError, match="cannot be written"):
        Journal(tmp_path, ABOUT)
    (tmp_path / "file").touch()
    with pytest.raises(QualmsError, match="cannot be written"):
        Journal(tmp_path / "file" / "rows.jsonl", ABOUT)


def test_rows_can_be_kept_in_memory_alone() -> None:
    with Journal(None, ABOUT) as journal:
        journal.add({"n": 1})
        assert list(journal) == [{"n": 1}]
