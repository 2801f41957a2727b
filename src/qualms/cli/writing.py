"""Files that are tried before the work, and written whole or not at all."""

import csv
import io
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from qualms.cli.status import echo
from qualms.data import Rejected
from qualms.disk import atomic_write, explain_write_failure, require_writable
from qualms.errors import QualmsError
from qualms.methods.gradient_score import GradientScore
from qualms.result import Scored
from qualms.scorer import Scorer
from qualms.texts.token_table import TokenTable

STDOUT = "-"
ENDINGS = (".csv", ".parquet", ".jsonl")
Rows = Scored | TokenTable


def require_place(path: Path, overwrite: bool) -> None:
    """An error, before there is any work to lose, if a file cannot be written there, or one is
    there already.
    """
    if path.is_dir():
        raise QualmsError(f"--out {path} is a folder; name a file.")
    if path.exists() and not overwrite:
        raise QualmsError(
            f"{path} is there already; pass --overwrite to replace it, or another --out."
        )
    require_writable(path, _called(path))


def table(out: str, overwrite: bool, json_lines: bool) -> "Table":
    """A table to be written to a file, or to stdout."""
    if out == STDOUT:
        return Table(None, ".jsonl" if json_lines else ".csv")
    path = Path(out)
    ending = path.suffix.lower()
    if ending not in ENDINGS:
        raise QualmsError(
            f"a table cannot be written to --out {out}; name a .csv, .parquet or .jsonl file, or - for stdout."
        )
    if ending == ".parquet":
        _parquet()
    listed = rejected_file(path)
    if listed.exists() and not overwrite:
        raise QualmsError(
            f"{listed} is there already; pass --overwrite to replace it, or another --out."
        )
    require_place(path, overwrite)
    return Table(path, ending)


class Table:
    """Where scores go, and in which format."""

    def __init__(self, path: Path | None, ending: str) -> None:
        self.path, self.ending = path, ending

    def write(self, rows: Rows, rejected: Sequence[Rejected]) -> None:
        """All rows, with a list of what could not be read beside them."""
        if self.path is None:
            text = io.StringIO()
            _rows(rows, self.ending, text)
            typer.echo(text.getvalue(), nl=False)
            return
        with complete(self.path, rejected) as part:
            if self.ending == ".parquet":
                _parquet().write_table(rows.to_arrow(), part)
            else:
                with open(part, "w", newline="", encoding="utf-8") as file:
                    _rows(rows, self.ending, file)


def deliver(rows: Rows, out: str | None, json_lines: bool, told: str) -> None:
    """What is left once the table is written: the rows as JSON, and the last words."""
    if json_lines and out != STDOUT:
        typer.echo("\n".join(json_rows(rows)))
    if json_lines or out == STDOUT:
        echo(told)
    else:
        typer.echo(told)


def json_rows(rows: Rows) -> Iterator[str]:
    """A line of JSON for each row."""
    columns = rows.columns()
    for row in zip(*columns.values(), strict=True):
        yield json.dumps(dict(zip(columns, row, strict=True)))


def rejected_file(out: Path) -> Path:
    """Where it is written which inputs could not be read."""
    return out.with_name(f"{out.stem}.rejected.csv")


@contextmanager
def complete(out: Path, rejected: Sequence[Rejected]) -> Iterator[Path]:
    """A file to be filled, as `atomic_write`; what could not be read is listed before it takes its
    place.
    """
    with explain_write_failure(_called(out)):
        out.parent.mkdir(
            parents=True, exist_ok=True
        )  # somebody may have removed it since it was tried
        with atomic_write(out, _called(out)) as part:
            yield part
            _write_rejected(out, rejected)


def _write_rejected(out: Path, rejected: Sequence[Rejected]) -> None:
    """Which inputs could not be read, and why; no file if there are none."""
    path, rows = rejected_file(out), [(one.id, one.reason) for one in rejected]
    if not rows:
        path.unlink(missing_ok=True)  # of an earlier run
        return
    with (
        explain_write_failure(path),
        atomic_write(path) as part,
        open(part, "w", newline="", encoding="utf-8") as file,
    ):
        _csv({"id": [one for one, _ in rows], "reason": [why for _, why in rows]}, file)


def _called(path: Path) -> str:
    return f"--out {path}"


def summary(
    scorer: Scorer,
    scored: int,
    accepted: int | None,
    by: str,
    out: object,
    rejected: int,
    listed: Path | None,
) -> str:
    """The last line: how many images were scored, accepted and not read, by what, and where that
    is.
    """
    told = f"{scored} image{'' if scored == 1 else 's'} scored by {', '.join(scorer.methods)}"
    if scorer.settings.engine != "auto" and any(
        isinstance(m, GradientScore) for m in scorer.methods.values()
    ):
        told += f" ({scorer.settings.description})"
    if scorer.threshold is not None:
        first = next(iter(scorer.methods))
        told += (
            f"; {accepted or 0} of {scored} accepted by {first}, at {scorer.threshold.rule} of {by}"
        )
    if out is not None:
        told += f": {out}"
    return told + unread(rejected, listed)


def unread(rejected: int, listed: Path | None) -> str:
    """The end of the last line, if some inputs could not be read: how many, and where they are
    listed.
    """
    return (
        f"; {rejected} could not be read{'' if listed is None else f': {listed}'}"
        if rejected
        else ""
    )


def _rows(rows: Rows, ending: str, file: io.TextIOBase) -> None:
    if ending == ".csv":
        _csv(rows.columns(), file)
    else:
        file.writelines(f"{row}\n" for row in json_rows(rows))


def _csv(columns: dict[str, list[Any]], file: io.TextIOBase) -> None:
    lines = csv.writer(_UnixLines(file))
    lines.writerow(columns)
    lines.writerows(zip(*columns.values(), strict=True))


class _UnixLines:
    """Lines of CSV that end in a line feed alone. A writer told to end them so would leave a \\r in
    a text unquoted.
    """

    def __init__(self, file: io.TextIOBase) -> None:
        self.file = file

    def write(self, line: str) -> None:
        self.file.write(f"{line.removesuffix(csv.excel.lineterminator)}\n")


def _parquet() -> Any:
    try:
        from pyarrow import parquet
    except ImportError:
        raise QualmsError(
            "writing .parquet needs pyarrow; install it, or write .csv or .jsonl."
        ) from None
    return parquet
