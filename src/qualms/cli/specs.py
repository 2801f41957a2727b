"""The methods that --methods names."""

from qualms.cli.options import split_list
from qualms.errors import QualmsError
from qualms.methods.method import Method
from qualms.methods.registry import METHODS, parse
from qualms.tasks.paper import paper_methods

# What users would choose in place of the paper's methods, and ours.
ALTERNATIVES = ("energy", "gen", "heat", "coherence")


def parse_methods(text: str, dataset: str) -> dict[str, Method]:
    """Parse comma-separated specs, among which `paper` and `all` stand for several methods.

    Args:
        text: The value of --methods.
        dataset: The dataset whose settings the paper's methods have.

    Returns:
        The methods by name.
    """
    found: dict[str, Method] = {}
    for spec in split_list(text):
        if spec not in ("paper", "all"):
            found[spec] = parse(spec)
            continue
        found |= paper_methods(dataset)
        found |= {name: parse(name) for name in ALTERNATIVES}
        if spec == "all":
            classes = {type(method) for method in found.values()}
            for method in METHODS:
                if method not in classes:
                    found[method.name] = method()
    if not found:
        raise QualmsError("--methods names no method; pass comma-separated specs, or `paper`.")
    return found
