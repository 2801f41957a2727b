"""Rows of numbers on disk, as JSON lines, so that a run that is killed can be resumed.

Each row is written before the next is computed. The first line, the header, describes the run, and
a file is only continued by the same run. A last line that was cut short is dropped when the file is
opened again.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    IO,
    Any,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from qualms.disk import append_lines, lock_file
from qualms.errors import QualmsError
from qualms.tasks.rows import (
    AccuracyRow,
    CalibrationRow,
    CycleRow,
    NextTokenRow,
    OodRow,
    PartRow,
    PickRow,
    Row,
    RuntimeRow,
    ScoresRow,
    TextRow,
    TokensRow,
)

RowT = TypeVar("RowT", bound=Row)
# The header, so every file of rows, begins with these bytes.
HEADER_PREFIX = b'{"row": "run"'
# The type of each kind of row; the key `row` of a row holds its kind.
ROW_TYPES: dict[str, Any] = {
    "ood": OodRow,
    "calibration": CalibrationRow,
    "scores": ScoresRow,
    "accuracy": AccuracyRow,
    "cycle": CycleRow,
    "pick": PickRow,
    "runtime": RuntimeRow,
    "tokens": TokensRow,
    "text": TextRow,
    "next-token": NextTokenRow,
    "part": PartRow,
}


class Journal(AbstractContextManager["Journal"]):
    """The rows of one run, in memory and, with a path, in a file of JSON lines.

    On disk, the first line is the header, which describes the run, and every other line is a row. A
    row is a dict of numbers and names, such as `OodRow`; its key `row` names its kind.
    """

    def __init__(
        self,
        path: str | Path | None,
        about: dict[str, Any],
        advice: str = "choose another file, or delete it",
        replace: bool = False,
    ) -> None:
        """Open and lock a file of rows, a new one or that of an earlier run, until `__exit__`.

        Args:
            path: The file; None keeps the rows in memory only.
            about: All settings that decide the values of the rows, such as the network and the
                seed. They form the header; an existing file must have an equal one.
            advice: The end of the error message if the file has another header: what to do then.
            replace: Whether to empty a file that cannot be continued and to start again, provided
                that it begins with `HEADER_PREFIX`. Other files are never emptied.
        """
        # All rows of the file, without its header.
        self._rows: list[Row] = []
        # The open, locked file; None keeps the rows in memory only.
        self._file: IO[bytes] | None = None
        if path is None:
            return
        self._path = Path(path)
        with ExitStack() as on_failure:
            self._file = on_failure.enter_context(lock_file(self._path))
            # To JSON and back, as the header in the file was: tuples become lists.
            header = json.loads(json.dumps({"row": "run", **about}))
            self._begin(header, advice, replace)
            # No error was raised, so the file is not closed at the end of this block.
            on_failure.pop_all()

    def _begin(self, header: dict[str, Any], advice: str, replace: bool) -> None:
        """Continue the open file; with `replace`, empty it and start again if that fails.

        The file is open in append mode: it can be read from any position, but every write goes to
        its end.

        Args:
            header: The first line of this run's file, as a dict.
            advice: The end of the error message if the file has another header.
            replace: Whether a file of rows that cannot be continued may be emptied.
        """
        assert self._file is not None
        try:
            self._continue(header, advice)
        except QualmsError:
            self._file.seek(0)
            is_row_file = self._file.read(len(HEADER_PREFIX)) == HEADER_PREFIX
            # A file of another kind is never emptied.
            if not replace or not is_row_file:
                raise
            self._file.truncate(0)
            self._rows = []
            # No `seek` is needed: in append mode, this writes to the end of the empty file.
            self._write(header)

    def _continue(self, header: dict[str, Any], advice: str) -> None:
        """Read the rows that an earlier run left in the open file; write the header if it is empty.

        Args:
            header: The first line of this run's file, as a dict.
            advice: The end of the error message if the file has another header: what to do then.

        Raises:
            QualmsError: If the file holds another run, or no rows.
        """
        assert self._file is not None
        old_lines = _read_and_repair(self._file, self._path)
        if not old_lines:
            self._write(header)
            return
        old_header, *self._rows = old_lines
        if old_header != header:
            difference = _describe_difference(old_header, header)
            raise QualmsError(f"{self._path} holds a run with {difference}; {advice}.")

    def add(self, row: RowT) -> RowT:
        """Append a row, and return it; if the journal has a file, the row is then on disk."""
        if self._file is not None:
            self._write(row)
        self._rows.append(row)
        return row

    def where(self, **key: Any) -> list[Any]:
        """Return the rows with these values, as in `where(row="ood", seed=0)`."""
        matching_rows = []
        for row in self._rows:
            if all(row.get(name) == value for name, value in key.items()):
                matching_rows.append(row)
        return matching_rows

    def get_or_add(self, key: Mapping[str, Any], measure: Callable[[], RowT]) -> RowT:
        """Return the first row with these entries; if there is none, add the row of `measure`.

        Args:
            key: The entries of the row that decide its numbers: method, seed, data and so on.
            measure: Called without arguments if there is no such row; returns the complete row,
                with the entries of `key`.
        """
        matching_rows = self.where(**key)
        return matching_rows[0] if matching_rows else self.add(measure())

    def __iter__(self) -> Iterator[Row]:
        """Iterate over all rows, without the header."""
        return iter(self._rows)

    def __exit__(self, *_: object) -> None:
        """Close the file, which unlocks it."""
        if self._file is not None:
            self._file.close()

    def _write(self, row: Mapping[str, Any]) -> None:
        """Append a row or the header to the open file as a line; return once it is on disk."""
        assert self._file is not None
        append_lines(self._file, self._path, json.dumps(row, allow_nan=False).encode() + b"\n")


def read(path: str | Path) -> list[Any]:
    """Read the file of a journal, whichever run wrote it.

    Unlike for a run that resumes, the keys of all rows are checked.

    Returns:
        The header, then the rows; each is a dict.

    Raises:
        QualmsError: If the file cannot be read, or is not a file of rows.
    """
    try:
        with open(path, "rb") as file:
            return _parse_rows(file.read(), Path(path), require_all_keys=True)
    except OSError as error:
        raise QualmsError(
            f"{path} cannot be read ({error.strerror}); pass a file of rows."
        ) from None


def _read_and_repair(file: IO[bytes], path: Path) -> list[Any]:
    """Read all lines of an open file, and cut off a last line that lacks its line break.

    Args:
        file: A file that is open for reading and appending. The run that wrote it may have been
            killed in the middle of a line.
        path: The path of the file, for errors.

    Returns:
        The header, then the rows; empty if the file has no complete line.
    """
    file.seek(0)
    content = file.read()
    # First, since this raises an error for a file of another kind, which must not be changed.
    lines = _parse_rows(content, path, require_all_keys=False)
    length_of_complete_lines = content.rfind(b"\n") + 1
    if length_of_complete_lines < len(content):
        file.truncate(length_of_complete_lines)
    return lines


def _describe_difference(old_header: dict[str, Any], header: dict[str, Any]) -> str:
    """Describe the first entry in which the headers of two runs differ.

    Args:
        old_header: The header in the file.
        header: The header of the run that wants to continue the file.

    Returns:
        Such as `another seed (0, not 1)`; for an entry that is a dict, such as `methods`, the keys
        that differ, as in `other methods (energy)`.
    """
    key = _differing_keys(old_header, header)[0]
    old, new = old_header.get(key), header.get(key)
    if isinstance(old, dict) and isinstance(new, dict):
        return f"other {key} ({', '.join(_differing_keys(old, new))})"
    return f"another {key} ({old}, not {new})"


def _differing_keys(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Return the keys of either dict whose values differ; a missing key counts as None."""
    return [key for key in {**old, **new} if old.get(key) != new.get(key)]


