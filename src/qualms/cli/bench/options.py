"""What all tasks are told, and what those that score a trained network are told besides."""

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
        "--out", help="The rows, as JSON lines.", show_default="runs/TASK-ID-MODEL-seedN.jsonl"
    ),
]


@dataclass(frozen=True)
class Common:
    """What every task is told."""

    inside: Inside
    model: Published = None
    count: Count = 500
    root: Root = None
    out: Out = None
    seed: Seed = 0
    device: Device = "auto"
    json_lines: Json = False


@dataclass(frozen=True)
class Trained(Common):
    """What a task is told that scores with a trained network."""

    weights: Weights = None
    classes: Annotated[
        int | None, typer.Option(help="How many, where the network leaves that open.")
    ] = None
    engine: Engine = "auto"
    tolerance: Tolerance = None
    size: Size = None
    mean: Mean = None
    std: Std = None
