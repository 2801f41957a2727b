"""The table of `score`, and next to it the list of rejected inputs.

    scores.csv               a row for each image or token
    scores.rejected.csv      id and reason of each input that could not be read; absent if all could

Both files are written completely or not at all. `open_table` and `require_new_file` check that they
can be written, before the work begins.
"""

import csv
import io
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from qualms.cli.status import count_of, echo
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


def require_new_file(path: Path, overwrite: bool) -> None:
    """Raise an error, before any work, if --out cannot be written or exists; create its folder.

    Args:
        path: The file that --out names.
        overwrite: Whether the file may exist.
    """
    if path.is_dir():
        raise QualmsError(f"--out {path} is a folder; name a file.")
    _require_no_file(path, overwrite)
    require_writable(path, _output_name(path))


def _require_no_file(path: Path, overwrite: bool) -> None:
    """Raise an error if a file exists, unless it may be overwritten."""
    if path.exists() and not overwrite:
        raise QualmsError(
            f"{path} already exists; pass --overwrite to replace it, or choose another --out."
        )


def open_table(out: str, overwrite: bool, json_lines: bool) -> "Table":
    """Return the table that --out names; raise an error, before any work, if it is invalid.

    Args:
        out: The value of --out.
        overwrite: Whether an existing file is replaced.
        json_lines: Whether stdout gets JSON lines rather than CSV.
    """
    if out == STDOUT:
        return Table(None, ".jsonl" if json_lines else ".csv")
    path = Path(out)
    ending = path.suffix.lower()
    if ending not in ENDINGS:
        raise QualmsError(
            f"a table cannot be written to --out {out}; name a .csv, .parquet or .jsonl file, or - "
            "for stdout."
        )
    if ending == ".parquet":
        # Called for its error if pyarrow is missing.
        _import_parquet()
    # A file beside the table will list the inputs that cannot be read: it is checked first.
    _require_no_file(rejected_file(path), overwrite)
    require_new_file(path, overwrite)
    return Table(path, ending)


@dataclass(frozen=True)
class Table:
    """Where scores go, and in which format.

    Args:
        path: The file; None prints the table to stdout.
        ending: The format: .csv, .parquet or .jsonl.
    """

    path: Path | None
    ending: str

    def write(self, rows: Rows, rejected: Sequence[Rejected]) -> None:
        """Write all rows; if the table is a file, also list the inputs that could not be read.

        Args:
            rows: The scores of images or tokens.
            rejected: The inputs that could not be read.
        """
        if self.path is None:
            text = io.StringIO()
            _write_text(rows, self.ending, text)
            typer.echo(text.getvalue(), nl=False)
            return
        with write_with_rejections(self.path, rejected) as temp_path:
            if self.ending == ".parquet":
                _import_parquet().write_table(rows.to_arrow(), temp_path)
            else:
                with open(temp_path, "w", newline="", encoding="utf-8") as file:
                    _write_text(rows, self.ending, file)


def print_result(rows: Rows, out: str | None, json_lines: bool, summary: str) -> None:
    """Print the rows as JSON lines if --json is given, then the summary.

    The summary goes to stdout, or to stderr if rows go to stdout.

    Args:
        rows: The scores of images or tokens.
        out: The value of --out; None if only --json is given.
        json_lines: Whether --json is given.
        summary: The line that is printed last.
    """
    if json_lines and out != STDOUT:
        typer.echo("\n".join(_json_line_per_row(rows)))
    if json_lines or out == STDOUT:
        echo(summary)
    else:
        typer.echo(summary)


def rejected_file(out: Path) -> Path:
    """Return the path of the list of inputs that could not be read.

    Args:
        out: The file of the table.
    """
    return out.with_name(f"{out.stem}.rejected.csv")


@contextmanager
def write_with_rejections(out: Path, rejected: Sequence[Rejected]) -> Iterator[Path]:
    """Yield a temporary file that replaces `out` at the end of the block; list rejected inputs.

    Args:
        out: The value of --out.
        rejected: The inputs that could not be read.
    """
    with explain_write_failure(_output_name(out)):
        # The folder existed when the command started, but may have been removed since.
        out.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(out, _output_name(out)) as temp_path:
            yield temp_path
            # Before `out` is replaced, so that a complete table always has its list.
            _write_rejections(rejected_file(out), rejected)


