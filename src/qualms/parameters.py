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
    """The values that a parameter may have.

    Attributes:
        allowed: these values in words, for errors.
        convert: converts an allowed value to plain Python numbers; raises a ValueError for others.
    """

    allowed: str
    convert: Callable[[Any], Any]


def check_parameters(owner: Any, called: str, **rules: Rule) -> None:
    """Check the parameters of a frozen dataclass, and convert NumPy numbers to Python's in place.

    Args:
        owner: the dataclass instance, in its `__post_init__`.
        called: what errors call it.
        rules: the rule of each parameter, by its name.

    Raises:
        QualmsError: if a value is not allowed.
    """
    for parameter, rule in rules.items():
        value = vars(owner)[parameter]
        try:
            converted = rule.convert(value)
        except (ValueError, OverflowError):
            raise QualmsError(
                f"{called} has {parameter} {value!r}; it must be {rule.allowed}."
            ) from None
        object.__setattr__(owner, parameter, converted)


def whole(least: int) -> Rule:
    """Create the rule that allows whole numbers from `least` on."""

    def convert(value: Any) -> int:
        """Return the whole number as an int; raise a ValueError for any other value."""
        _require(isinstance(value, Integral) and not isinstance(value, bool))
        number = int(value)
        _require(number >= least)
        return number

    return Rule(f"a whole number, {least} or more", convert)


def _require(fits: bool) -> None:
    """Raise a ValueError unless a condition holds; `check_parameters` makes a message of it."""
    if not fits:
        raise ValueError


def _finite(value: Any) -> float:
    """Convert a finite real number to a float; raise a ValueError for others, True and False."""
    _require(isinstance(value, Real) and not isinstance(value, bool))
    number = float(value)
    _require(math.isfinite(number))
    return number


def _positive(value: Any) -> float:
    """Convert a finite number above 0 to a float; raise a ValueError for others."""
    number = _finite(value)
    _require(number > 0)
    return number


def _not_negative(value: Any) -> float:
    """Convert a finite number, 0 or more, to a float; raise a ValueError for others."""
    number = _finite(value)
    _require(number >= 0)
    return number


def _share(value: Any) -> float:
    """Convert a number above 0 and below 1 to a float; raise a ValueError for others."""
    number = _positive(value)
    _require(number < 1)
    return number


def _percentile(value: Any) -> float:
    """Convert a number above 0 and below 100 to a float; raise a ValueError for others."""
    number = _positive(value)
    _require(number < 100)
    return number


def _noise(value: Any) -> float | tuple[float, ...]:
    """Convert a positive number, or a tuple of them; raise a ValueError for others."""
    if not isinstance(value, tuple):
        return _positive(value)
    _require(len(value) > 0)
    return tuple(_positive(level) for level in value)


FINITE_OR_NONE = Rule(
    "a finite number, or None", lambda value: None if value is None else _finite(value)
)
POSITIVE = Rule("a positive number", _positive)
NOT_NEGATIVE = Rule("a number, 0 or more", _not_negative)
SHARE = Rule("a number above 0 and below 1", _share)
PERCENTILE = Rule("a number above 0 and below 100", _percentile)
NOISE = Rule("a positive number, or a tuple of one per channel", _noise)
