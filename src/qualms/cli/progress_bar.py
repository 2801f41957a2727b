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
    """Display the progress of the work in a `with` block, and yield the function that reports it.

    On a terminal, each kind of work gets a bar such as `3/13 images, 1.2 s each, 0:12 left`.
    Elsewhere a line is printed every half minute, so that short runs leave log files empty.

    Args:
        what: The first kind of work, such as `images of mine/ scored`. Without `total`, it is shown
            until something is reported.
        done: How much of this work an earlier run has done.
        total: How much of this work there is, if that is known.

    Yields:
        A `ProgressFn`: called with a kind of work, how much of it is done, and how much there is.
    """
    speed = _Speed()
    if total is not None:
        speed.start(what, done)
    if not sys.stderr.isatty():
        yield _log_progress(speed)
        return
    # Clears the line, which the bars replace.
    status_line("")
    columns = (BarColumn(bar_width=20), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as display:
        waiting_bar = display.add_task(f"{what} …", total=None, visible=total is None)
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
                display.update(waiting_bar, visible=False)
                bars[what] = display.add_task(text, total=total)
            display.update(
                bars[what],
                description=text,
                completed=done,
                total=total,
            )

        if total is not None:
            progress(what, done, total)
        yield progress


def _log_progress(speed: "_Speed") -> ProgressFn:
    """Return a `ProgressFn` that prints at most one line every `LOG_INTERVAL` seconds.

    Args:
        speed: Measures the speed of each kind of work.
    """
    # Counted from the start, so that nothing is printed in the first `LOG_INTERVAL` seconds.
    printed_at = speed.latest

    def progress(what: str, done: int, total: int) -> None:
        """Print how much of a kind of work is done, unless the last line is recent.

        Args:
            what: The kind of work, such as `images of mine/ scored`.
            done: How much of this work is done.
            total: How much of this work there is.
        """
        nonlocal printed_at
        text = f"{what}: {done} of {total}{speed.describe(what, done, total)}"
        if speed.latest - printed_at >= LOG_INTERVAL:
            printed_at = speed.latest
            typer.echo(text, err=True)

    return progress


@dataclass
class _Speed:
    """The speed of each kind of work, measured from where this run started.

    Rich's own speed column would count what an earlier run has done as done in no time.

    Attributes:
        latest: The time of the last report, or of the creation of this object, by the monotonic
            clock.
        starts: For each kind of work, the time when it started, and how much was done by then.
    """

    # A lambda looks up `time.monotonic` at each call, since tests replace it.
    latest: float = field(default_factory=lambda: time.monotonic())  # noqa: PLW0108
    starts: dict[str, tuple[float, int]] = field(default_factory=dict)

    def start(self, what: str, done: int) -> None:
        """Start the clock of a kind of work, of which some may be done already.

        Args:
            what: The kind of work.
            done: How much of this work an earlier run has done.
        """
        # Nothing is reported yet, so `latest` is when this object was created.
        self.starts[what] = (self.latest, done)

    def describe(self, what: str, done: int, total: int) -> str:
        """Return `, 1.2 s each, 0:12 left`, or an empty string while nothing is done.

        Args:
            what: The kind of work.
            done: How much of this work is done.
            total: How much of this work there is.
        """
        now = time.monotonic()
        # A kind of work that was not started began at the last report of the kind before it.
        started, done_before = self.starts.setdefault(what, (self.latest, 0))
        self.latest = now
        return pace(done - done_before, total - done_before, now - started)