def _write_rejections(path: Path, rejected: Sequence[Rejected]) -> None:
    """Write the list of inputs that could not be read; if there are none, remove an older list.

    Args:
        path: The file of the list.
        rejected: The inputs that could not be read.
    """
    if not rejected:
        path.unlink(missing_ok=True)
        return
    columns = {
        "id": [item.id for item in rejected],
        "reason": [item.reason for item in rejected],
    }
    with (
        explain_write_failure(path),
        atomic_write(path) as temp_path,
        open(temp_path, "w", newline="", encoding="utf-8") as file,
    ):
        _write_csv(columns, file)


def _output_name(path: Path) -> str:
    """Return what error messages call the file of --out, such as `--out scores.csv`."""
    return f"--out {path}"


def describe_result(
    scorer: Scorer,
    num_scored: int,
    num_accepted: int | None,
    threshold_source: str,
    out: str | None,
    num_rejected: int,
    rejected_list: Path | None,
) -> str:
    """Return the last line: how many images were scored, accepted and rejected, and where they are.

    For example `6 images scored by regrad (exact); 5 of 6 accepted by regrad, at coverage 0.95 of
    known/: scores.csv; 2 could not be read: scores.rejected.csv`.

    Args:
        scorer: The scorer of the images.
        num_scored: The number of images with scores.
        num_accepted: The number of accepted images; None without a threshold.
        threshold_source: The images or the file that the threshold comes from.
        out: The table; None if it is not a file.
        num_rejected: The number of images that could not be read.
        rejected_list: The file that lists these images; None if there is none.
    """
    text = f"{count_of(num_scored, 'image')} scored by {', '.join(scorer.methods)}"
    has_gradient_scores = any(isinstance(m, GradientScore) for m in scorer.methods.values())
    # The engine is described once it is chosen, and only if a score depends on it.
    if scorer.settings.engine != "auto" and has_gradient_scores:
        text += f" ({scorer.settings.description})"
    if scorer.threshold is not None:
        deciding_method = next(iter(scorer.methods))
        rule = scorer.threshold.rule
        text += f"; {num_accepted or 0} of {num_scored} accepted by {deciding_method}"
        text += f", at {rule} of {threshold_source}"
    if out is not None:
        text += f": {out}"
    return text + describe_rejections(num_rejected, rejected_list)


def describe_rejections(num_rejected: int, rejected_list: Path | None) -> str:
    """Return `; 2 could not be read: scores.rejected.csv`, or empty text if all could be read.

    Args:
        num_rejected: The number of inputs that could not be read.
        rejected_list: The file that lists these inputs; None if there is none.
    """
    if not num_rejected:
        return ""
    where = "" if rejected_list is None else f": {rejected_list}"
    return f"; {num_rejected} could not be read{where}"


def _json_line_per_row(rows: Rows) -> Iterator[str]:
    """Yield each row as a line of JSON: an object with a value per column."""
    columns = rows.columns()
    for row in zip(*columns.values(), strict=True):
        yield json.dumps(dict(zip(columns, row, strict=True)))


def _write_text(rows: Rows, ending: str, file: io.TextIOBase) -> None:
    """Write rows as CSV or as JSON lines.

    Args:
        rows: The scores of images or tokens.
        ending: The format: .csv or .jsonl.
        file: A file that is open for writing text.
    """
    if ending == ".csv":
        _write_csv(rows.columns(), file)
    else:
        file.writelines(f"{line}\n" for line in _json_line_per_row(rows))


def _write_csv(columns: dict[str, list[Any]], file: io.TextIOBase) -> None:
    """Write columns of equal length as CSV, with the names of the columns in the first line."""
    writer = csv.writer(_UnixLines(file))
    # Iterating a dict yields its keys, the names of the columns.
    writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))


class _UnixLines:
    """A text file whose lines end in a line feed alone.

    The csv module writes `\\r\\n`, and this class replaces it. With `lineterminator="\\n"` instead,
    the module would not quote a text that contains a carriage return.
    """

    def __init__(self, file: io.TextIOBase) -> None:
        """Wrap a file that is open for writing text."""
        self.file = file

    def write(self, line: str) -> None:
        """Write a line of the csv module, with `\\n` in place of the `\\r\\n` at its end."""
        self.file.write(f"{line.removesuffix(csv.excel.lineterminator)}\n")


def _import_parquet() -> Any:
    """Import pyarrow.parquet, or raise an error that says how to do without."""
    try:
        from pyarrow import parquet
    except ImportError:
        raise QualmsError(
            "writing .parquet needs pyarrow; install it, or write .csv or .jsonl."
        ) from None
    return parquet
