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
        task: The name of the task, such as `ood`, for error messages.
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
    # Keeps the order, unlike a set.
    return list(dict.fromkeys(names))


def rows_file(task: str, inside: str, name: str, seed: int) -> Path:
    """Return the default path of a task's rows, such as `runs/ood-svhn-svhn-cnn-4-seed0.jsonl`.

    Args:
        task: The name of the task.
        inside: The dataset that the network knows, as --id names it.
        name: The network, as --model names it.
        seed: The seed of the run.
    """
    inside_part = _replace_special_characters(inside)
    name_part = _replace_special_characters(name)
    return Path("runs") / f"{task}-{inside_part}-{name_part}-seed{seed}.jsonl"


def _replace_special_characters(text: str) -> str:
    """Replace each character that is not a letter, digit, hyphen or dot by a hyphen."""
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
        rows: The rows that the task has yielded.
        table: Formats the rows as a table.
        file: The file that the rows are saved in; its path is printed below the table.
        seed: The seed of the run, which is printed below the table.
        json_lines: Whether to print JSON lines in place of the table.
    """
    if json_lines:
        typer.echo("\n".join(json.dumps(row) for row in rows))
        return
    sections = (
        table(rows),
        list_networks(rows),
        list_left_out(rows),
        f"Rows: {file}. Seed {seed}.",
    )
    # A section without rows is an empty string, which is left out.
    typer.echo("\n\n".join(filter(None, sections)))
