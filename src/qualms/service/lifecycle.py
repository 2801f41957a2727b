"""How the service's processes start, what they report meanwhile, and how they end.

Written by hand: LitServe waits for the model before it listens, keeps the reason of a failed start
to the log, and waits forever for a model that hangs. uvicorn's `timeout_worker_healthcheck` only
watches workers of its own supervisor, which LitServe does not use. And `multiprocessing` ends
children at a regular exit only: after a SIGKILL they would keep the port and the memory.
"""

import ctypes
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing import parent_process
from typing import Any, Literal, NoReturn

from qualms.data import ImageTransform
from qualms.errors import QualmsError, reason
from qualms.service.schemas import ModelInfo, NotReady

FIRST_STEP = "starting the worker process"
BOARD_KEY = "progress"
STDERR = 2  # file descriptor
# Eleven days: some systems accept no longer timers.
MAX_TIMER_SECONDS = 1e6
# The exit with a message needs Python's lock. If a library holds it, the process exits without one
# after so many seconds more.
GRACE_SECONDS = 5.0
PR_SET_PDEATHSIG = 1  # of Linux's prctl
PRCTL = getattr(ctypes.CDLL(None), "prctl", None) if sys.platform == "linux" else None
Status = Literal["warming up", "ready", "failed"]
StepFn = Callable[[str], None]


class RemoteTraceback(Exception):
    """The traceback of another process, as text: the cause that `--debug` shows."""


@dataclass(frozen=True)
class Failure:
    """Why the network could not be loaded, in a form that can be sent to another process.

    Args:
        message: The error's message.
        is_qualms_error: Whether it was a `QualmsError`.
        traceback: The error's traceback as text.
    """

    message: str
    is_qualms_error: bool
    traceback: str

    @classmethod
    def from_error(cls, error: Exception) -> "Failure":
        """Describe an error as text, since the error itself may not be picklable."""
        trace = "".join(traceback.format_exception(error))
        if isinstance(error, QualmsError):
            return cls(str(error), True, trace)
        return cls(f"{type(error).__name__}: {reason(error)}", False, trace)

    def throw(self) -> NoReturn:
        """Raise an error with the same message in this process.

        Raises:
            QualmsError: If the original error was one.
            RuntimeError: If the original error was of another class.
        """
        error_class = QualmsError if self.is_qualms_error else RuntimeError
        raise error_class(self.message) from RemoteTraceback(self.traceback)


@dataclass(frozen=True)
class Progress:
    """How far startup has come.

    Args:
        step: The current step.
        number: The number of the step, from 1.
        steps: The number of steps.
        started_at: The time by `time.monotonic`, which all processes of a machine share.
        status: "warming up" until the network has scored a first image, or failed to.
        model_info: The model's description, once the network is ready.
        transform: How images become the network's inputs. None until it is ready, or if it has
            none.
        failure: Why the start failed, if it did.
    """

    step: str
    number: int
    steps: int
    started_at: float = field(default_factory=time.monotonic)
    status: Status = "warming up"
    model_info: ModelInfo | None = None
    transform: ImageTransform | None = None
    failure: Failure | None = None

    @property
    def seconds(self) -> float:
        """Seconds since the start began."""
        return time.monotonic() - self.started_at

    @property
    def message(self) -> str:
        """The error message of requests that come before the network is ready, with status 503.

        It does not say why a start has failed: the reason may name files, so only the log has it.
        """
        if self.status == "failed":
            return "the network could not be loaded; see the service's log."
        where = f"{self.step}, step {self.number} of {self.steps}, {self.seconds:.0f} s so far"
        return f"the network is warming up ({where}); retry in a few seconds."

    def describe_not_ready(self) -> NotReady:
        """Return the body of a failed `/readyz`: the state, the step and the seconds so far.

        A network that was ready, but does not respond any more, "hangs".
        """
        return NotReady(
            status="hangs" if self.status == "ready" else self.status,
            step=self.step,
            step_number=self.number,
            steps=self.steps,
            seconds=round(self.seconds, 1),
        )


