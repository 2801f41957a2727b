"""Where a task's rows are kept, and how they are printed."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import typer

from qualms.cli.bench.options import Common
from qualms.report.tables import left_out, networks
from qualms.tasks.rows import Row


def rows_file(task: str, inside: str, name: str, seed: int) -> Path:
    """Where rows are kept unless told otherwise."""
    return Path("runs") / f"{task}-{_plain(inside)}-{_plain(name)}-seed{seed}.jsonl"


def _plain(text: str) -> str:
    return "".join(c if c.isalnum() or c in "-." else "-" for c in text)


def show(rows: list[Row], table: Callable[[Iterable[Row]], str], file: Path, given: Common) -> None:
    """Print a task's rows as its options say."""
    print_rows(rows, table, file, given.seed, given.json_lines)


def print_rows(
    rows: list[Row], table: Callable[[Iterable[Row]], str], file: Path, seed: int, json_lines: bool
) -> None:
    """Print rows as JSON lines, or as a table with what else is to be said."""
    if json_lines:
        typer.echo("\n".join(json.dumps(row) for row in rows))
        return
    parts = (table(rows), networks(rows), left_out(rows), f"Rows: {file}. Seed {seed}.")
    typer.echo("\n\n".join(part for part in parts if part))
