"""SIGTERM stops a command as Ctrl-C does, in an orderly way, but with an exit code of its own.

Three handlers serve different times: `exit_at_once` while modules are imported,
`terminate_command` while a command runs, `terminate_service` while a service runs.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

TERMINATED = 128 + signal.SIGTERM  # the exit code
# Seconds for cleaning up, in which further signals are ignored.
GRACE_PERIOD = 5.0

# The time at which `terminate_command` last raised `Terminated`; None if it has not raised.
_terminated_at: float | None = None


class Terminated(KeyboardInterrupt):
    """SIGTERM was received.

    A class of its own, because Python exits by SIGINT if a plain KeyboardInterrupt has passed an
    `exec`, as imports do.
    """


def forget_sigterm() -> None:
    """Forget a SIGTERM that `terminate_command` has handled, so that `is_terminated` is False.

    Called when a command starts: a process may run several commands, as tests do.
    """
    global _terminated_at
    _terminated_at = None


@contextmanager
def at_sigterm(handler: Callable[..., None]) -> Iterator[None]:
    """Handle SIGTERM inside the block, unless the parent process wants it ignored.

    Args:
        handler: The function to call at the signal, such as `exit_at_once`, `terminate_command` or
            `terminate_service`.
    """
    previous_handler = signal.getsignal(signal.SIGTERM)
    try:
        if previous_handler is not signal.SIG_IGN:
            signal.signal(signal.SIGTERM, handler)
        yield
    finally:
        # A handler that was not installed from Python is None, and cannot be restored.
        if previous_handler is not None:
            signal.signal(signal.SIGTERM, previous_handler)


def exit_at_once(*_: object) -> None:
    """Exit at once, without an exception: the handler of SIGTERM while modules are imported.

    There is nothing to clean up during imports, and they may turn an exception into another one.
    """
    os._exit(TERMINATED)


def terminate_command(*_: object) -> None:
    """Raise `Terminated`, as Ctrl-C raises KeyboardInterrupt: the handler while a command runs.

    Further signals within `GRACE_PERIOD` seconds are ignored, so that the command can clean up.
    """
    global _terminated_at
    if _terminated_at is None or time.monotonic() - _terminated_at > GRACE_PERIOD:
        _terminated_at = time.monotonic()
        raise Terminated


def terminate_service(*_: object) -> None:
    """Raise `Terminated` at every signal, so that a service exits as after Ctrl-C.

    Unlike `terminate_command`, it does not record the signal, so `is_terminated` stays False.
    """
    raise Terminated


def is_terminated() -> bool:
    """Whether `terminate_command` has handled a SIGTERM since the last `forget_sigterm()`."""
    return _terminated_at is not None
