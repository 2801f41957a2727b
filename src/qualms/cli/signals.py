"""SIGTERM stops a command as Ctrl-C does, in an orderly way, but with an exit code of its own.

Three handlers serve different times: `leave` while modules are imported, `stop` while a command
runs, `interrupt` while a service runs.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

TERMINATED = 128 + signal.SIGTERM  # the exit code
GRACE_PERIOD = 5.0  # seconds for cleaning up, in which further signals are ignored

_since: float | None = None  # when the signal came


class Terminated(KeyboardInterrupt):
    """SIGTERM was received.

    A class of its own, because Python exits by SIGINT if a plain KeyboardInterrupt has passed an
    `exec`, as imports do.
    """


def begin() -> None:
    """Forget a signal that came before the command that is run now."""
    global _since
    _since = None


@contextmanager
def at_sigterm(handler: Callable[..., None]) -> Iterator[None]:
    """Handle SIGTERM inside the block, unless the parent process wants it ignored.

    Args:
        handler: Called at the signal, such as `leave`, `stop` or `interrupt`.
    """
    before = signal.getsignal(signal.SIGTERM)
    try:
        if before is not signal.SIG_IGN:
            signal.signal(signal.SIGTERM, handler)
        yield
    finally:
        if before is not None:  # None: a handler that was not installed from Python
            signal.signal(signal.SIGTERM, before)


def leave(*_: object) -> None:
    """Exit at once. During imports, there is nothing to clean up, and exceptions get garbled."""
    os._exit(TERMINATED)


def stop(*_: object) -> None:
    """Raise `Terminated`, as Ctrl-C raises KeyboardInterrupt; not twice within a grace period."""
    global _since
    if _since is None or time.monotonic() - _since > GRACE_PERIOD:
        _since = time.monotonic()
        raise Terminated


def interrupt(*_: object) -> None:
    """Raise `Terminated`, and exit with the exit code of Ctrl-C."""
    raise Terminated


def is_terminated() -> bool:
    """Whether `stop` has been called."""
    return _since is not None
