"""The options of benchmark tasks, beside those of all commands."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from qualms.cli.options import (
    Count,
    Device,
    Engine,
    Inside,
    Json,
    Mean,
    Published,
    Root,
    Seed,
    Size,
    Std,
    Tolerance,
    Weights,
)

Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        help="Write the rows to this JSON lines file.",
        show_default="runs/TASK-ID-MODEL-seedN.jsonl",
    ),
]
Outside = Annotated[str, typer.Option("--ood", help="Other datasets or texts, comma-separated.")]


@dataclass(frozen=True)
class TaskOptions:
    """The options of every task on images."""

    inside: Inside
    model: Published = None
    count: Count = 500
    root: Root = None
    out: Out = None
    seed: Seed = 0
    device: Device = "auto"
    json_lines: Json = False


@dataclass(frozen=True)
class NetworkTaskOptions(TaskOptions):
    """The options of a task that scores images with a trained network."""

    weights: Weights = None
    classes: Annotated[
        int | None,
        typer.Option(help="Number of classes, for networks that can have any number."),
    ] = None
    engine: Engine = "auto"
    tolerance: Tolerance = None
    size: Size = None
    mean: Mean = None
    std: Std = None
