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

# If a Ctrl-C is pending for more seconds, the next one is raised at once: the model may hang.
PATIENCE = 5.0

SignalHandler = Callable[[int, FrameType | None], Any]

# The time at which a Ctrl-C was recorded; None if none is pending.
_pending_since: float | None = None
# The signal handler that `_record_interrupt` replaces.
_handler_before: SignalHandler = signal.default_int_handler


@contextmanager
def defer_interrupts() -> Iterator[None]:
    """Delay the effect of Ctrl-C until the next call of `deliver`, or the end of the block.

    Only the main thread receives signals, so a block in another thread changes nothing; neither
    does a block inside another one.
    """
    global _pending_since, _handler_before
    handler = signal.getsignal(signal.SIGINT)
    # Signals that are ignored, or handled outside Python, have no handler to call later.
    if not _in_main_thread() or not callable(handler) or handler is _record_interrupt:
        yield
        return
    _pending_since = None
    _handler_before = handler
    try:
        signal.signal(signal.SIGINT, _record_interrupt)
        yield
    finally:
        # Code inside the block may have installed another handler, which is kept.
        if signal.getsignal(signal.SIGINT) is _record_interrupt:
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


def _record_interrupt(signum: int, frame: FrameType | None) -> None:
    """Record a Ctrl-C for `deliver`; this is the signal handler inside `defer_interrupts`.

    If an earlier one has been pending for more than PATIENCE seconds, it is delivered at once.

    Args:
        signum: the number of the signal; not used.
        frame: the frame that the signal interrupted; not used.
    """
    global _pending_since
    if _pending_since is None:
        _pending_since = time.monotonic()
    elif time.monotonic() - _pending_since > PATIENCE:
        deliver()


def _in_main_thread() -> bool:
    """Whether this is the main thread, the only one that may set signal handlers."""
    return threading.current_thread() is threading.main_thread()
