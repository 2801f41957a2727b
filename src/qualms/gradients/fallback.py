"""Expected failures are values (`Fallback`); `attempt` is the only place that catches exceptions.

Code of the user's model runs while an engine plans and runs, and may raise anything. `attempt`
catches that, logs it and returns a `Fallback` with the reason. An error that comes from this
package's own code is a defect, not a reason to fall back: `attempt` raises it as an `InternalError`
that names the rule and the parameters it was working on.
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
# Exceptions that correct code does not raise, whatever the model does.
_MISTAKES = (TypeError, AttributeError, LookupError, NameError, AssertionError)
# Code of functions that run operations of the user's model: a failure in them is the user's.
_user_code: set[CodeType] = set()
# Modules of gradient rules and of what they return: any error there is a defect of this package.
_ANY_ERROR_IS_OURS = (
    _RULES,
    "qualms.gradients.tracing.factors",
    "qualms.gradients.tracing.outer_product",
)
# The names of the innermost frames when a function mode runs a torch function.
_OF_FUNCTION_MODE = ["__torch_function__", "call", "run_function"]


@dataclass(frozen=True)
class Fallback:
    """An engine, or a fast path of one, cannot handle a request.

    Attributes:
        reason: why not, in one clause that a `SlowWarning` shows to the user.
        is_slow: whether what is done instead is so slow that the user should be warned.
    """

    reason: str
    is_slow: bool = True


class InternalError(RuntimeError):
    """Raised for a defect of this package; `__cause__` is the exception that revealed it."""


def attempt(step: str, run: Callable[[], T]) -> T | Fallback:
    """Run one step of a plan and return its result, or a `Fallback` with the reason it failed.

    Args:
        step: what is attempted, for the log, such as "trace the first sample".
        run: the step, a function without arguments. It raises `NotBatchable` for expected failures.

    Returns:
        Whatever `run` returns, or a `Fallback`.

    Raises:
        InternalError: if the error comes from this package's own code.
    """
    try:
        return run()
    except NotBatchable as error:
        return Fallback(str(error))
    except Exception as error:  # noqa: BLE001 - the user's model may raise anything
        _raise_if_defect(error)
        log.info("could not %s: %s", step, reason(error))
        return Fallback(reason(error))


def runs_user_code(function: F) -> F:
    """Mark a function that runs the user's operations: its failures are not defects of qualms."""
    _user_code.add(inspect.unwrap(function).__code__)
    return function


class error_note:  # noqa: N801 - a context manager
    """Add a note to any error raised inside the block, such as "the gradient of layer1.weight".

    A `TypeError` that is a defect is raised as an `InternalError` at once: torch's operators, such
    as `*`, turn a `TypeError` into `NotImplemented`, and it would be lost.

    Args:
        note: what is being worked on inside the block.
    """

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
        if isinstance(error, TypeError):
            _raise_if_defect(error)


def _raise_if_defect(error: Exception) -> None:
    """Raise an `InternalError` if an error comes from this package's own code."""
    cause = _first_cause(error)
    if isinstance(cause, InternalError):
        raise cause
    defect = _find_defect(cause)
    if defect is not None:
        raise InternalError(defect) from error


def _find_defect(error: Exception) -> str | None:
    """The message for an error that comes from this package's own code; None for other errors.

    The innermost frame outside of torch shows whose code failed. In a rule any error is a defect,
    elsewhere only an error that correct code never raises.
    """
    if isinstance(error, (QualmsError, NotBatchable, torch.OutOfMemoryError)):
        return None
    frame = _frame_at_fault(error)
    if frame is None or frame.f_code in _user_code:
        return None
    module = _module_of(frame)
    is_mistake = module.startswith(_OWN_CODE) and isinstance(error, _MISTAKES)
    if not is_mistake and not module.startswith(_ANY_ERROR_IS_OURS):
        return None
    notes = ", ".join(getattr(error, "__notes__", []))
    place = notes or f"{module}.{frame.f_code.co_name}"
    return (
        f"{place} failed with {type(error).__name__}: {reason(error)}. This is a bug in qualms, "
        "not in the model; please report it, and use engine='reference' until it is fixed."
    )


def _first_cause(error: Exception) -> Exception:
    """Follow `__cause__` from a `QualmsError` to the error that it wraps, if any."""
    while isinstance(error, QualmsError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    return error


def _frame_at_fault(error: Exception) -> FrameType | None:
    """The innermost frame of a traceback that is not in a library.

    If function modes failed while they ran a torch function for a rule, it is the rule's frame:
    while a model runs, function modes run every torch function, also those that rules call.
    """
    frames: list[FrameType] = []
    traceback = error.__traceback__
    while traceback is not None:
        if _module_of(traceback.tb_frame).split(".")[0] not in _LIBRARIES:
            frames.append(traceback.tb_frame)
        traceback = traceback.tb_next
    if not frames:
        return None
    innermost = frames[-1]
    while [frame.f_code.co_name for frame in frames[-3:]] == _OF_FUNCTION_MODE:
        del frames[-3:]
    if frames and _module_of(frames[-1]).startswith(_ANY_ERROR_IS_OURS):
        return frames[-1]
    return innermost


def _module_of(frame: FrameType) -> str:
    """The name of the module that a frame's code belongs to."""
    return str(frame.f_globals.get("__name__", ""))
