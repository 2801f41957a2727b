"""SIGTERM ends a command as Ctrl-C does: in order, with a word about what is left. Its exit code is
another.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

TERMINATED = 128 + signal.SIGTERM  # the exit code
PATIENCE = 5.0  # seconds for cleaning up, in which further signals are not heeded

_since: float | None = None  # when the signal came


class Terminated(KeyboardInterrupt):
    """SIGTERM came. Python ends by SIGINT if a plain KeyboardInterrupt has passed an `exec`, as
    imports do.
    """


def begin() -> None:
    """Forget what came before the command that is run now."""
    global _since
    _since = None


@contextmanager
def at_sigterm(heed: Callable[..., None]) -> Iterator[None]:
    """What to do if it comes, unless whoever started this wants it ignored."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        if before is not signal.SIG_IGN:
            signal.signal(signal.SIGTERM, heed)
        yield
    finally:
        if before is not None:  # of somebody who does not write Python
            signal.signal(signal.SIGTERM, before)


def leave(*_: object) -> None:
    """End at once, where nothing is to be cleaned up: modules that are being imported would garble
    an exception.
    """
    os._exit(TERMINATED)


def stop(*_: object) -> None:
    """End as at Ctrl-C, wherever the command is."""
    global _since
    if _since is None or time.monotonic() - _since > PATIENCE:
        _since = time.monotonic()
        raise Terminated


def interrupt(*_: object) -> None:
    """End with the exit code of Ctrl-C."""
    raise Terminated


def is_terminated() -> bool:
    """Whether `stop` was called."""
    return _since is not None
