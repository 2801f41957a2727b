"""Texts: a .txt file, a folder of them, or the lines or rows of a .jsonl or .parquet file."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from qualms.data.decode import Unreadable
from qualms.data.images import Rejected
from qualms.data.loading import place_of, root_of
from qualms.data.parquet import explain_parquet_errors
from qualms.data.places import import_extra, read_file_bytes
from qualms.errors import QualmsError

TEXT, NAMES = (
    "text",
    ("id", "name"),
)  # keys of a line and columns of a table; of the names, the first that is there
KINDS = "a .txt, .jsonl or .parquet file, or a folder of .txt files"


@dataclass(frozen=True)
class Document:
    """A text with a name."""

    name: str
    text: str


@dataclass(frozen=True)
class Texts:
    """Documents, each of a name of its own, where they come from, and what could not be read."""

    documents: tuple[Document, ...]
    source: str
    rejected: tuple[Rejected, ...] = ()


@dataclass(frozen=True)
class Entry:
    """A text to be read: its place, what an error calls it, and its own name, if any, and text:
    maybe `Unreadable`.
    """

    id: str
    where: str
    content: Callable[[], tuple[str | None, str]]


def read_texts(name: str | Path, root: str | Path | None = None, strict: bool = True) -> Texts:
    """The documents of a file or a folder.

    Args:
        name: a `.txt` file, which is one document of that name; a folder of such files, at any
            depth; a `.jsonl` file, with an object that has a "text" on each line; or a `.parquet`
            file with a column "text". The last two may name a document in "id" or "name"; others go
            by their line or row. A path is absolute, relative to the working directory, or relative
            to `root`.
        root: the folder of datasets: if not given, the one in the environment variable QUALMS_DATA,
            else `data`.
        strict: whether a text that cannot be read is an error. If not, it is left out and among
            `rejected`.
    """
    place = place_of(str(name), root_of(root))
    if place is None:
        raise QualmsError(
            f"there is no {name} in the working directory or {root_of(root)}; give {KINDS}."
        )
    read = _files if place.is_dir() else READERS.get(place.suffix.lower())
    if read is None:
        raise QualmsError(f"{place} is not among the texts that can be read; give {KINDS}.")
    documents: dict[str, Document] = {}
    rejected: list[Rejected] = []
    for entry in read(place):
        try:
            own, text = entry.content()
            _require_text(text, entry.where)
            _require_whole(own or "", entry.where, "called by")
        except Unreadable as error:
            if strict or read is _file:
                raise
            rejected.append(Rejected(entry.id, error.reason))
            continue
        called = own or entry.id
        while called in documents:  # else a table could not tell them apart
            called = f"{called} ({entry.id})"
        documents[called] = Document(called, text)
    if not documents:
        raise _nothing(place, rejected)
    return Texts(
        tuple(documents.values()),
        f"{place}/ (folder)" if place.is_dir() else str(place),
        tuple(rejected),
    )


def _file(path: Path) -> Iterator[Entry]:
    yield Entry(path.name, str(path), partial(_content, path))


def _files(folder: Path) -> Iterator[Entry]:
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        hidden = any(part.startswith(".") for part in inside.parts)
        if path.suffix.lower() == ".txt" and not hidden and not path.is_dir():
            yield Entry(inside.as_posix(), str(path), partial(_content, path))


def _content(path: Path) -> tuple[None, str]:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise Unreadable(str(path), f"no file that can be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise Unreadable(str(path), _not_utf8(error)) from None
    return None, text.replace("\r\n", "\n").replace("\r", "\n")


def _lines(path: Path) -> Iterator[Entry]:
    for number, line in enumerate(read_file_bytes(path).split(b"\n"), 1):
        if line.strip():
            where = f"line {number} of {path}"
            yield Entry(f"line {number}", where, partial(_of_line, line, where))


def _of_line(line: bytes, where: str) -> tuple[str | None, str]:
    try:
        values = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise Unreadable(where, _not_utf8(error)) from None
    except (ValueError, RecursionError) as error:
        raise Unreadable(where, f"not JSON ({type(error).__name__})") from None
    if not isinstance(values, dict):
        raise Unreadable(where, f'no object with a "{TEXT}"')
    return _named(values, where)


def _rows(path: Path) -> Iterator[Entry]:
    arrow = import_extra("pyarrow", "pyarrow", ".parquet files")
    parquet = import_extra("pyarrow.parquet", "pyarrow", ".parquet files")
    with explain_parquet_errors(path):
        file = parquet.ParquetFile(arrow.BufferReader(read_file_bytes(path)))
        kept: Sequence[str] = file.schema_arrow.names
        if TEXT not in kept:
            raise QualmsError(
                f"{path} has the columns {', '.join(kept) or 'none'} and no {TEXT}; name that column so."
            )
        rows = file.read(columns=[key for key in (TEXT, *NAMES) if key in kept]).to_pylist()
    for number, row in enumerate(rows):
        where = f"row {number} of {path}"
        yield Entry(f"row {number}", where, partial(_named, row, where))


def _named(values: Mapping[str, Any], where: str) -> tuple[str | None, str]:
    """The name and the text of a line or row."""
    if not isinstance(values.get(TEXT), str):
        raise Unreadable(where, f'without a string "{TEXT}"')
    names = (values.get(key) for key in NAMES)
    return next(
        (str(name) for name in names if isinstance(name, (str, int)) and str(name)), None
    ), values[TEXT]


def _require_text(text: str, where: str) -> None:
    if not text.strip():
        raise Unreadable(where, "empty")
    _require_whole(text, where, "made of")


def _require_whole(text: str, where: str, how: str) -> None:
    if any(
        "\ud800" <= character <= "\udfff" for character in text
    ):  # JSON can say this, and no text can hold it
        raise Unreadable(where, f"{how} halves of characters (lone surrogates)")


def _not_utf8(error: UnicodeDecodeError) -> str:
    return f"not in UTF-8 (byte {error.start})"


def _nothing(where: Path, rejected: Sequence[Rejected]) -> QualmsError:
    if not rejected:
        return QualmsError(f"{where} holds no texts; give {KINDS}.")
    first = rejected[0]
    return QualmsError(
        f"no text can be read from {where}: {first.id} is {first.reason}"
        f"{'' if len(rejected) == 1 else f', and {len(rejected) - 1} more'}; correct what is there."
    )


READERS = {".txt": _file, ".jsonl": _lines, ".parquet": _rows}
