"""A failure that is expected is a value: `Fallback`. The one place that catches is `attempt`.

Code of the user's model runs while an engine plans and runs, and may raise anything. `attempt`
catches that, logs it and returns a `Fallback` with the reason. An error that comes from this package's
own code is a defect, not a reason to be slow: `attempt` raises it as an `InternalError` that names
the rule and the parameters it was at work on.
"""

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FrameType, TracebackType
from typing import Any, TypeVar

import torch

from qualms.errors import QualmsError, reason
from qualms.gradients.batch import NotBatchable

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
log = logging.getLogger("qualms")

_OWN_CODE = "qualms.gradients"
_RULES = "qualms.gradients.tracing.rules"
# Frames of these packages do not show whose call failed.
_LIBRARIES = ("torch", "jaxtyping")
# What a correct program does not raise, whatever the model does.
_MISTAKES = (TypeError, AttributeError, LookupError, NameError, AssertionError)
# Functions that carry out an operation of the user's model: what fails in them is the user's.
_user_code: set[CodeType] = set()


@dataclass(frozen=True)
class Fallback:
    """An engine, or a fast path of one, cannot serve a request.

    Attributes:
        reason: one clause; a `SlowWarning` shows it to the user.
        is_slow: whether what is done instead is slow, so that the user should know.
    """

    reason: str
    is_slow: bool = True


class InternalError(RuntimeError):
    """The package itself has a defect; the error that shows it is the cause."""


def attempt(step: str, run: Callable[[], T]) -> T | Fallback:
    """Run one step of a plan and return its result, or a `Fallback` with the reason it failed.

    Args:
        step: what is tried, for the log: "trace the first sample".
        run: the step, without arguments. It raises `NotBatchable` where a failure is expected.

    Returns:
        Whatever `run` returns, or a `Fallback`.

    Raises:
        InternalError: if the error comes from this package's own code.
    """
    try:
        return run()
    except InternalError:
        raise
    except NotBatchable as error:
        return Fallback(str(error))
    except Exception as error:  # the user's model may raise anything
        defect = _find_defect(error)
        if defect is not None:
            raise InternalError(defect) from error
        log.info("could not %s: %s", step, reason(error))
        return Fallback(reason(error))


def runs_user_code(function: F) -> F:
    """Mark a function that carries out the user's operations: a failure in it is the user's."""
    _user_code.add(inspect.unwrap(function).__code__)
    return function


class error_note:
    """Add a note to any error that is raised inside the block: what was being worked on."""

    def __init__(self, note: str) -> None:
        self.note = note

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            error.add_note(self.note)


def _find_defect(error: Exception) -> str | None:
    """The message for an error that comes from this package's own code; None if it does not.

    The innermost frame outside of torch shows whose code failed. In a rule any error is a mistake,
    elsewhere one that a correct program never raises.
    """
    error = _first_cause(error)
    if isinstance(error, (QualmsError, NotBatchable, torch.OutOfMemoryError)):
        return None
    frame = _innermost_frame(error)
    if frame is None or frame.f_code in _user_code:
        return None
    module = _module_of(frame)
    is_mistake = module.startswith(_OWN_CODE) and isinstance(error, _MISTAKES)
    if not is_mistake and not module.startswith(_RULES):
        return None
    notes = ", ".join(getattr(error, "__notes__", []))
    place = notes or f"{module}.{frame.f_code.co_name}"
    return (
        f"{place} failed with {type(error).__name__}: {reason(error)}. This is a defect of qualms, "
        "not of the model; please report it, and use engine='reference' until it is fixed."
    )


def _first_cause(error: Exception) -> Exception:
    """What made a `QualmsError`, if it wraps another error."""
    while isinstance(error, QualmsError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    return error


def _innermost_frame(error: Exception) -> FrameType | None:
    """The frame closest to where the error was raised that is not in a library."""
    found: FrameType | None = None
    traceback = error.__traceback__
    while traceback is not None:
        if _module_of(traceback.tb_frame).split(".")[0] not in _LIBRARIES:
            found = traceback.tb_frame
        traceback = traceback.tb_next
    return found


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
