"""What several commands share: their options, and how far a long run tells it is."""

import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from qualms.cli.status import status_line
from qualms.errors import QualmsError
from qualms.gradients import settings
from qualms.progress import ProgressFn, pace


def _require_share(tolerance: float | None) -> float | None:
    if tolerance is not None and not 0 <= tolerance < 1:
        raise QualmsError(
            f"--tolerance is {tolerance:g}; it is a share, from 0 (exact) to below 1."
        )
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
        help="A name, timm:…, hf:…, FILE.pt2 or module:factory.",
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
Count = Annotated[int, typer.Option("--count", help="Test images of each dataset; 0 for all.")]
Engine = Annotated[settings.Engine, typer.Option("--engine", help="Of the gradient scores.")]
Tolerance = Annotated[
    float | None,
    typer.Option(
        "--tolerance",
        callback=_require_share,
        help="The standard error that a gradient score may have, as a share of its value; 0 is exact.",
    ),
]
Size = Annotated[int | None, typer.Option("--size", help="Resize images to this many pixels.")]
Mean = Annotated[
    str | None,
    typer.Option("--mean", help="Normalization, one number a channel, pixels from 0 to 1."),
]
Std = Annotated[str | None, typer.Option("--std", help="As --mean.")]
Device = Annotated[
    str, typer.Option("--device", help="cpu, cuda, mps, or auto for the fastest there is.")
]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Decides every random draw.")]
Json = Annotated[
    bool, typer.Option("--json", help="Print the rows as JSON lines instead of tables.")
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace the output if it is there already.")
]
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


@dataclass
class Pace:
    """How fast each kind of work goes: counted from where it began, which may be in the middle."""

    latest: float = field(
        default_factory=lambda: time.monotonic()
    )  # when somebody last told something
    began: dict[str, tuple[float, int]] = field(
        default_factory=dict
    )  # by kind: when, and what was done already

    def begin(self, what: str, done: int) -> None:
        """A kind of work begins now; what is done already took no time."""
        self.began[what] = self.latest, done

    def describe(self, what: str, done: int, total: int) -> str:
        """`, 1.2 s each, 0:12 left`; empty while nothing is done."""
        now = time.monotonic()
        began, before = self.began.setdefault(what, (self.latest, 0))
        self.latest = now
        return pace(done - before, total - before, now - began)


@contextmanager
def telling(
    what: str = "starting", done: int = 0, total: int | None = None
) -> Iterator[ProgressFn]:
    """On a terminal a bar for each kind of work: `3/13 images, 1.2 s each, 0:12 left`; elsewhere a
    line now and then.

    Args:
        what: the first kind of work; without a total, what stands there until something is told.
        done: how much of it is done already.
        total: how much there is of it.
    """
    speed = Pace()
    if total is not None:
        speed.begin(what, done)
    if not sys.stderr.isatty():
        yield _lines(speed)
        return
    status_line("")
    columns = (BarColumn(bar_width=20), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        waiting = progress.add_task(f"{what} …", total=None, visible=total is None)
        bars: dict[str, TaskID] = {}

        def tell(what: str, done: int, total: int) -> None:
            said = f"{done}/{total} {what}{speed.describe(what, done, total)}"
            if what not in bars:
                progress.update(waiting, visible=False)
                bars[what] = progress.add_task(said, total=total)
            progress.update(bars[what], description=said, completed=done, total=total)

        if total is not None:
            tell(what, done, total)
        yield tell


def _lines(speed: Pace) -> ProgressFn:
    """Lines for a log file, and none for what takes less than half a minute."""
    last = speed.latest

    def tell(what: str, done: int, total: int) -> None:
        nonlocal last
        said = f"{what}: {done} of {total}{speed.describe(what, done, total)}"
        if speed.latest - last >= QUIET:
            last = speed.latest
            typer.echo(said, err=True)

    return tell
