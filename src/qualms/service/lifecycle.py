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
BOARD_KEY = "progress"  # the only key of a `Startup.board`
STDERR = 2  # file descriptor
# Eleven days: some systems accept no longer timers.
MAX_TIMER_SECONDS = 1e6
# The timer that exits with a message needs the GIL. If a library holds the GIL, `faulthandler` ends
# the process without the message, so many seconds later.
GRACE_SECONDS = 5.0
PR_SET_PDEATHSIG = 1  # an option of the system call prctl
# The C function prctl on Linux, else None.
PRCTL = getattr(ctypes.CDLL(None), "prctl", None) if sys.platform == "linux" else None
Status = Literal["warming up", "ready", "failed"]
# Called with the name of a step of the start as the step begins.
StepFn = Callable[[str], None]


class RemoteTraceback(Exception):
    """The traceback of an error in another process, as text; `--debug` shows it as the cause."""


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
            return cls(
                message=str(error),
                is_qualms_error=True,
                traceback=trace,
            )
        message = f"{type(error).__name__}: {reason(error)}"
        return cls(
            message=message,
            is_qualms_error=False,
            traceback=trace,
        )

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
    """The step that startup has reached, and its outcome once it has ended.

    Args:
        step: The current step.
        number: The number of the step, from 1.
        steps: The number of steps.
        started_at: When the start began, by `time.monotonic`, whose clock all processes of a
            machine share.
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
        """The error message of requests that arrive before the network is ready, with status 503.

        If the start has failed, the message does not say why: the reason may name files, so only
        the log has it.
        """
        if self.status == "failed":
            return "the network could not be loaded; see the service's log."
        where = f"{self.step}, step {self.number} of {self.steps}, {self.seconds:.0f} s so far"
        return f"the network is warming up ({where}); retry in a few seconds."

    def describe_not_ready(self) -> NotReady:
        """Return the body of a failed `/readyz`: the status, the step and the seconds so far."""
        # This is called only if the network does not respond: if it was ready before, it hangs.
        return NotReady(
            status="hangs" if self.status == "ready" else self.status,
            step=self.step,
            step_number=self.number,
            steps=self.steps,
            seconds=round(self.seconds, 1),
        )


class Startup:
    """The startup of one service; each process of the service has a copy.

    The process that loads the network writes its progress to a dict that all processes share, the
    board. The process that answers HTTP and the command's own process read the progress there.

    Args:
        model_info: The model's description before it is loaded.
        steps: The number of steps; the first one starts the process with the network.
        echo: Writes a line to the log.

    Attributes:
        last_progress: The progress when this process last read or wrote the board.
        board: A dict with the progress, shared by all processes after `share`.
        transform: How images become the network's inputs; None until it is ready.
    """

    def __init__(
        self,
        model_info: ModelInfo,
        steps: int,
        echo: Callable[[str], None],
    ) -> None:
        """Begin the first step; `Progress.seconds` counts from now."""
        self.model_info = model_info
        self.transform: ImageTransform | None = None
        self.echo = echo
        # Whether SIGINT or SIGTERM has arrived.
        self.is_stopped = False
        self.last_progress = Progress(FIRST_STEP, 1, steps)
        self.board: MutableMapping[str, Progress] = {BOARD_KEY: self.last_progress}

    def share(self, manager: Any) -> None:
        """Share the progress with all processes that are started later.

        The board, the dict with the progress, moves to a process that answers all others.

        Args:
            manager: A `multiprocessing.Manager`, whose process runs already.
        """
        self.board = manager.dict(self.board)

    def log(self, line: str) -> None:
        """Write a line to the log, with the seconds since the start."""
        self.echo(f"{self.last_progress.seconds:.1f} s: {line}")

    def begin(self, step: str) -> None:
        """Begin the next step: write it to the log and to the board."""
        self.log(f"{step} …")
        self._publish(replace(self.last_progress, step=step, number=self.last_progress.number + 1))

    def finish(self, model_info: ModelInfo, transform: ImageTransform | None) -> None:
        """Report that the network is ready.

        Args:
            model_info: The complete description of the model.
            transform: How images become the network's inputs.
        """
        ready = replace(
            self.last_progress,
            status="ready",
            model_info=model_info,
            transform=transform,
        )
        self._publish(ready)

    def fail(self, error: Exception) -> None:
        """Report that the network could not be loaded."""
        self._publish(
            replace(self.last_progress, status="failed", failure=Failure.from_error(error))
        )

    def progress(self) -> Progress:
        """Return the latest progress; once the network is ready or failed, it does not change."""
        if self.last_progress.status == "warming up":
            # The process that holds the board may have ended; then this one ends soon, too.
            with suppress(EOFError, OSError):
                self._update(self.board[BOARD_KEY])
        return self.last_progress

    @property
    def is_ready(self) -> bool:
        """Whether the network was ready when this process last read or wrote the progress."""
        return self.last_progress.status == "ready"

    def _publish(self, progress: Progress) -> None:
        """Write the progress to the shared board, where all processes read it."""
        self._update(progress)
        self.board[BOARD_KEY] = progress

    def _update(self, progress: Progress) -> None:
        """Store the progress in this process, and the model's description once it is complete."""
        self.last_progress = progress
        if progress.model_info is not None:
            self.model_info = progress.model_info
            self.transform = progress.transform


