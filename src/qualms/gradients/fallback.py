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
# Frames of these packages do not show whether the model's call or one of this package failed.
_LIBRARIES = ("torch", "jaxtyping")
# Exceptions that correct code of this package never raises, whatever the model does.
_MISTAKES = (TypeError, AttributeError, LookupError, NameError, AssertionError)
# Code of functions that run operations of the user's model: failures in them are the model's.
_user_code: set[CodeType] = set()
# Modules of gradient rules and of their results: any error there is a defect of this package.
_ANY_ERROR_IS_OURS = (
    _RULES,
    "qualms.gradients.tracing.factors",
    "qualms.gradients.tracing.outer_product",
)
# The names of the functions that call one another when a function mode runs a torch function.
_FUNCTION_MODE_CALLS = ["__torch_function__", "call", "run_function"]


@dataclass(frozen=True)
class Fallback:
    """The result of planning if an engine, or a fast path of it, cannot handle a request.

    Attributes:
        reason: why it cannot, in one clause that a `SlowWarning` shows to the user.
        is_slow: whether what is done instead is so slow that the user should be warned.
    """

    reason: str
    is_slow: bool = True


class InternalError(RuntimeError):
    """Raised for a defect of this package; `__cause__` is the exception that revealed it."""


def attempt(step: str, run: Callable[[], T]) -> T | Fallback:
    """Run one step of a plan and return its result, or a `Fallback` with the reason it failed.

    Args:
        step: for the log: what is attempted, such as "trace the first sample".
        run: a function without arguments that does it, and raises `NotBatchable` for an expected
            failure.

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
    """Mark a function, as a decorator, that runs operations of the user's model.

    Errors raised in its code count as errors of the model, not as defects of this package.
    """
    _user_code.add(inspect.unwrap(function).__code__)
    return function


class error_note:  # noqa: N801 - a context manager
    """Add a note to any error raised inside the block, such as "the gradient of layer1.weight".

    A `TypeError` that is a defect of this package is raised as an `InternalError` at once: torch's
    operators, such as `*`, turn a `TypeError` into `NotImplemented`, so it would be lost.

    Args:
        note: what is computed inside the block.
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
        # torch's operators would turn it into `NotImplemented`.
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
    """Describe an error that comes from this package's own code; None for any other error.

    The innermost frame outside of torch shows whose code failed. In a gradient rule any error is a
    defect, elsewhere only an error that correct code never raises.
    """
    # These are raised on purpose, by any code that needs memory, and by torch for an operation that
    # it lacks for a dtype or a device.
    not_defects = (QualmsError, NotBatchable, torch.OutOfMemoryError, NotImplementedError)
    if isinstance(error, not_defects):
        return None
    frame = _frame_at_fault(error)
    if frame is None or frame.f_code in _user_code:
        return None
    module = _module_of(frame)
    is_mistake = module.startswith(_OWN_CODE) and isinstance(error, _MISTAKES)
    if not is_mistake and not module.startswith(_ANY_ERROR_IS_OURS):
        return None
    notes = ", ".join(getattr(error, "__notes__", []))
    where = notes or f"{module}.{frame.f_code.co_name}"
    return (
        f"{where} failed with {type(error).__name__}: {reason(error)}. This is a bug in qualms, "
        "not in the model; please report it, and use engine='reference' until it is fixed."
    )


def _first_cause(error: Exception) -> Exception:
    """Return the error that a `QualmsError` was raised from, if any; otherwise the error itself."""
    while isinstance(error, QualmsError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    return error


def _frame_at_fault(error: Exception) -> FrameType | None:
    """Return the innermost frame of an error's traceback that is not in torch or jaxtyping.

    While a model runs, function modes run every torch function, also those that gradient rules
    call. If a call by a rule failed, the frame of the rule is returned, not that of the mode.
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
    # Modes may be nested.
    while [frame.f_code.co_name for frame in frames[-3:]] == _FUNCTION_MODE_CALLS:
        del frames[-3:]
    if frames and _module_of(frames[-1]).startswith(_ANY_ERROR_IS_OURS):
        return frames[-1]
    return innermost


def _module_of(frame: FrameType) -> str:
    """Return the name of the module that a frame's code belongs to."""
    return str(frame.f_globals.get("__name__", ""))