def _parse_rows(content: bytes, path: Path, require_all_keys: bool) -> list[Any]:
    """Parse the lines of a file; a last line that lacks its line break is ignored.

    Args:
        content: The bytes of the file.
        path: The path of the file, for errors.
        require_all_keys: Whether every row must have all keys of its kind.

    Returns:
        The header, then the rows.

    Raises:
        QualmsError: If a line is not a row, or the file does not begin with `HEADER_PREFIX`.
    """
    rows: list[Any] = []
    # Without the bytes after the last line break.
    complete_lines = content[: content.rfind(b"\n") + 1].splitlines()
    for number, line in enumerate(complete_lines, start=1):
        try:
            row = json.loads(line)
            _require_row(row, require_all_keys)
        except (ValueError, RecursionError):
            raise QualmsError(
                f"line {number} of {path} is not a row of a run; choose another file."
            ) from None
        rows.append(row)
    # A file may have been cut short within the prefix, or be empty.
    is_cut_prefix = HEADER_PREFIX.startswith(content)
    if not content.startswith(HEADER_PREFIX) and not is_cut_prefix:
        raise QualmsError(f"{path} is not a file of rows; choose another file.")
    return rows


def _require_row(row: Any, require_all_keys: bool) -> None:
    """Raise an error unless a parsed line of JSON can be a row.

    A row is a dict. If its kind is in `ROW_TYPES`, its values must have the types given there; the
    header, and rows of other kinds, may hold anything.

    Args:
        row: The parsed line.
        require_all_keys: Whether the row must name its kind, and have all keys of that kind.

    Raises:
        ValueError: If the line cannot be a row.
    """
    if not isinstance(row, dict):
        raise ValueError("no row")
    kind = row.get("row")  # such as "scores"
    if not isinstance(kind, str):
        if require_all_keys:
            raise ValueError("no row")
        return
    row_type = ROW_TYPES.get(kind)
    if row_type is None:
        return
    type_hints = _type_hints(row_type)
    for key, value in row.items():
        if key in type_hints and not _has_type(value, type_hints[key]):
            raise ValueError("values of other types")
    if require_all_keys and not row_type.__required_keys__ <= row.keys():
        raise ValueError("keys are missing")


@cache
def _type_hints(row_type: Any) -> dict[str, Any]:
    """Return the annotation of each key of a row type; cached, as resolving them is slow."""
    return get_type_hints(row_type)


def _has_type(value: Any, hint: Any) -> bool:
    """Whether a value from JSON has the type of an annotation, such as `dict[str, list[float]]`.

    Only the annotations that occur in `ROW_TYPES` are handled; integers count as floats, and floats
    must be finite.
    """
    # Of `list[float]`: the origin `list`, and the arguments `(float,)`.
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return value in arguments
    if origin in (Union, UnionType):
        return any(_has_type(value, item) for item in arguments)
    if origin is list:
        return isinstance(value, list) and all(_has_type(item, arguments[0]) for item in value)
    if origin is dict:
        if not isinstance(value, dict):
            return False
        # The keys of JSON objects are always strings.
        return all(_has_type(item, arguments[1]) for item in value.values())
    # `type` instead of `isinstance`, for which True would be an int.
    if hint is float:
        return type(value) in (int, float) and abs(value) <= sys.float_info.max
    if hint in (None, NoneType):
        return value is None
    return type(value) is hint
