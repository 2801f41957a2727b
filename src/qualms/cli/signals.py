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
# Seconds for cleaning up, in which further signals are ignored.
GRACE_PERIOD = 5.0

# When `stop` last raised, by `time.monotonic`; None if it has not.
_since: float | None = None


class Terminated(KeyboardInterrupt):
    """SIGTERM was received.

    A class of its own, because Python exits by SIGINT if a plain KeyboardInterrupt has passed an
    `exec`, as imports do.
    """


def begin() -> None:
    """Begin a new command: forget a SIGTERM that `stop` has handled in an earlier one.

    A process may run several commands, as tests do.
    """
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
        # None: a handler that was not installed from Python.
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def leave(*_: object) -> None:
    """Exit at once: during imports, there is nothing to clean up, and exceptions get garbled."""
    os._exit(TERMINATED)


def stop(*_: object) -> None:
    """Raise `Terminated`, as Ctrl-C raises KeyboardInterrupt; not twice within a grace period."""
    global _since
    if _since is None or time.monotonic() - _since > GRACE_PERIOD:
        _since = time.monotonic()
        raise Terminated


def interrupt(*_: object) -> None:
    """Raise `Terminated` at every signal: a service that it stops exits as after Ctrl-C.

    Unlike `stop`, this is not remembered, so `is_terminated` stays False.
    """
    raise Terminated


def is_terminated() -> bool:
    """Whether `stop` has handled a SIGTERM since `begin`."""
    return _since is not None
