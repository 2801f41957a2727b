"""Processes that end with the one that started them, however that ends: none is left with the
network, or the port.
"""

import ctypes
import os
import signal
import sys
from multiprocessing import parent_process

PR_SET_PDEATHSIG = 1
PRCTL = getattr(ctypes.CDLL(None), "prctl", None) if sys.platform == "linux" else None

_starter = 0  # the process that forks


def end_children_with_this() -> None:
    """From now on, what this process forks ends with it."""
    if PRCTL is not None:
        os.register_at_fork(before=_remember, after_in_child=lambda: _end_with(_starter))


def end_with_parent() -> None:
    """End this process with the one that started it by multiprocessing."""
    parent = parent_process()
    if parent is not None and parent.pid is not None:
        _end_with(parent.pid)


def _remember() -> None:
    global _starter
    _starter = os.getpid()


def _end_with(parent: int) -> None:
    """The kernel sees to it: also a process that is killed takes its children along.

    To the kernel, the parent is the thread that forked: the child is killed when that thread ends,
    though its process goes on. All that is started here is started by the main thread, and must be.
    """
    if PRCTL is None:
        return
    PRCTL(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before it was asked for
        os._exit(1)
