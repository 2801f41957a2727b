"""The role of a method in a report: the default, one of the others, or for comparison only."""

from qualms.errors import QualmsError
from qualms.methods.gradients import REGrad
from qualms.methods.method import Method
from qualms.methods.registry import DEFAULT, parse
from qualms.report.content import Content

# Rows of the paper's tables that rank images at random or backwards.
NOT_FOR_USE = ("negrad", "ungrad", "gradnorm")


def find_method(content: Content, name: str) -> Method | None:
    """Return the method that a report knows by a name, or that has it as its spec; else None.

    Args:
        content: The content of the report, which may name methods in `kinds`.
        name: The name of the method in the report's scores.
    """
    if name in content.kinds:
        return content.kinds[name]
    try:
        return parse(name)
    except QualmsError:
        return None


def find_default(content: Content) -> str | None:
    """Return the name of the default method, REGrad with layers and smoothing, in a report.

    If no method of the report has the default settings, the first REGrad with any layers and
    smoothing is returned; None if there is none.
    """
    if DEFAULT in content.methods:
        return DEFAULT
    for name in content.methods:
        if _is_default(find_method(content, name)):
            return name
    return None


def explain_no_default(content: Content) -> str:
    """Explain why a report lacks the default method; return an empty text if the report has it."""
    if find_default(content) is not None:
        return ""
    for row in content.left_out:
        if _is_default(find_method(content, row.get("method", ""))):
            return f"The default method, {DEFAULT}, could not be used: {row['why']}"
    return f"The default method, {DEFAULT}, was not among the requested methods."


def not_for_use(content: Content) -> list[str]:
    """Return the names of a report's methods that are only for comparison with the paper.

    If the report has no other methods, the list is empty: they are then shown like any others.
    """
    names_not_for_use = []
    for name in content.methods:
        method = find_method(content, name)
        if method is not None and method.name in NOT_FOR_USE:
            names_not_for_use.append(name)
    if len(names_not_for_use) == len(content.methods):
        return []
    return names_not_for_use


def _is_default(method: Method | None) -> bool:
    """Whether a method is REGrad with layer weights and smoothing, in any settings."""
    if not isinstance(method, REGrad):
        return False
    return method.layers is not None and method.smooth is not None
