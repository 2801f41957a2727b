"""Texts from files of every kind, and what is said of those that cannot be read."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from qualms.data.texts import Document, read_texts
from tests.helpers.errors import refusal

pytestmark = pytest.mark.usefixtures("workdir")


def lines(*rows: Any) -> Path:
    path = Path("texts.jsonl")
    path.write_text(
        "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows)
    )
    return path


def table(**columns: list[Any]) -> Path:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(columns), "texts.parquet")
    return Path("texts.parquet")


refused = partial(refusal, read_texts)


def test_a_file_is_a_document_that_is_called_like_it(workdir: Path) -> None:
    (workdir / "story.txt").write_bytes("\ufeffOnce …\r\nupon\ra time\n".encode())
    found = read_texts("story.txt")
    # As open() reads it: without the mark of a byte order, and with one kind of line end.
    assert found.documents == (Document("story.txt", "Once …\nupon\na time\n"),)
    assert (found.source, found.rejected) == ("story.txt", ())


def test_the_files_of_a_folder_are_read_in_the_order_of_their_names(workdir: Path) -> None:
    for name in ("b.txt", "a/deep.TXT", "a/.hidden.txt", ".git/x.txt", "notes.md"):
        (workdir / "mine" / name).parent.mkdir(parents=True, exist_ok=True)
        (workdir / "mine" / name).write_text(name)
    found = read_texts(workdir / "mine")
    assert [one.name for one in found.documents] == ["a/deep.TXT", "b.txt"]
    assert [one.text for one in found.documents] == ["a/deep.TXT", "b.txt"]
    assert found.source == f"{workdir / 'mine'}/ (folder)"


def test_lines_go_by_their_ids_else_their_names_else_their_numbers() -> None:
    texts = [
        {"text": "A", "id": 7, "name": "x"},
        {"text": "B", "name": "x"},
        "",
        {"text": "C", "id": None},
    ]
    assert read_texts(lines(*texts)).documents == (
        Document("7", "A"),
        Document("x", "B"),
        Document("line 4", "C"),
    )


def test_no_two_documents_have_one_name() -> None:
    found = read_texts(
        lines(
            {"text": "A", "id": "x"},
            {"text": "B", "id": "x"},
            {"text": "C", "id": "line 4"},
            {"text": "D"},
        )
    )
    assert [one.name for one in found.documents] == ["x", "x (line 2)", "line 4", "line 4 (line 4)"]
    assert [one.text for one in found.documents] == ["A", "B", "C", "D"]


def test_a_line_ends_where_json_says_and_not_at_other_separators() -> None:
    Path("texts.jsonl").write_text('{"text": "one\u2028line\x85only"}', encoding="utf-8")
    assert read_texts("texts.jsonl").documents[0].text == "one\u2028line\x85only"


def test_a_table_has_a_document_in_each_row() -> None:
    found = read_texts(table(text=["A", "B"], name=["x", None], more=[1, 2]))
    assert found.documents == (Document("x", "A"), Document("row 1", "B"))


BAD = {
    "{": "not JSON (JSONDecodeError)",
    "[1]": 'not an object with the key "text"',
    '{"txt": "A"}': 'without a string in "text"',
    '{"text": 3}': 'without a string in "text"',
    '{"text": " \\n"}': "empty",
    '{"text": "\\ud83d"}': "written in invalid Unicode (lone surrogates)",
}


def test_bad_lines_are_left_out_and_told_by_their_numbers() -> None:
    path = lines({"text": "A"}, *BAD, {"text": "B"})
    with open(path, "ab") as file:
        file.write(b'{"text": "\xff"}\n')
    found = read_texts(path, strict=False)
    assert [one.text for one in found.documents] == ["A", "B"]
    reasons = [*BAD.values(), "not in UTF-8 (byte 10)"]
    numbers = [*range(2, 2 + len(BAD)), len(BAD) + 3]
    assert [(one.id, one.reason) for one in found.rejected] == [
        (f"line {number}", reason) for number, reason in zip(numbers, reasons, strict=True)
    ]


@pytest.mark.parametrize(("line", "reason"), BAD.items())
def test_by_default_the_first_bad_line_is_an_error(line: str, reason: str) -> None:
    assert (
        refused(lines({"text": "A"}, line))
        == f"line 2 of texts.jsonl is {reason}; replace or remove it."
    )


def test_files_of_a_folder_that_are_no_texts_are_left_out(workdir: Path) -> None:
    (workdir / "mine").mkdir()
    (workdir / "mine" / "empty.txt").touch()
    (workdir / "mine" / "latin.txt").write_bytes("café".encode("latin-1"))
    assert "no text can be read from mine: empty.txt is empty, and 1 more" in refused(
        "mine", strict=False
    )
    (workdir / "mine" / "real.txt").write_text("real")
    found = read_texts("mine", strict=False)
    assert [one.name for one in found.documents] == ["real.txt"]
    assert [(one.id, one.reason) for one in found.rejected] == [
        ("empty.txt", "empty"),
        ("latin.txt", "not in UTF-8 (byte 3)"),
    ]
    assert refused("mine") == "mine/empty.txt is empty; replace or remove it."


def test_what_holds_no_text_is_told(workdir: Path) -> None:
    (workdir / "empty.txt").write_text("  \n")
    (workdir / "nothing").mkdir()
    (workdir / "nothing.jsonl").touch()
    (workdir / "page.md").write_text("A")
    (workdir / "cut.parquet").write_bytes(b"PAR1")
    assert refused("empty.txt", strict=False) == "empty.txt is empty; replace or remove it."
    assert refused("nothing").startswith(
        "nothing contains no texts; pass a .txt, .jsonl or .parquet file, or a folder"
    )
    assert refused("nothing.jsonl").startswith("nothing.jsonl contains no texts; pass a .txt")
    assert refused("page.md").startswith("page.md is not in a supported format; pass a .txt")
    assert refused("nowhere.txt").startswith(
        "there is no nowhere.txt in the working directory or data; pass a .txt"
    )
    assert "cut.parquet is truncated or not a parquet file" in refused("cut.parquet")
    assert "texts.parquet has the columns image, label, but no column text" in refused(
        table(image=[1], label=[2])
    )
    assert (
        refused(table(text=[3]))
        == 'row 0 of texts.parquet is without a string in "text"; replace or remove it.'
    )


def test_a_path_may_start_in_the_folder_of_datasets(
    workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (workdir / "sets").mkdir()
    (workdir / "sets" / "story.txt").write_text("Once")
    assert read_texts("story.txt", "sets").documents[0].text == "Once"
    monkeypatch.setenv("QUALMS_DATA", "sets")
    assert read_texts("story.txt").source == "sets/story.txt"
