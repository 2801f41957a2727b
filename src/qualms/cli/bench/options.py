"""What all tasks are told, and what those that score a trained network are told besides."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Concatenate, ParamSpec, TypeVar

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
Given = TypeVar("Given")
Own = ParamSpec("Own")


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


def with_options(
    options: type[Given],
) -> Callable[[Callable[Concatenate[Given, Own], None]], Callable[..., None]]:
    """Decorator: the fields of the dataclass `options` become options of the command, given as its
    first argument.
    """

    def decorate(function: Callable[Concatenate[Given, Own], None]) -> Callable[..., None]:
        fields = inspect.signature(options).parameters
        own = list(inspect.signature(function).parameters.values())[1:]

        @wraps(function)
        def run(**values: Any) -> None:
            given = options(**{name: values.pop(name) for name in fields})
            function(given, **values)  # type: ignore[call-arg]

        every = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for parameter in (*own, *fields.values())
        ]
        every.sort(
            key=lambda parameter: parameter.default is not inspect.Parameter.empty
        )  # help begins with the needs
        run.__signature__ = inspect.Signature(every)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in every}
        return run

    return decorate
