"""Where the rows of a task are kept, and how they are printed."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import typer

from qualms.report.tables import list_left_out, list_networks
from qualms.tasks.rows import Row


def rows_file(task: str, inside: str, name: str, seed: int) -> Path:
    """Return the default path of a task's rows, such as `runs/ood-svhn-svhn-cnn-4-seed0.jsonl`.

    Args:
        task: The name of the task.
        inside: The dataset that the network knows, as --id names it.
        name: The network, as --model names it.
        seed: The seed of the run.
    """
    return Path("runs") / f"{task}-{_file_part(inside)}-{_file_part(name)}-seed{seed}.jsonl"


def _file_part(text: str) -> str:
    """Replace what may not stand in a file name by hyphens."""
    characters = []
    for character in text:
        is_plain = character.isalnum() or character in "-."
        characters.append(character if is_plain else "-")
    return "".join(characters)


def print_rows(
    rows: list[Row], table: Callable[[Iterable[Row]], str], file: Path, seed: int, json_lines: bool
) -> None:
    """Print the rows of a task.

    Args:
        rows: What the task yields.
        table: Formats the rows as a table.
        file: Where the rows are kept.
        seed: The seed of the run.
        json_lines: Whether to print JSON lines in place of the table.
    """
    if json_lines:
        typer.echo("\n".join(json.dumps(row) for row in rows))
        return
    parts = (table(rows), list_networks(rows), list_left_out(rows), f"Rows: {file}. Seed {seed}.")
    typer.echo("\n\n".join(filter(None, parts)))
