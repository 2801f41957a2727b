"""How far the start is: told by the process that loads the network, read by the web side and by the
command.
"""

import time
import traceback
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NoReturn

from qualms.data import ImageTransform
from qualms.errors import QualmsError, reason
from qualms.service.answers import About, NotReady

FIRST_STEP = "starting the process with the network"
KEY = "progress"  # where the board has it
Status = Literal["warming up", "ready", "failed"]
StepFn = Callable[[str], None]


class RemoteTraceback(Exception):
    """Where an exception of another process came from, as text: `--debug` shows it."""


@dataclass(frozen=True)
class Failure:
    """Why the network cannot be served: the sentence, whether it is one of ours, and where it comes
    from.
    """

    words: str
    known: bool
    trace: str

    @classmethod
    def from_error(cls, error: Exception) -> "Failure":
        """Words that can be sent to another process, which not every exception can."""
        trace = "".join(traceback.format_exception(error))
        if isinstance(error, QualmsError):
            return cls(str(error), True, trace)
        return cls(f"{type(error).__name__}: {reason(error)}", False, trace)

    def throw(self) -> NoReturn:
        """Raise it in this process."""
        kind = QualmsError if self.known else RuntimeError
        raise kind(self.words) from RemoteTraceback(self.trace)


@dataclass(frozen=True)
class Progress:
    """Where the start is.

    Args:
        step: what is being done.
        number: of that step, from 1.
        steps: how many there are.
        began: when the start did, by `time.monotonic`, which all processes of a machine share.
        status: "warming up" until the network has scored a first image, or has failed to.
        about: what is served, once it is ready.
        fit: how images become the network's inputs, once it is ready.
        failure: why it cannot be served, if it has failed.
    """

    step: str
    number: int
    steps: int
    began: float = field(default_factory=time.monotonic)
    status: Status = "warming up"
    about: About | None = None
    fit: ImageTransform | None = None
    failure: Failure | None = None

    @property
    def seconds(self) -> float:
        """Since the start began."""
        return time.monotonic() - self.began

    @property
    def sentence(self) -> str:
        """Why a request is not answered. The log alone says why a start failed: its words may name
        files.
        """
        if self.status == "failed":
            return "the network could not be loaded; the service's log has the details."
        where = f"{self.step}, step {self.number} of {self.steps}, {self.seconds:.0f} s so far"
        return f"the network is warming up ({where}); try again in a few seconds."

    def not_ready(self) -> NotReady:
        """The same for probes and for the page. A network that is ready, and does not answer,
        hangs.
        """
        return NotReady(
            status="hangs" if self.status == "ready" else self.status,
            step=self.step,
            step_number=self.number,
            steps=self.steps,
            seconds=round(self.seconds, 1),
        )


class Startup:
    """The start of one service. Each of its processes has one of these, and they share a board with
    the progress.

    Args:
        about: what is known of what is served before the network is loaded.
        steps: how many steps there are; the first is the start of the process with the network.
        say: writes a line into the log.
    """

    def __init__(self, about: About, steps: int, say: Callable[[str], None]) -> None:
        self.about = about
        self.fit: ImageTransform | None = None
        self.say = say
        self.stopped = False  # whether a signal came that ends it
        self.last = Progress(FIRST_STEP, 1, steps)
        self.board: MutableMapping[str, Progress] = {KEY: self.last}

    def share(self, manager: Any) -> None:
        """From now on, processes that are started see the same progress."""
        self.board = manager.dict(self.board)

    def log(self, words: str) -> None:
        """Write a line, with the seconds since the start began."""
        self.say(f"{self.last.seconds:.1f} s: {words}")

    def begin(self, step: str) -> None:
        """The next step begins."""
        self.log(f"{step} …")
        self._post(replace(self.last, step=step, number=self.last.number + 1))

    def finish(self, about: About, fit: ImageTransform | None) -> None:
        """The network is ready."""
        self._post(replace(self.last, status="ready", about=about, fit=fit))

    def fail(self, error: Exception) -> None:
        """The network cannot be served."""
        self._post(replace(self.last, status="failed", failure=Failure.from_error(error)))

    def progress(self) -> Progress:
        """Where the start is; once the network is ready, nobody is asked any more."""
        if self.last.status == "warming up":
            with suppress(
                EOFError, OSError
            ):  # the process with the board has gone, and this one is about to
                self._take(self.board[KEY])
        return self.last

    @property
    def is_ready(self) -> bool:
        """Whether the network was ready when the progress was last looked at."""
        return self.last.status == "ready"

    def _post(self, progress: Progress) -> None:
        self._take(progress)
        self.board[KEY] = progress

    def _take(self, progress: Progress) -> None:
        self.last = progress
        if progress.about is not None:
            self.about, self.fit = progress.about, progress.fit
