"""How far a long run has come: a rich bar on a terminal, an occasional line in a log file."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from qualms.cli.status import status_line
from qualms.progress import ProgressFn, pace

LOG_INTERVAL = 30  # seconds between lines where there is no terminal


@contextmanager
def show_progress(
    what: str = "starting", done: int = 0, total: int | None = None
) -> Iterator[ProgressFn]:
    """Display the progress of a block of work, and yield the function that reports it.

    On a terminal, each kind of work gets a bar such as `3/13 images, 1.2 s each, 0:12 left`.
    Elsewhere a line is printed every half minute, so that short runs leave log files empty.

    Args:
        what: The first kind of work. Without `total`, it is shown until something is reported.
        done: How much of this work an earlier run has done.
        total: How much of this work there is, if that is known.

    Yields:
        A `ProgressFn`.
    """
    speed = _Speed()
    if total is not None:
        speed.start(what, done)
    if not sys.stderr.isatty():
        yield _log_progress(speed)
        return
    status_line("")
    columns = (BarColumn(bar_width=20), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as display:
        waiting = display.add_task(f"{what} …", total=None, visible=total is None)
        bars: dict[str, TaskID] = {}

        def progress(what: str, done: int, total: int) -> None:
            """Update the bar of a kind of work, or add it at the first report.

            Args:
                what: The kind of work, such as `images of mine/ scored`.
                done: How much of this work is done.
                total: How much of this work there is.
            """
            text = f"{done}/{total} {what}{speed.describe(what, done, total)}"
            if what not in bars:
                display.update(waiting, visible=False)
                bars[what] = display.add_task(text, total=total)
            display.update(bars[what], description=text, completed=done, total=total)

        if total is not None:
            progress(what, done, total)
        yield progress


def _log_progress(speed: "_Speed") -> ProgressFn:
    """Return a `ProgressFn` that prints at most one line every `LOG_INTERVAL` seconds.

    Args:
        speed: Measures the speed of each kind of work.
    """
    printed = speed.latest

    def progress(what: str, done: int, total: int) -> None:
        """Print how much of a kind of work is done, unless the last line is recent.

        Args:
            what: The kind of work, such as `images of mine/ scored`.
            done: How much of this work is done.
            total: How much of this work there is.
        """
        nonlocal printed
        text = f"{what}: {done} of {total}{speed.describe(what, done, total)}"
        if speed.latest - printed >= LOG_INTERVAL:
            printed = speed.latest
            typer.echo(text, err=True)

    return progress


@dataclass
class _Speed:
    """The speed of each kind of work, measured from where this run started.

    Rich's own speed column would count what an earlier run has done as done in no time.

    Attributes:
        latest: When the last report came, in seconds of the monotonic clock.
        starts: By kind of work, the time when it started, and how much was done by then.
    """

    # A lambda, because tests replace the clock.
    latest: float = field(default_factory=lambda: time.monotonic())  # noqa: PLW0108
    starts: dict[str, tuple[float, int]] = field(default_factory=dict)

    def start(self, what: str, done: int) -> None:
        """Start the clock of a kind of work, of which some may be done already.

        Args:
            what: The kind of work.
            done: How much of this work an earlier run has done.
        """
        self.starts[what] = (self.latest, done)

    def describe(self, what: str, done: int, total: int) -> str:
        """Return `, 1.2 s each, 0:12 left`, or an empty string while nothing is done.

        Args:
            what: The kind of work.
            done: How much of this work is done.
            total: How much of this work there is.
        """
        now = time.monotonic()
        started, before = self.starts.setdefault(what, (self.latest, 0))
        self.latest = now
        return pace(done - before, total - before, now - started)