class Startup:
    """The startup of one service, as seen by one of its processes.

    The process that loads the network writes the progress to a shared board. The process that
    answers HTTP and the command's own process read it.

    Args:
        model_info: The model's description before it is loaded.
        steps: The number of steps; the first one starts the process with the network.
        echo: Writes a line to the log.

    Attributes:
        last: The progress when this process last read or wrote the board.
        board: A dict with the progress, shared by all processes after `share`.
        transform: How images become the network's inputs; None until it is ready.
    """

    def __init__(
        self,
        model_info: ModelInfo,
        steps: int,
        echo: Callable[[str], None],
    ) -> None:
        """Begin the first step; the clock of the start runs from here."""
        self.model_info = model_info
        self.transform: ImageTransform | None = None
        self.echo = echo
        self.is_stopped = False  # whether SIGINT or SIGTERM has arrived
        self.last = Progress(FIRST_STEP, 1, steps)
        self.board: MutableMapping[str, Progress] = {BOARD_KEY: self.last}

    def share(self, manager: Any) -> None:
        """Share the board with all processes that are started from now on.

        Args:
            manager: A started `multiprocessing.Manager`, whose process holds the board.
        """
        self.board = manager.dict(self.board)

    def log(self, line: str) -> None:
        """Write a line to the log, with the seconds since the start."""
        self.echo(f"{self.last.seconds:.1f} s: {line}")

    def begin(self, step: str) -> None:
        """Begin the next step: write it to the log and to the board."""
        self.log(f"{step} …")
        self._publish(replace(self.last, step=step, number=self.last.number + 1))

    def finish(self, model_info: ModelInfo, transform: ImageTransform | None) -> None:
        """Report that the network is ready.

        Args:
            model_info: The complete description of the model.
            transform: How images become the network's inputs.
        """
        ready = replace(self.last, status="ready", model_info=model_info, transform=transform)
        self._publish(ready)

    def fail(self, error: Exception) -> None:
        """Report that the network could not be loaded."""
        self._publish(replace(self.last, status="failed", failure=Failure.from_error(error)))

    def progress(self) -> Progress:
        """Return the latest progress, read from the board until the network is ready or failed."""
        if self.last.status == "warming up":
            # The process with the board may have ended; then this one is about to.
            with suppress(EOFError, OSError):
                self._update(self.board[BOARD_KEY])
        return self.last

    @property
    def is_ready(self) -> bool:
        """Whether the network was ready when the board was last read."""
        return self.last.status == "ready"

    def _publish(self, progress: Progress) -> None:
        """Write the progress to the shared board, for all processes."""
        self._update(progress)
        self.board[BOARD_KEY] = progress

    def _update(self, progress: Progress) -> None:
        """Store the progress in this process, with the model's information once it is complete."""
        self.last = progress
        if progress.model_info is not None:
            self.model_info = progress.model_info
            self.transform = progress.transform


@contextmanager
def exit_if_hung(deadline: float, images: int) -> Iterator[None]:
    """End this process if the block does not return in time: nothing else stops a hung model.

    The limit is one deadline for each image, and one more, so that slow models are not ended.

    Args:
        deadline: The deadline of a request, in seconds.
        images: The number of images that are scored in the block.
    """
    limit = min((images + 1) * deadline, MAX_TIMER_SECONDS)
    timer = threading.Timer(limit, _exit_hung, (limit, images))
    timer.daemon = True
    try:
        timer.start()
        faulthandler.dump_traceback_later(limit + GRACE_SECONDS, exit=True, file=STDERR)
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        timer.cancel()


def _exit_hung(limit: float, images: int) -> None:
    """Print where the model hangs, and exit with code 1.

    Args:
        limit: The limit that has passed, in seconds.
        images: The number of images in the batch.
    """
    message = (
        f"the network took more than {limit:g} s for a batch of {images}, so the worker process "
        "exits; it was stopped here:"
    )
    print(f"qualms: {message}", file=sys.stderr, flush=True)
    faulthandler.dump_traceback(file=STDERR)
    os._exit(1)


_forking_process = 0  # the id of the process that is about to fork


def kill_forks_with_this_process() -> None:
    """Let the kernel kill all processes that this one forks from now on, when it ends (Linux)."""
    if PRCTL is None:
        return
    os.register_at_fork(
        before=_remember_forking_process,
        after_in_child=lambda: _die_with(_forking_process),
    )


def die_with_parent() -> None:
    """Let the kernel kill this process when the one that spawned it ends (Linux)."""
    parent = parent_process()
    if parent is not None and parent.pid is not None:
        _die_with(parent.pid)


def _remember_forking_process() -> None:
    """Store this process's id before it forks: the child checks that this still is its parent."""
    global _forking_process
    _forking_process = os.getpid()


def _die_with(parent: int) -> None:
    """Let the kernel kill this process when its parent ends.

    The kernel means the thread that forked: if that thread ended, this process would be killed
    though its parent goes on. So only the main thread may start processes.

    Args:
        parent: The id of the parent process.
    """
    if PRCTL is None:
        return
    PRCTL(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)
