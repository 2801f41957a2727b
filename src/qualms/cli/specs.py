"""The methods that a command line names."""

from qualms.cli.options import split_list
from qualms.errors import QualmsError
from qualms.methods.method import Method
from qualms.methods.registry import METHODS, parse
from qualms.tasks.paper import paper_methods

INSTEAD = (
    "energy",
    "gen",
    "heat",
    "coherence",
)  # what users would pick instead of the paper's methods, and ours


def parse_methods(text: str, dataset: str) -> dict[str, Method]:
    """Methods by specs with commas between, or by `paper` or `all`, with the paper's settings for a
    dataset.
    """
    found: dict[str, Method] = {}
    for spec in split_list(text):
        if spec in ("paper", "all"):
            found |= paper_methods(dataset)
            found |= {name: parse(name) for name in INSTEAD}
        if spec == "all":
            known = {type(method) for method in found.values()}
            found |= {kind.name: kind() for kind in METHODS if kind not in known}
        if spec not in ("paper", "all"):
            found[spec] = parse(spec)
    if not found:
        raise QualmsError("--methods names no method; give comma-separated specs, or `paper`.")
    return found
