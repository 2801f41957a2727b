"""What all tasks of `qualms bench` share: options, the file of rows, and how rows are printed."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from qualms.cli.options import (
    COUNT,
    Count,
    Device,
    Engine,
    Inside,
    Json,
    NetworkOptions,
    Published,
    Root,
    Seed,
    Tolerance,
    split_list,
)
from qualms.errors import QualmsError
from qualms.report.tables import list_left_out, list_networks
from qualms.tasks.rows import Row

Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        help="Write the rows to this JSON lines file.",
        show_default="runs/TASK-ID-MODEL-seedN.jsonl",
    ),
]


@dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """The options of every task on images."""

    inside: Inside
    model: Published = None
    count: Count = COUNT
    root: Root = None
    out: Out = None
    seed: Seed = 0
    device: Device = "auto"
    json_lines: Json = False


@dataclass(frozen=True, kw_only=True)
class NetworkTaskOptions(NetworkOptions, TaskOptions):
    """The options of a task that scores images with a trained network."""

    classes: Annotated[
        int | None,
        typer.Option(help="Number of classes, for networks where it can be chosen."),
    ] = None
    engine: Engine = "auto"
    tolerance: Tolerance = None


def parse_outside(task: str, inside: str, outside: str) -> list[str]:
    """Split the value of --ood into the names of datasets or texts, without repetitions.

    Args:
        task: The name of the task, for errors.
        inside: The dataset that the network knows, which may not be among the names.
        outside: The value of --ood.
    """
    names = split_list(outside)
    if not names:
        raise QualmsError(
            f"bench {task} needs --ood, the datasets to distinguish from {inside}, comma-separated."
        )
    if inside in names:
        raise QualmsError(
            f"--ood names {inside}, the dataset that the network knows; name other datasets."
        )
    return list(dict.fromkeys(names))


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
    """Replace all characters that are not letters, digits, hyphens or dots by hyphens."""
    characters = []
    for character in text:
        is_plain = character.isalnum() or character in "-."
        characters.append(character if is_plain else "-")
    return "".join(characters)


def print_rows(
    rows: list[Row], table: Callable[[Iterable[Row]], str], file: Path, seed: int, json_lines: bool
) -> None:
    """Print the rows of a task: as JSON lines, or as a table with networks and left-out methods.

    Args:
        rows: The rows that the task yields.
        table: Formats the rows as a table.
        file: The file of the rows, which is named below the table.
        seed: The seed of the run.
        json_lines: Whether to print JSON lines in place of the table.
    """
    if json_lines:
        typer.echo("\n".join(json.dumps(row) for row in rows))
        return
    parts = (table(rows), list_networks(rows), list_left_out(rows), f"Rows: {file}. Seed {seed}.")
    typer.echo("\n\n".join(filter(None, parts)))
