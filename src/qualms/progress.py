"""How far a long run is, told to whoever asks."""

import sys
from collections.abc import Callable

Tell = Callable[[str, int, int], None]  # what is being done, how many are done, of how many
Progress = bool | Callable[[int], None]  # a count on the terminal, or a function that is told how many are done


def report_progress(progress: Progress, done: int | None) -> None:
    """Tells that so many inputs are done; None that all are."""
    if callable(progress):
        if done is not None:
            progress(done)
    elif progress and sys.stderr.isatty():
        text = "\r" if done is None else f"\r{done} inputs scored"
        print(text, end="\n" if done is None else "", file=sys.stderr, flush=True)
