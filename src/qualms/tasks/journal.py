"""Rows of numbers on disk, as JSON lines: each is written before the next is computed, so a killed
run loses nothing.

The first line says what the run is about; a file is only ever continued by the same run. A line
that was cut short by a kill is dropped when the file is opened again.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any, Literal, TypeVar, overload

from qualms.disk import append_lines, lock_file
from qualms.errors import QualmsError
from qualms.tasks.checked import require_row
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


class Journal(AbstractContextManager["Journal"]):
    """The rows of one run, in memory and, with a path, on disk.

    Args:
        path: the file; None keeps the rows in memory alone.
        about: what decides the rows' values, such as the network and the seed; the file must say
            the same.
        advice: what errors tell the user to do about a file that cannot be continued.
        replace: whether such a file, if it holds rows of a run at all, is emptied and begun anew
            instead.
    """

    def __init__(
        self,
        path: str | Path | None,
        about: dict[str, Any],
        advice: str = "choose another file, or delete it",
        replace: bool = False,
    ) -> None:
        self._rows: list[Row] = []
        self._file: IO[bytes] | None = None
        if path is None:
            return
        self._path, self._file = Path(path), lock_file(Path(path))
        try:
            self._begin(
                Path(path), json.loads(json.dumps({"row": "run", **about})), advice, replace
            )
        except BaseException:  # also Ctrl-C
            self._file.close()
            raise

    def _begin(self, path: Path, about: dict[str, Any], advice: str, replace: bool) -> None:
        assert self._file is not None
        try:
            self._continue(path, about, advice)
        except QualmsError:
            self._file.seek(0)
            if not replace or self._file.read(len(START)) != START:
                raise
            self._file.truncate(0)
            self._rows = []
            self._write(about)

    def _continue(self, path: Path, about: dict[str, Any], advice: str) -> None:
        assert self._file is not None
        first, *self._rows = _read(self._file, path) or [{}]
        if not first:
            self._write(about)
        elif first != about:
            raise QualmsError(f"{path} holds a run with {_difference(first, about)}; {advice}.")

    def add(self, row: Kind) -> Kind:
        """Keep a row; it is on disk when this returns."""
        if self._file is not None:
            self._write(row)
        self._rows.append(row)
        return row

    @overload
    def where(self, *, row: Literal["ood"], **key: Any) -> list[OodRow]: ...
    @overload
    def where(self, *, row: Literal["calibration"], **key: Any) -> list[CalibrationRow]: ...
    @overload
    def where(self, *, row: Literal["scores"], **key: Any) -> list[ScoresRow]: ...
    @overload
    def where(self, *, row: Literal["accuracy"], **key: Any) -> list[AccuracyRow]: ...
    @overload
    def where(self, *, row: Literal["cycle"], **key: Any) -> list[CycleRow]: ...
    @overload
    def where(self, *, row: Literal["pick"], **key: Any) -> list[PickRow]: ...
    @overload
    def where(self, *, row: Literal["runtime"], **key: Any) -> list[RuntimeRow]: ...
    @overload
    def where(self, *, row: Literal["tokens"], **key: Any) -> list[TokensRow]: ...
    @overload
    def where(self, *, row: Literal["text"], **key: Any) -> list[TextRow]: ...
    @overload
    def where(self, *, row: Literal["next-token"], **key: Any) -> list[NextTokenRow]: ...
    @overload
    def where(self, *, row: Literal["part"], **key: Any) -> list[PartRow]: ...
    @overload
    def where(self, **key: Any) -> list[Row]: ...
    def where(self, **key: Any) -> Any:
        """The rows with these values."""
        return [row for row in self._rows if all(row.get(k) == v for k, v in key.items())]

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def _write(self, row: Mapping[str, Any]) -> None:
        assert self._file is not None
        append_lines(self._file, self._path, json.dumps(row, allow_nan=False).encode() + b"\n")


def read(path: str | Path) -> list[Any]:
    """The rows that a run has left, whatever it was about."""
    try:
        with open(path, "rb") as file:
            return _rows(file.read(), Path(path), whole=True)
    except OSError as error:
        raise QualmsError(
            f"{path} cannot be read ({error.strerror}); name the rows of a run."
        ) from None


def _read(file: IO[bytes], path: Path) -> list[Any]:
    """The rows of an open file, which loses a last line that was cut short."""
    file.seek(0)
    content = file.read()
    rows = _rows(content, path, whole=False)
    whole = content.rfind(b"\n") + 1
    if whole < len(content):  # only now: a file that somebody else wrote stays as it is
        file.truncate(whole)
    return rows


def _difference(kept: dict[str, Any], asked: dict[str, Any]) -> str:
    """The first thing in which two runs differ: `another seed (0, not 1)`, or `other methods
    (energy)`.
    """
    what = next(k for k in {**kept, **asked} if kept.get(k) != asked.get(k))
    one, other = kept.get(what), asked.get(what)
    if not isinstance(one, dict) or not isinstance(other, dict):
        return f"another {what} ({one}, not {other})"
    changed = [k for k in {**one, **other} if one.get(k) != other.get(k)]
    return f"other {what} ({', '.join(changed)})"


def _rows(content: bytes, path: Path, whole: bool) -> list[Any]:
    rows: list[Any] = []
    for number, line in enumerate(content[: content.rfind(b"\n") + 1].splitlines(), start=1):
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
