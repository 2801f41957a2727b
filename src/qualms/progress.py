"""How far a long run is, told to whoever asks."""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

ProgressFn = Callable[[str, int, int], None]  # what is being done, how many are done, of how many
Progress = (
    bool | Callable[[int], None]
)  # a count on the terminal, or a function that is told how many are done


@dataclass
class Count:
    """Tells how many inputs are scored, of how many if that is known, and how fast."""

    progress: Progress
    total: int | None = None
    began: float = field(default_factory=time.monotonic)

    @property
    def shown(self) -> bool:
        """Whether there is a terminal to show it on."""
        return self.progress is True and sys.stderr.isatty()

    def start(self) -> None:
        """Say that work has begun: the first inputs may take long."""
        if self.shown:
            self._print("scoring the first inputs …")

    def tell(self, done: int) -> None:
        """So many inputs are done."""
        if callable(self.progress):
            self.progress(done)
        elif self.shown:
            of = f" of {self.total}" if self.total is not None else ""
            self._print(
                f"{done}{of} inputs scored{pace(done, self.total, time.monotonic() - self.began)}"
            )

    def end(self) -> None:
        """All are done."""
        if self.shown:
            print(file=sys.stderr, flush=True)

    def _print(self, text: str) -> None:
        print(f"\r\x1b[2K{text}", end="", file=sys.stderr, flush=True)


def pace(done: int, total: int | None, seconds: float) -> str:
    """`, 12.3/s, 1:05 left`, as far as it can be told."""
    if not done or seconds <= 0:
        return ""
    rate = f", {done / seconds:.1f}/s" if done >= seconds else f", {seconds / done:.1f} s each"
    if total is None or done >= total:
        return rate
    minutes, rest = divmod(round((total - done) * seconds / done), 60)
    return f"{rate}, {minutes}:{rest:02d} left"
