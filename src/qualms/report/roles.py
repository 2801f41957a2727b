"""The role of a method in a report: the default, one among others, or not for use."""

from qualms.errors import QualmsError
from qualms.methods.gradients import REGrad
from qualms.methods.method import Method
from qualms.methods.registry import DEFAULT, parse
from qualms.report.content import Content

# Rows of the paper's tables that rank images at random or backwards.
NOT_FOR_USE = ("negrad", "ungrad", "gradnorm")


def find_method(content: Content, name: str) -> Method | None:
    """Return the method with a name, or None if the name does not tell which it is."""
    if name in content.kinds:
        return content.kinds[name]
    try:
        return parse(name)
    except QualmsError:
        return None


def find_default(content: Content) -> str | None:
    """Return the default method of a report: REGrad with layers and smoothing, in any settings."""
    if DEFAULT in content.methods:
        return DEFAULT
    for name in content.methods:
        if _is_default(find_method(content, name)):
            return name
    return None


def explain_no_default(content: Content) -> str:
    """Return why a report does not open on the default method; empty if it does."""
    if find_default(content) is not None:
        return ""
    for row in content.left_out:
        if _is_default(find_method(content, row.get("method", ""))):
            return f"The default method, {DEFAULT}, could not be used: {row['why']}"
    return f"The default method, {DEFAULT}, was not among the methods that were asked for."


def not_for_use(content: Content) -> list[str]:
    """Return the methods that are there for comparison with the paper only.

    If a report has no others, all of its methods are for use.
    """
    found = []
    for name in content.methods:
        method = find_method(content, name)
        if method is not None and method.name in NOT_FOR_USE:
            found.append(name)
    return found if len(found) < len(content.methods) else []


def _is_default(method: Method | None) -> bool:
    return isinstance(method, REGrad) and method.layers is not None and method.smooth is not None
