"""Ctrl-C waits for a moment at which nothing is half done.

Python raises KeyboardInterrupt between any two of its instructions: also between entering forward
mode and noting that it was entered, which would leave the process in forward mode for good. So
while a model is held, the signal is noted, and raised where an exception does no harm: before the
next forward or backward pass.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

PATIENCE = 5.0  # seconds after which another Ctrl-C is raised at once: the model itself may hang

_since: float | None = None  # when the waiting signal came
_handler: Callable[[int, FrameType | None], Any] = (
    signal.default_int_handler
)  # the one in force before


@contextmanager
def defer_interrupts() -> Iterator[None]:
    """Ctrl-C waits for the next `deliver`, or for the end. Only the main thread gets signals;
    others just run.
    """
    global _since, _handler
    users = signal.getsignal(signal.SIGINT)
    if not _in_main_thread() or not callable(users) or users is _wait:
        yield
        return
    _since, _handler = None, users
    try:
        signal.signal(signal.SIGINT, _wait)
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is _wait:
            signal.signal(signal.SIGINT, users)
        deliver()


def deliver() -> None:
    """Hands a waiting Ctrl-C to the handler, which raises KeyboardInterrupt unless the user has set
    another.
    """
    global _since
    if _since is not None and _in_main_thread():
        _since = None
        _handler(signal.SIGINT, None)


def _wait(signum: int, frame: FrameType | None) -> None:
    global _since
    if _since is None:
        _since = time.monotonic()
    elif time.monotonic() - _since > PATIENCE:
        deliver()


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
