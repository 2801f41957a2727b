"""Report how far a long run is: by callbacks, or by a line on the terminal.

The line is printed without rich, which the library does not need; the commands use rich's bars.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

ProgressFn = Callable[
    [str, int, int], None
]  # called with the kind of work, how much of it is done, and how much there is
# True for a line on the terminal, or called with a count.
Progress = bool | Callable[[int], None]


@dataclass
class ProgressLine:
    """Reports how many inputs are scored: to a function, or as a line on the terminal.

    Args:
        progress: A function that is called with the number of inputs scored so far; True prints a
            line with count and speed if there is a terminal; False reports nothing.
        total: The number of inputs in all; None if it is not known.
        started: When the work started, as `time.monotonic()` returned it.
    """

    progress: Progress
    total: int | None = None
    started: float = field(default_factory=time.monotonic)

    @property
    def shows_line(self) -> bool:
        """Whether the user asked for a line, and stderr is a terminal to print it on."""
        return self.progress is True and sys.stderr.isatty()

    def start(self) -> None:
        """Print a line before any input is scored, as the first ones may take long."""
        if self.shows_line:
            self._print("scoring the first inputs …")

    def update(self, done: int) -> None:
        """Report that `done` inputs are scored so far."""
        if callable(self.progress):
            self.progress(done)
        elif self.shows_line:
            of_total = "" if self.total is None else f" of {self.total}"
            speed = pace(done, self.total, time.monotonic() - self.started)
            self._print(f"{done}{of_total} inputs scored{speed}")

    def end(self) -> None:
        """Leave the line on the terminal, and move the cursor to the next line."""
        if self.shows_line:
            print(file=sys.stderr, flush=True)

    def _print(self, text: str) -> None:
        """Replace the current line on the terminal by `text`."""
        # \r moves the cursor to the start of the line, and \x1b[2K clears the line.
        print(
            f"\r\x1b[2K{text}",
            end="",
            file=sys.stderr,
            flush=True,
        )


def pace(done: int, total: int | None, seconds: float) -> str:
    """Format the speed and the time left, such as `, 12.3/s, 1:05 left`.

    Args:
        done: The number of inputs that are done.
        total: The number of inputs in all; None if it is not known.
        seconds: The time that the work took so far.

    Returns:
        A text that begins with a comma; empty if nothing is done, and without the time left if the
        total is not known.
    """
    if not done or seconds <= 0:
        return ""
    # Slow work is given in seconds per input.
    rate = f", {done / seconds:.1f}/s" if done >= seconds else f", {seconds / done:.1f} s each"
    if total is None or done >= total:
        return rate
    seconds_left = round((total - done) * seconds / done)
    return f"{rate}, {seconds_left // 60}:{seconds_left % 60:02d} left"
