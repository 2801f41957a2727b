"""Former public names: they work for one version, with a warning that says what to use."""

import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

# A function, or a class whose constructor takes the arguments.
F = TypeVar("F", bound=Callable[..., Any])


def warn_renamed(old: str, new: str) -> None:
    """Warn, where a deprecated name is used, that it has a new one.

    The warning points to the code that called the deprecated function (`stacklevel=3`).
    """
    warnings.warn(f"{old} is deprecated; use {new}.", DeprecationWarning, stacklevel=3)


def renamed_arguments(**new_by_old: str) -> Callable[[F], F]:
    """Decorate a function or a class so that it also takes former names of keyword arguments.

    Args:
        **new_by_old: for each former name, the name of the argument now.
    """

    def decorate(function: F) -> F:
        """Wrap the function, or the constructor of the class."""
        called: Callable[..., Any] = function
        if isinstance(function, type):
            called = function.__init__  # type: ignore[misc]

        @functools.wraps(called)
        def call(*args: Any, **kwargs: Any) -> Any:
            """Replace former names, with a warning for each, and call the function."""
            for old, new in new_by_old.items():
                if old in kwargs:
                    warn_renamed(f"{old}=", f"{new}=")
                    kwargs[new] = kwargs.pop(old)
            return called(*args, **kwargs)

        if isinstance(function, type):
            function.__init__ = call  # type: ignore[misc]
            return function
        return call  # type: ignore[return-value]

    return decorate


class RenamedAttribute:
    """The former name of an attribute or a method, which it returns with a warning.

    Args:
        new: the attribute's name now.
    """

    def __init__(self, new: str) -> None:
        self._new = new
        self._old = ""  # known from `__set_name__` on

    def __set_name__(self, owner: type, name: str) -> None:
        """Remember the former name, which Python passes when it creates the class."""
        self._old = name

    def __get__(self, instance: Any, owner: type) -> Any:
        """Warn, and return the attribute of the new name, of the instance or else the class."""
        warn_renamed(f"{owner.__name__}.{self._old}", f"{owner.__name__}.{self._new}")
        return getattr(owner if instance is None else instance, self._new)


def renamed_in(module: str, **new_by_old: Any) -> Callable[[str], Any]:
    """Return a module's `__getattr__`, which finds what its former names stand for.

    Args:
        module: the full name of the module.
        **new_by_old: for each former name, the function or class that it stands for.
    """

    def find(name: str) -> Any:
        """Look up a former name, with a warning."""
        if name not in new_by_old:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        found = new_by_old[name]
        warn_renamed(f"{module}.{name}", f"{module}.{found.__name__}")
        return found

    return find
