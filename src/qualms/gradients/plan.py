"""What an engine intends to do with a batch, and the one place where a failed attempt is caught.

An engine plans first: it returns a `Plan`, or a `Fallback` that says why it cannot serve the request.
Code of the user's model runs while plans are made and run, and may raise anything: `attempt` is where
that is caught, reported and turned into a `Fallback`.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from qualms.errors import QualmsError, reason
from qualms.gradients.batch import NotBatchable

T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fallback:
    """An engine, or a fast path of one, cannot serve a request.

    Attributes:
        reason: one clause that says why; it is what a `SlowWarning` tells the user.
    """

    reason: str


def attempt(step: str, run: Callable[[], T]) -> T | Fallback:
    """Run one step of a plan and return its result, or a `Fallback` with the reason it failed.

    Args:
        step: what is tried, for the log: "trace the first sample".
        run: the step, without arguments. It raises `NotBatchable` where a failure is expected.

    Returns:
        Whatever `run` returns, or a `Fallback`.

    Raises:
        QualmsError: as `run` raised it; it is already a message to the user.
    """
    try:
        return run()
    except (QualmsError, MemoryError):
        raise
    except NotBatchable as error:
        return Fallback(str(error))
    except Exception as error:  # the model may raise anything
        log.info("could not %s: %s", step, reason(error))
        return Fallback(f"could not {step}: {reason(error)}")
