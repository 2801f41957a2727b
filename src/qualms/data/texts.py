"""Texts: a .txt file, a folder of them, or the lines or rows of a .jsonl or .parquet file.

- `.txt`: one document in UTF-8, named after its path.
- `.jsonl`: on each line an object with a string "text"; it may name the document in "id" or "name".
- `.parquet`: a column of strings "text"; columns "id" and "name" may name the documents.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from qualms.data.decode import Unreadable
from qualms.data.images import Rejected
from qualms.data.loading import datasets_root, find_data_path
from qualms.data.parquet import explain_parquet_errors
from qualms.data.places import import_extra, read_file_bytes
from qualms.errors import QualmsError

# The key in a line of a .jsonl file, or the column of a .parquet file.
TEXT_KEY = "text"
# The keys or columns that may name a document; the first one with a value is used.
NAME_KEYS = ("id", "name")
ACCEPTED = "a .txt, .jsonl or .parquet file, or a folder of .txt files"


@dataclass(frozen=True)
class Document:
    """A text with a name."""

    name: str
    text: str


@dataclass(frozen=True)
class Texts:
    """Documents with distinct names.

    Args:
        documents: the documents, in the order of their file or folder.
        source: where the documents come from.
        rejected: the texts that could not be read.
    """

    documents: tuple[Document, ...]
    source: str
    rejected: tuple[Rejected, ...] = ()


@dataclass(frozen=True)
class Entry:
    """A text that can be read later.

    Args:
        id: the place of the text in the file or folder, such as `line 3`.
        where: what an error calls the text.
        content: a function that returns the name that the file gives the text, None if it gives
            none, and the text; or raises `Unreadable`.
    """

    id: str
    where: str
    content: Callable[[], tuple[str | None, str]]


def read_texts(name: str | Path, root: str | Path | None = None, strict: bool = True) -> Texts:
    """Read the documents of a file or a folder.

    Args:
        name: the path of a `.txt` file, which is one document; of a folder of such files, at any
            depth; of a `.jsonl` file, with an object that has a "text" on each line; or of a
            `.parquet` file with a column "text". The last two may name a document in "id" or
            "name"; a document without a name is named after its line or row. The path is absolute,
            relative to the working directory, or relative to `root`.
        root: the folder of datasets; None for the folder in the environment variable QUALMS_DATA,
            or `data` if that is not set.
        strict: whether a text that cannot be read is an error. If not, the text is left out and
            listed in `Texts.rejected`.
    """
    place = find_data_path(str(name), datasets_root(root))
    if place is None:
        raise QualmsError(
            f"there is no {name} in the working directory or {datasets_root(root)}; "
            f"pass {ACCEPTED}."
        )
    if place.is_dir():
        return _read_documents(place, _iter_files(place), f"{place}/ (folder)", strict)
    ending = place.suffix.lower()
    if ending == ".txt":
        return _read_documents(place, [_as_entry(place, place.name)], str(place), strict=True)
    if ending == ".jsonl":
        return _read_documents(place, _iter_lines(place), str(place), strict)
    if ending == ".parquet":
        return _read_documents(place, _iter_rows(place), str(place), strict)
    raise QualmsError(f"{place} is not in a supported format; pass {ACCEPTED}.")


def _read_documents(
    place: Path,
    entries: Iterator[Entry] | Sequence[Entry],
    source: str,
    strict: bool,
) -> Texts:
    """Read texts, and give each a distinct name.

    Args:
        place: the file or folder of the texts, for errors.
        entries: the texts to read.
        source: where the texts come from, for `Texts.source`.
        strict: whether a text that cannot be read is an error.
    """
    documents: dict[str, Document] = {}
    rejected: list[Rejected] = []
    for entry in entries:
        try:
            given_name, text = entry.content()
            _require_text(text, entry.where)
            _require_no_surrogates(given_name or "", entry.where, how="named in")
        except Unreadable as error:
            if strict:
                raise
            rejected.append(Rejected(entry.id, error.reason))
            continue
        name = given_name or entry.id
        # Names must be distinct, since they identify rows of tables.
        while name in documents:
            name = f"{name} ({entry.id})"
        documents[name] = Document(name, text)
    if not documents:
        raise _nothing_read_error(place, rejected)
    return Texts(tuple(documents.values()), source, tuple(rejected))


def _as_entry(path: Path, name: str) -> Entry:
    """Create the `Entry` for a .txt file.

    Args:
        path: the path of the file.
        name: the id of the text, which also becomes its name.
    """
    return Entry(name, where=str(path), content=partial(_read_file, path))


def _iter_files(folder: Path) -> Iterator[Entry]:
    """Yield an `Entry` for each .txt file in a folder, at any depth, except hidden ones."""
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        is_hidden = any(part.startswith(".") for part in relative.parts)
        if path.suffix.lower() == ".txt" and not is_hidden and not path.is_dir():
            yield _as_entry(path, relative.as_posix())


def _read_file(path: Path) -> tuple[None, str]:
    """Read a .txt file, with all line breaks converted to newlines.

    Returns:
        None, since a .txt file contains no name for its text; and the text.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise Unreadable(str(path), f"a file that cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise Unreadable(str(path), _not_utf8_reason(error)) from None
    return None, text.replace("\r\n", "\n").replace("\r", "\n")


def _iter_lines(path: Path) -> Iterator[Entry]:
    """Yield an `Entry` for each line of a .jsonl file that is not empty."""
    for number, line in enumerate(read_file_bytes(path).split(b"\n"), 1):
        if line.strip():
            where = f"line {number} of {path}"
            yield Entry(f"line {number}", where, content=partial(_read_line, line, where))


def _read_line(line: bytes, where: str) -> tuple[str | None, str]:
    """Read a document from a line of JSON: its name and its text.

    Args:
        line: the bytes of the line.
        where: what errors call the line.

    Returns:
        The name, None if the line contains none; and the text.
    """
    try:
        values = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise Unreadable(where, _not_utf8_reason(error)) from None
    except (ValueError, RecursionError) as error:
        raise Unreadable(where, f"not JSON ({type(error).__name__})") from None
    if not isinstance(values, dict):
        raise Unreadable(where, f'not an object with the key "{TEXT_KEY}"')
    return _get_name_and_text(values, where)


def _iter_rows(path: Path) -> Iterator[Entry]:
    """Yield an `Entry` for each row of a .parquet file."""
    arrow = import_extra("pyarrow", "pyarrow", ".parquet files")
    parquet = import_extra("pyarrow.parquet", "pyarrow", ".parquet files")
    with explain_parquet_errors(path):
        file = parquet.ParquetFile(arrow.BufferReader(read_file_bytes(path)))
        columns: Sequence[str] = file.schema_arrow.names
        if TEXT_KEY not in columns:
            raise QualmsError(
                f"{path} has the columns {', '.join(columns) or 'none'}, but no column {TEXT_KEY}; "
                "rename the column that contains the texts."
            )
        used_columns = [key for key in (TEXT_KEY, *NAME_KEYS) if key in columns]
        rows = file.read(columns=used_columns).to_pylist()
    for number, row in enumerate(rows):
        where = f"row {number} of {path}"
        yield Entry(f"row {number}", where, content=partial(_get_name_and_text, row, where))


def _get_name_and_text(values: Mapping[str, Any], where: str) -> tuple[str | None, str]:
    """Return the name of a document, None if it has none, and its text.

    Args:
        values: a line of a .jsonl file or a row of a .parquet file: values by key or column.
        where: what an error calls the line or row.
    """
    text = values.get(TEXT_KEY)
    if not isinstance(text, str):
        raise Unreadable(where, f'without a string in "{TEXT_KEY}"')
    for key in NAME_KEYS:
        name = values.get(key)
        if isinstance(name, (str, int)) and str(name):
            return str(name), text
    return None, text


def _require_text(text: str, where: str) -> None:
    """Raise `Unreadable` if a text is empty or invalid Unicode; `where` names it in the message."""
    if not text.strip():
        raise Unreadable(where, "empty")
    _require_no_surrogates(text, where, how="written in")


def _require_no_surrogates(text: str, where: str, how: str) -> None:
    """Raise an error if a text has lone surrogates, which JSON can encode but UTF-8 cannot.

    Args:
        text: a document's text or name.
        where: what the error calls the document.
        how: the words before "invalid Unicode" in the error: "written in" or "named in".
    """
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise Unreadable(where, f"{how} invalid Unicode (lone surrogates)")


def _not_utf8_reason(error: UnicodeDecodeError) -> str:
    """Write the reason for `Unreadable` that bytes are not UTF-8, with the first wrong position."""
    return f"not in UTF-8 (byte {error.start})"


def _nothing_read_error(where: Path, rejected: Sequence[Rejected]) -> QualmsError:
    """Create the error that no text could be read, with the reason of the first.

    Args:
        where: the file or folder of the texts.
        rejected: the texts that could not be read; empty if there are none.
    """
    if not rejected:
        return QualmsError(f"{where} contains no texts; pass {ACCEPTED}.")
    first = rejected[0]
    more = ""
    if len(rejected) > 1:
        more = f", and {len(rejected) - 1} more"
    return QualmsError(
        f"no text can be read from {where}: {first.id} is {first.reason}{more}; correct the files."
    )
