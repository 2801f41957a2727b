"""What several commands share: their options, and how far a long run tells it is."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from qualms.errors import QualmsError
from qualms.training.fit import Tell

Root = Annotated[
    Path | None, typer.Option("--root", help="The folder with the datasets.", envvar="QUALMS_DATA", show_default="data")
]
Device = Annotated[str, typer.Option("--device", help="cpu, cuda, mps, or auto for the fastest there is.")]
Seed = Annotated[int, typer.Option("--seed", help="Decides every random draw.")]
Json = Annotated[bool, typer.Option("--json", help="Print the rows as JSON lines instead of tables.")]


def device_of(name: str) -> str:
    """The device that `auto` stands for."""
    if name != "auto":
        try:
            torch.empty(0, device=name)
        except (RuntimeError, AssertionError):
            raise QualmsError(f"there is no device {name!r} here; use --device auto.") from None
        return name
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def listed(text: str) -> list[str]:
    """`a,b(1,2),c` in its parts: commas inside brackets do not count."""
    return [part.strip() for part in re.split(r",(?![^(]*\))", text) if part.strip()]


@contextmanager
def telling() -> Iterator[Tell | None]:
    """A bar for each kind of work, on a terminal; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as progress:
        bars: dict[str, int] = {}

        def tell(what: str, done: int, total: int) -> None:
            if what not in bars:
                bars[what] = progress.add_task(what, total=total)
            progress.update(bars[what], completed=done, total=total)  # type: ignore[arg-type]

        yield tell
