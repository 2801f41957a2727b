"""Find and read a dataset's files, and import the optional packages that some readers need."""

from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

from qualms.errors import QualmsError


class NotFound(QualmsError):
    """Raised if a dataset's file or folder is at none of the paths where it may be.

    `load` catches this error and adds how to get the files.
    """


def find_first(places: Iterable[Path], what: str) -> Path:
    """Return the first path that exists.

    Args:
        places: the paths of a file or folder, in the order in which they are tried.
        what: what the error calls the file or folder.

    Raises:
        NotFound: if no path exists.
    """
    folders = []
    for place in places:
        if place.exists():
            return place
        folders.append(str(place.parent))
    # Without duplicates, in the same order.
    unique_folders = dict.fromkeys(folders)
    raise NotFound(f"there is no {what} in {', '.join(unique_folders)}")


def read_file_bytes(path: Path) -> bytes:
    """Read the bytes of a file, or raise a `QualmsError` that names the file."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise QualmsError(
            f"{path} cannot be read ({error.strerror}); check that it is a readable file."
        ) from None


def import_extra(module: str, package: str, what: str, group: str = "app") -> Any:
    """Import a module of an optional package.

    Args:
        module: the module's import path.
        package: the name of the package on PyPI.
        what: what the package is needed to read, for the error.
        group: the extra of qualms that installs the package.

    Returns:
        The module.

    Raises:
        QualmsError: if the package is not installed.
    """
    try:
        return import_module(module)
    except ImportError:
        raise QualmsError(
            f"reading {what} needs {package}; run pip install '.[{group}]' in a clone of qualms"
        ) from None
