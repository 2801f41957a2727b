"""The options that several commands share, each defined once, and what their values mean."""

import inspect
import re
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Concatenate, ParamSpec, TypeVar

import torch
import typer

from qualms.errors import QualmsError
from qualms.gradients import settings

Options = TypeVar("Options")
Own = ParamSpec("Own")


def _require_tolerance(tolerance: float | None) -> float | None:
    if tolerance is not None and not 0 <= tolerance < 1:
        raise QualmsError(f"--tolerance is {tolerance:g}; pass a number from 0 (exact) to below 1.")
    return tolerance


Root = Annotated[
    Path | None,
    typer.Option(
        "--root", help="The folder with the datasets.", envvar="QUALMS_DATA", show_default="data"
    ),
]
Inside = Annotated[
    str, typer.Option("--id", help="The dataset that the network knows, by name or path.")
]
Published = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="A network: a name, timm:NAME, hf:NAME, FILE.pt2 or module:factory.",
        show_default="a published network for the dataset",
    ),
]
Weights = Annotated[
    Path | None,
    typer.Option("--weights", help="The network's checkpoint.", show_default="from ROOT/weights"),
]
Chosen = Annotated[
    str, typer.Option("--methods", help="Comma-separated specs, or `paper`, or `all`.")
]
Count = Annotated[
    int, typer.Option("--count", help="Number of test images of each dataset; 0 for all.")
]
Engine = Annotated[
    settings.Engine, typer.Option("--engine", help="How gradient scores are computed.")
]
Tolerance = Annotated[
    float | None,
    typer.Option(
        "--tolerance",
        callback=_require_tolerance,
        help="Largest relative standard error of gradient scores; 0 for exact scores.",
    ),
]
Size = Annotated[int | None, typer.Option("--size", help="Resize images to this many pixels.")]
Mean = Annotated[
    str | None,
    typer.Option(
        "--mean", help="Mean of the normalization, one number per channel, for pixels from 0 to 1."
    ),
]
Std = Annotated[
    str | None, typer.Option("--std", help="Standard deviation of the normalization, as --mean.")
]
Device = Annotated[
    str, typer.Option("--device", help="cpu, cuda, mps, or auto for the fastest available.")
]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed of all random draws.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON lines instead of tables.")]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace the output if it already exists.")
]


def resolve_device(name: str) -> str:
    """Return the name of a device that is available; `auto` is the fastest one.

    Raises:
        QualmsError: If the named device is not available.
    """
    if name == "auto":
        if torch.cuda.is_available():
            return "cuda"
        return "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError):
        raise QualmsError(f"device {name!r} is not available; use --device auto.") from None
    return name


def split_list(text: str) -> list[str]:
    """Split `a,b(1,2),c` at its commas, except for those inside parentheses."""
    return [part.strip() for part in re.split(r",(?![^(]*\))", text) if part.strip()]


def with_options(
    options: type[Options],
) -> Callable[[Callable[Concatenate[Options, Own], None]], Callable[..., None]]:
    """Decorator that adds the fields of a dataclass to the options of a command.

    Commands that share a list of options thus state it once. Typer reads a command's signature, so
    the decorated function has the command's own parameters and one for each field.

    Args:
        options: The dataclass. Each field is annotated as a typer option. The command receives an
            instance as its first argument.
    """

    def decorate(command: Callable[Concatenate[Options, Own], None]) -> Callable[..., None]:
        shared = inspect.signature(options).parameters
        own = list(inspect.signature(command).parameters.values())[1:]
        parameters = []
        for parameter in (*own, *shared.values()):
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
        parameters.sort(key=_is_optional)  # --help lists what is required first

        @wraps(command)
        def run(**values: Any) -> None:
            fields = {name: values.pop(name) for name in shared}
            command(options(**fields), **values)  # type: ignore[call-arg]

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate


def _is_optional(parameter: inspect.Parameter) -> bool:
    return parameter.default is not inspect.Parameter.empty
