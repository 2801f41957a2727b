"""List the licenses of everything that the extras install: `make licenses` fills docs/licenses.md.

Run it where every extra is installed. A package whose license has conditions for redistribution
(GPL, LGPL, AGPL, MPL) is named above the table; one of the GPL family among what users install is an
error. Not pip-licenses, which cannot tell the extras apart and spells one license in up to five ways.
"""

import re
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from pages import fill, table

PAGE = Path(__file__).parents[1] / "docs" / "licenses.md"
EXTRAS = ("", "app", "scale", "serve", "mlflow", "ray", "dev")
FOR_USERS = EXTRAS[:-1]
# The same license under the names that packages give it.
NAMES = {
    "Apache-2.0": r"apache([ -](2\.0|software))?( licen[sc]e)?( 2\.0)?",
    "BSD-2-Clause": r"bsd[ -]2[ -]clause( license)?",
    "BSD-3-Clause": r"(bsd[ -]3|3)[ -]clause( bsd)?( license)?",
    "BSD": r"bsd( license)?",
    "MIT": r"mit( license)?",
    "ISC": r"isc licen[sc]e( \(iscl\))?",
    "MPL-2.0": r"mozilla public license 2\.0 \(mpl 2\.0\)",
    "PSF-2.0": r"python software foundation license",
}


def read_license(package: str) -> str:
    """Return the license in a package's metadata: its expression, its short name, or its classifiers."""
    metadata = distribution(package).metadata
    expression = str(metadata.json.get("license_expression", ""))
    if expression:
        return expression
    short = str(metadata.json.get("license", ""))
    if short and "\n" not in short and len(short) < 40 and short != "UNKNOWN":
        return normalize_name(short)
    names = set()
    for line in metadata.get_all("Classifier") or []:
        name = line.split(" :: ")[-1]
        if line.startswith("License ::") and name not in ("OSI Approved", "DFSG approved"):
            names.add(normalize_name(name))
    return " / ".join(sorted(names)) or "unknown"


def normalize_name(name: str) -> str:
    """Return the usual short name of a license."""
    for usual, pattern in NAMES.items():
        if re.fullmatch(pattern, name.lower()):
            return usual
    return name


def find_requirements(package: str, extras: Iterable[str]) -> set[str]:
    """Return all that a package with some of its extras installs on this platform, without itself."""
    found: set[tuple[str, str]] = set()
    left = [(package, extra) for extra in extras]
    while left:
        name, extra = left.pop()
        if (name, extra) in found:
            continue
        found.add((name, extra))
        for line in distribution(name).requires or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                required = canonicalize_name(requirement.name)
                left += [(required, more) for more in ("", *requirement.extras)]
    return {name for name, _ in found} - {package}


def is_reciprocal(license: str) -> bool:
    """Whether every choice of license has conditions for redistribution."""
    return all(re.search("GPL|MPL", choice) for choice in license.split(" OR "))


def fill_parts() -> dict[str, str]:
    """Return the parts of the page: packages with conditions, and the table of all."""
    try:
        installed = {extra: find_requirements("qualms", [extra]) for extra in EXTRAS}
    except PackageNotFoundError as error:
        raise SystemExit(f"{error}: run make licenses, which installs every extra.") from None
    rows, notes = [], []
    for name in sorted(set().union(*installed.values())):
        license = read_license(name)
        extras = ", ".join(f"`{extra}`" for extra in EXTRAS[1:] if name in installed[extra])
        if name in installed[""]:
            extras = "qualms itself"
        rows.append([name, license, extras])
        if is_reciprocal(license):
            notes.append(f"- {name} ({license}): {extras}")
        if "GPL" in license and any(name in installed[extra] for extra in FOR_USERS):
            raise SystemExit(f"{name}, which users install, is under {license}.")
    return {
        "noted": "\n".join(notes),
        "licenses": table(["package", "license", "brought by"], rows),
    }


if __name__ == "__main__":
    fill(PAGE, fill_parts())
