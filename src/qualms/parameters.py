"""Rules for the parameters of methods and of smoothing: which values are allowed, and an error of one
sentence for others.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from qualms.errors import QualmsError


@dataclass(frozen=True)
class Rule:
    """Which values a parameter may have.

    Attributes:
        allowed: the allowed values in words, for errors, such as "a positive number".
        convert: converts an allowed value to plain Python numbers; raises a ValueError for others.
    """

    allowed: str
    convert: Callable[[Any], Any]


def check_parameters(owner: Any, called: str, **rules: Rule) -> None:
    """Check the parameters of a frozen dataclass, and convert NumPy numbers to Python's in place.

    Args:
        owner: the instance whose parameters are checked; its `__post_init__` calls this function.
        called: what errors call the instance.
        rules: the rule of each parameter, by the parameter's name.

    Raises:
        QualmsError: if the value of a parameter is not allowed.
    """
    for parameter, rule in rules.items():
        value = vars(owner)[parameter]
        try:
            converted = rule.convert(value)
        except (ValueError, OverflowError):
            raise QualmsError(
                f"{called} has {parameter} {value!r}; it must be {rule.allowed}."
            ) from None
        # A frozen dataclass refuses plain assignment.
        object.__setattr__(owner, parameter, converted)


def whole(least: int) -> Rule:
    """Create the rule that allows integers from `least` on."""

    def convert(value: Any) -> int:
        """Convert an integer that is `least` or more to an int; raise a ValueError for others."""
        _require(isinstance(value, Integral) and not isinstance(value, bool))
        number = int(value)
        _require(number >= least)
        return number

    return Rule(f"a whole number, {least} or more", convert)


def _require(is_allowed: bool) -> None:
    """Raise a ValueError unless a value is allowed; `check_parameters` adds the message."""
    if not is_allowed:
        raise ValueError


def _convert_finite(value: Any) -> float:
    """Convert a finite real number to a float; raise a ValueError for others, and for booleans."""
    # In Python, True and False are numbers, too.
    _require(isinstance(value, Real) and not isinstance(value, bool))
    number = float(value)
    _require(math.isfinite(number))
    return number


def _convert_finite_or_none(value: Any) -> float | None:
    """Convert a finite number to a float, and return None for None; else raise a ValueError."""
    return None if value is None else _convert_finite(value)


def _convert_positive(value: Any) -> float:
    """Convert a finite number above 0 to a float; raise a ValueError for others."""
    number = _convert_finite(value)
    _require(number > 0)
    return number


def _convert_not_negative(value: Any) -> float:
    """Convert a finite number, 0 or more, to a float; raise a ValueError for others."""
    number = _convert_finite(value)
    _require(number >= 0)
    return number


def _convert_share(value: Any) -> float:
    """Convert a number above 0 and below 1 to a float; raise a ValueError for others."""
    number = _convert_positive(value)
    _require(number < 1)
    return number


def _convert_percentile(value: Any) -> float:
    """Convert a number above 0 and below 100 to a float; raise a ValueError for others."""
    number = _convert_positive(value)
    _require(number < 100)
    return number


def _convert_noise(value: Any) -> float | tuple[float, ...]:
    """Convert a positive noise level, or a tuple of one per channel, to floats; else raise a
    ValueError.
    """
    if not isinstance(value, tuple):
        return _convert_positive(value)
    _require(len(value) > 0)
    return tuple(_convert_positive(level) for level in value)


FINITE_OR_NONE = Rule("a finite number, or None", _convert_finite_or_none)
POSITIVE = Rule("a positive number", _convert_positive)
NOT_NEGATIVE = Rule("a number, 0 or more", _convert_not_negative)
SHARE = Rule("a number above 0 and below 1", _convert_share)
PERCENTILE = Rule("a number above 0 and below 100", _convert_percentile)
NOISE = Rule("a positive number, or a tuple of one per channel", _convert_noise)
