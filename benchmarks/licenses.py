"""The licenses of all that the extras install, from the packages' own metadata: `make licenses`
fills docs/licenses.md.

Run it where every extra is installed. A package whose license asks something of those who pass it
on (GPL, LGPL, AGPL, MPL) is named above the table; one of the GPL family in what users install ends
in an error.
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


def license(name: str) -> str:
    """What a package says of itself: the expression, a short name, or its classifiers, whichever it
    has.
    """
    said = distribution(name).metadata
    short, expression = (
        str(said.json.get(field, "")) for field in ("license", "license_expression")
    )
    classifiers = [
        line.split(" :: ")[-1]
        for line in said.get_all("Classifier") or []
        if line.startswith("License ::")
    ]
    told = [line for line in classifiers if line not in ("OSI Approved", "DFSG approved")]
    if expression:
        return expression
    if short and "\n" not in short and len(short) < 40 and short != "UNKNOWN":
        told = [short]
    return " / ".join(sorted({spelled(name) for name in told})) or "not said"


def spelled(name: str) -> str:
    """The license's usual short name."""
    return next(
        (usual for usual, pattern in NAMES.items() if re.fullmatch(pattern, name.lower())), name
    )


def needed(name: str, extras: Iterable[str]) -> set[str]:
    """All that a package with some of its extras brings along on this platform, itself left out."""
    found: set[tuple[str, str]] = set()
    left = [(name, extra) for extra in extras]
    while left:
        package, extra = left.pop()
        if (package, extra) in found:
            continue
        found.add((package, extra))
        for line in distribution(package).requires or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                left += [
                    (canonicalize_name(requirement.name), more)
                    for more in ("", *requirement.extras)
                ]
    return {package for package, _ in found} - {name}


def reciprocal(license: str) -> bool:
    """Whether every choice that it leaves asks something of those who pass the package on."""
    return all(re.search("GPL|MPL", choice) for choice in license.split(" OR "))


def parts() -> dict[str, str]:
    """What fills the page."""
    try:
        brought = {extra: needed("qualms", [extra]) for extra in EXTRAS}
    except PackageNotFoundError as error:
        raise SystemExit(f"{error}: run make licenses, which installs every extra.") from None
    rows, noted = [], []
    for name in sorted(set().union(*brought.values())):
        by = (
            ["qualms itself"]
            if name in brought[""]
            else [f"`{extra}`" for extra in EXTRAS[1:] if name in brought[extra]]
        )
        rows.append([name, license(name), ", ".join(by)])
        if reciprocal(license(name)):
            noted.append(f"- {name} ({license(name)}): {', '.join(by)}")
        if "GPL" in license(name) and any(name in brought[extra] for extra in FOR_USERS):
            raise SystemExit(f"{name}, which users install, is under {license(name)}.")
    return {
        "noted": "\n".join(noted),
        "licenses": table(["package", "license", "brought by"], rows),
    }


if __name__ == "__main__":
    fill(PAGE, parts())
