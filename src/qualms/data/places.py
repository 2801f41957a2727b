"""Where a dataset's files are looked for, and what they hold."""

from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

from qualms.errors import QualmsError


class NotFound(QualmsError):
    """A dataset's file is in none of its places; `load` adds how to get it."""


def find_first(places: Iterable[Path], what: str) -> Path:
    """The first of these files or folders that is there."""
    tried = list(places)
    for place in tried:
        if place.exists():
            return place
    folders = dict.fromkeys(str(place.parent) for place in tried)
    raise NotFound(f"there is no {what} in {', '.join(folders)}")


def read_file_bytes(path: Path) -> bytes:
    """The bytes of a file."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise QualmsError(
            f"{path} cannot be read ({error.strerror}); check that it is a file you may read."
        ) from None


def import_extra(module: str, package: str, what: str, group: str = "app") -> Any:
    """A module that only some readers need, of an optional group of packages."""
    try:
        return import_module(module)
    except ImportError:
        raise QualmsError(
            f"reading {what} needs {package}; pip install '.[{group}]' in a clone of qualms"
        ) from None