@contextmanager
def exit_if_hung(deadline: float, num_images: int) -> Iterator[None]:
    """End this process if the block does not return in time: a hung model cannot be interrupted.

    The limit is one deadline for each image, plus one, so that slow models are not ended.

    Args:
        deadline: The deadline of a request, in seconds.
        num_images: The number of images that are scored in the block.
    """
    limit = min((num_images + 1) * deadline, MAX_TIMER_SECONDS)
    timer = threading.Timer(limit, _exit_hung, (limit, num_images))
    timer.daemon = True
    try:
        timer.start()
        # This ends the process even if the model holds the GIL, which the timer's thread needs.
        faulthandler.dump_traceback_later(limit + GRACE_SECONDS, exit=True, file=STDERR)
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        timer.cancel()


def _exit_hung(limit: float, num_images: int) -> None:
    """Print the traceback of all threads, which shows where the model hangs; exit with code 1.

    Args:
        limit: The limit that has passed, in seconds.
        num_images: The number of images in the batch.
    """
    message = (
        f"the network took more than {limit:g} s for a batch of {num_images}, so the worker "
        "process exits; it was stopped here:"
    )
    print(f"qualms: {message}", file=sys.stderr, flush=True)
    faulthandler.dump_traceback(file=STDERR)
    # `sys.exit` would end only the thread of the timer.
    os._exit(1)


# The id of the process that is about to fork, which the child inherits as its parent's id.
_forking_process = 0


def kill_forks_with_this_process() -> None:
    """Let the kernel kill the processes that this one forks from now on as soon as it ends.

    Does nothing on other systems than Linux.
    """
    if PRCTL is None:
        return
    os.register_at_fork(
        before=_remember_forking_process,
        after_in_child=lambda: _die_with(_forking_process),
    )


def die_with_parent() -> None:
    """Let the kernel kill this process when the process that spawned it ends (on Linux only)."""
    parent = parent_process()
    if parent is not None and parent.pid is not None:
        _die_with(parent.pid)


def _remember_forking_process() -> None:
    """Store this process's id before it forks, so that the child can check who its parent is."""
    # A global, which the child inherits; in the child, `os.getpid` gives the child's own id.
    global _forking_process
    _forking_process = os.getpid()


def _die_with(parent_id: int) -> None:
    """Let the kernel kill this process when its parent ends (on Linux only).

    To the kernel, the parent is the thread that forked: if that thread ended, this process would be
    killed although its parent goes on. So only the main thread may start processes.

    Args:
        parent_id: The id of the parent process.
    """
    if PRCTL is None:
        return
    PRCTL(PR_SET_PDEATHSIG, signal.SIGKILL)
    # A parent that ended before the call was replaced by another, and sends no signal.
    if os.getppid() != parent_id:
        os._exit(1)
