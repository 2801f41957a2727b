"""Delays Ctrl-C until an exception does no harm.

Python raises KeyboardInterrupt between any two of its instructions. One of those moments lies
between entering forward-mode differentiation and noting that it was entered, and an interrupt there
would leave the process in forward mode for good. So inside `preserve_state` the signal is only
recorded; KeyboardInterrupt is raised before the next forward or backward pass.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

# Seconds after which a second Ctrl-C is raised at once: the model may hang.
PATIENCE = 5.0

SignalHandler = Callable[[int, FrameType | None], Any]

# When a Ctrl-C was recorded; None if none is pending.
_pending_since: float | None = None
# The handler that `_record` replaces.
_handler_before: SignalHandler = signal.default_int_handler


@contextmanager
def defer_interrupts() -> Iterator[None]:
    """Make Ctrl-C wait for the next `deliver`, or for the end of the block.

    Only the main thread receives signals; other threads run as usual. A block inside another one
    changes nothing.
    """
    global _pending_since, _handler_before
    handler = signal.getsignal(signal.SIGINT)
    if not _in_main_thread() or not callable(handler) or handler is _record:
        yield
        return
    _pending_since = None
    _handler_before = handler
    try:
        signal.signal(signal.SIGINT, _record)
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is _record:
            signal.signal(signal.SIGINT, handler)
        deliver()


def deliver() -> None:
    """Handle a recorded Ctrl-C now, by the signal handler that `defer_interrupts` replaced.

    Does nothing if none was recorded. Python's own handler raises KeyboardInterrupt; the user may
    have installed another one.
    """
    global _pending_since
    if _pending_since is None or not _in_main_thread():
        return
    _pending_since = None
    _handler_before(signal.SIGINT, None)


def _record(signum: int, frame: FrameType | None) -> None:
    """Record a Ctrl-C for `deliver`: the signal handler inside `defer_interrupts`.

    If one is already pending for more than PATIENCE seconds, it is delivered at once.
    """
    global _pending_since
    if _pending_since is None:
        _pending_since = time.monotonic()
    elif time.monotonic() - _pending_since > PATIENCE:
        deliver()


def _in_main_thread() -> bool:
    """Whether this is the main thread, the only one that may set signal handlers."""
    return threading.current_thread() is threading.main_thread()
