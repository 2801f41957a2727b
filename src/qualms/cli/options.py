"""What several commands share: their options, and how far a long run tells it is."""

import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from qualms.cli.status import passing
from qualms.errors import QualmsError
from qualms.gradients import settings
from qualms.progress import Tell, pace

Root = Annotated[
    Path | None, typer.Option("--root", help="The folder with the datasets.", envvar="QUALMS_DATA", show_default="data")
]
Inside = Annotated[str, typer.Option("--id", help="The dataset that the network knows, by name or path.")]
Published = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="A name, timm:…, hf:…, FILE.pt2 or module:factory.",
        show_default="a published network for the dataset",
    ),
]
Weights = Annotated[
    Path | None, typer.Option("--weights", help="The network's checkpoint.", show_default="from ROOT/weights")
]
Chosen = Annotated[str, typer.Option("--methods", help="Comma-separated specs, or `paper`, or `all`.")]
Count = Annotated[int, typer.Option("--count", help="Test images of each dataset; 0 for all.")]
Engine = Annotated[settings.Engine, typer.Option("--engine", help="Of the gradient scores.")]
Size = Annotated[int | None, typer.Option("--size", help="Resize images to this many pixels.")]
Mean = Annotated[str | None, typer.Option("--mean", help="Normalisation, one number a channel, pixels from 0 to 1.")]
Std = Annotated[str | None, typer.Option("--std", help="As --mean.")]
Device = Annotated[str, typer.Option("--device", help="cpu, cuda, mps, or auto for the fastest there is.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Decides every random draw.")]
Json = Annotated[bool, typer.Option("--json", help="Print the rows as JSON lines instead of tables.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the output if it is there already.")]
QUIET = 30  # seconds between lines where there is no terminal


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


class Rate(ProgressColumn):
    """How many are done in a second."""

    def render(self, task: Task) -> Text:
        """Nothing until that can be told."""
        return Text(
            "" if not task.speed else f"{task.speed:.1f}/s" if task.speed >= 1 else f"{1 / task.speed:.0f} s each"
        )


@contextmanager
def telling(first: str = "starting") -> Iterator[Tell]:
    """On a terminal a bar for each kind of work, and `first` until there is one; elsewhere a line now and then."""
    if not sys.stderr.isatty():
        yield _lines()
        return
    done = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    times = (Rate(), TimeElapsedColumn(), TimeRemainingColumn())
    passing("")
    with Progress(*done, *times, console=Console(stderr=True), transient=True) as progress:
        waiting = progress.add_task(f"{first} …", total=None)
        bars: dict[str, TaskID] = {}

        def tell(what: str, done: int, total: int) -> None:
            if what not in bars:
                progress.update(waiting, visible=False)
                bars[what] = progress.add_task(what, total=total)
            progress.update(bars[what], completed=done, total=total)

        yield tell


def _lines() -> Tell:
    """Lines for a log file, and none for what takes less than half a minute."""
    began: dict[str, float] = {}
    last = time.monotonic()

    def tell(what: str, done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        began.setdefault(what, last)
        if now - last >= QUIET:
            last = now
            typer.echo(f"{what}: {done} of {total}{pace(done, total, now - began[what])}", err=True)

    return tell
