"""Rows of numbers on disk, as JSON lines, so that a run that is killed can be resumed.

Each row is written before the next is computed. The first line describes the run, and a file is
only continued by the same run. A line that was cut short is dropped when the file is opened again.
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

Kind = TypeVar("Kind", bound=Row)
START = b'{"row": "run"'  # how every file of rows begins
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

    On disk, the first line describes the run, and every other line is a row. A row is a dict of
    numbers and names, such as `OodRow`; its key `row` tells its kind.
    """

    def __init__(
        self,
        path: str | Path | None,
        about: dict[str, Any],
        advice: str = "choose another file, or delete it",
        replace: bool = False,
    ) -> None:
        """Begin a file, or continue one; it is locked until the journal is closed.

        Args:
            path: The file; None keeps the rows in memory only.
            about: What decides the values of the rows, such as the network and the seed. An
                existing file must have the same.
            advice: What to do about the file of another run: a clause that ends the error.
            replace: Whether to empty a file that cannot be continued and to start again, provided
                that it begins as a file of rows does. Other files are never emptied.
        """
        self._rows: list[Row] = []
        self._file: IO[bytes] | None = None
        if path is None:
            return
        self._path = Path(path)
        with ExitStack() as on_failure:
            self._file = on_failure.enter_context(lock_file(self._path))
            # Through JSON, so that it compares equal to the line that is read back.
            self._begin(json.loads(json.dumps({"row": "run", **about})), advice, replace)
            on_failure.pop_all()  # the file stays open

    def _begin(self, about: dict[str, Any], advice: str, replace: bool) -> None:
        """Continue the open file; with `replace`, empty it and start again if that fails.

        Args:
            about: The first line of this run.
            advice: What to do about the file of another run: a clause that ends the error.
            replace: Whether a file of rows that cannot be continued may be emptied.
        """
        assert self._file is not None
        try:
            self._continue(about, advice)
        except QualmsError:
            self._file.seek(0)
            if not replace or self._file.read(len(START)) != START:
                raise
            self._file.truncate(0)
            self._rows = []
            self._write(about)

    def _continue(self, about: dict[str, Any], advice: str) -> None:
        """Read the rows of the open file, or write its first line if it is empty.

        Args:
            about: The first line of this run; an error is raised if the file has another one.
            advice: What to do then: a clause that ends the error.
        """
        assert self._file is not None
        first, *self._rows = _read_and_repair(self._file, self._path) or [{}]
        if not first:
            self._write(about)
        elif first != about:
            difference = _describe_difference(first, about)
            raise QualmsError(f"{self._path} holds a run with {difference}; {advice}.")

    def add(self, row: Kind) -> Kind:
        """Append a row, and return it; with a path, it is on disk when this returns."""
        if self._file is not None:
            self._write(row)
        self._rows.append(row)
        return row

    def where(self, **key: Any) -> list[Any]:
        """Return the rows that have these values at these keys."""
        return [row for row in self._rows if all(row.get(k) == v for k, v in key.items())]

    def get_or_add(self, key: Mapping[str, Any], measure: Callable[[], Kind]) -> Kind:
        """Return the row with this key; measure and add it if the journal lacks it.

        Args:
            key: All that decides the row's numbers.
            measure: Returns the whole row.
        """
        matches = self.where(**key)
        return matches[0] if matches else self.add(measure())

    def __iter__(self) -> Iterator[Row]:
        """Iterate over all rows, without the first line of the file."""
        return iter(self._rows)

    def __exit__(self, *_: object) -> None:
        """Close the file, which unlocks it."""
        if self._file is not None:
            self._file.close()

    def _write(self, row: Mapping[str, Any]) -> None:
        """Append a line to the file, which is open, and wait until it is on disk."""
        assert self._file is not None
        append_lines(self._file, self._path, json.dumps(row, allow_nan=False).encode() + b"\n")


def read(path: str | Path) -> list[Any]:
    """Read a file of rows, of any run; the first item is the line that describes the run."""
    try:
        with open(path, "rb") as file:
            return _parse_rows(file.read(), Path(path), whole=True)
    except OSError as error:
        raise QualmsError(
            f"{path} cannot be read ({error.strerror}); pass a file of rows."
        ) from None


def _read_and_repair(file: IO[bytes], path: Path) -> list[Any]:
    """Read all lines of an open file, and cut off a last line without its line break.

    Returns:
        The line that describes the run, then the rows; empty if the file is empty.
    """
    file.seek(0)
    content = file.read()
    rows = _parse_rows(content, path, whole=False)
    whole = content.rfind(b"\n") + 1
    # Only now, since a file of another kind raises an error above.
    if whole < len(content):
        file.truncate(whole)
    return rows


def _describe_difference(kept: dict[str, Any], asked: dict[str, Any]) -> str:
    """Describe the first difference of two runs: `another seed (0, not 1)`, or `other methods
    (energy)`.
    """
    what = next(key for key in {**kept, **asked} if kept.get(key) != asked.get(key))
    old, new = kept.get(what), asked.get(what)
    if not isinstance(old, dict) or not isinstance(new, dict):
        return f"another {what} ({old}, not {new})"
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    return f"other {what} ({', '.join(keys)})"


def _parse_rows(content: bytes, path: Path, whole: bool) -> list[Any]:
    """Parse the complete lines of a file.

    Args:
        content: The bytes of the file.
        path: The path of the file, for errors.
        whole: Whether every row must have all keys of its kind, as in `require_row`.

    Returns:
        The line that describes the run, then the rows.
    """
    rows: list[Any] = []
    lines = content[: content.rfind(b"\n") + 1].splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            require_row(row, whole)
        except (ValueError, RecursionError):
            raise QualmsError(
                f"line {number} of {path} is not a row of a run; choose another file."
            ) from None
        rows.append(row)
    if not content.startswith(START) and not START.startswith(content):
        raise QualmsError(f"{path} is not a file of rows; choose another file.")
    return rows


def require_row(row: Any, whole: bool) -> None:
    """Raise an error unless a value is a row.

    Rows of kinds not in `ROW_TYPES` may hold anything.

    Args:
        row: The value.
        whole: Whether all keys of its kind must be there.

    Raises:
        ValueError: If it is not a row, or a value has another type than in rows of its kind.
    """
    kind = row.get("row") if isinstance(row, dict) else None
    if not isinstance(row, dict) or (whole and not isinstance(kind, str)):
        raise ValueError("no row")
    row_type = ROW_TYPES.get(kind) if isinstance(kind, str) else None
    if row_type is None:
        return
    hints = _type_hints(row_type)
    for key, value in row.items():
        if key in hints and not _has_type(value, hints[key]):
            raise ValueError("values of other types")
    if whole and not row_type.__required_keys__ <= row.keys():
        raise ValueError("keys are missing")


@cache
def _type_hints(row_type: Any) -> dict[str, Any]:
    """Return the types of a row's keys; cached, as resolving the annotations is slow."""
    return get_type_hints(row_type)


def _has_type(value: Any, hint: Any) -> bool:
    """Whether a value from JSON has the type that an annotation of a row's key names.

    Only the annotations that occur in `ROW_TYPES` are handled; integers count as floats, and floats
    must be finite.
    """
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
        return all(_has_type(item, arguments[1]) for item in value.values())
    if hint is float:
        return type(value) in (int, float) and abs(value) <= sys.float_info.max
    if hint in (None, NoneType):
        return value is None
    return type(value) is hint
