"""The role of a method in a report: the default, one of the others, or for comparison only."""

from qualms.errors import QualmsError
from qualms.methods.gradients import REGrad
from qualms.methods.method import Method
from qualms.methods.registry import DEFAULT, parse
from qualms.report.content import Content

# Rows of the paper's tables that rank images at random or backwards.
NOT_FOR_USE = ("negrad", "ungrad", "gradnorm")


def find_method(content: Content, name: str) -> Method | None:
    """Return the method with a name, or None if the name is not a spec of a method.

    Args:
        content: The content of the report, which may name methods in `kinds`.
        name: The name that the method's scores have.
    """
    if name in content.kinds:
        return content.kinds[name]
    try:
        return parse(name)
    except QualmsError:
        return None


def find_default(content: Content) -> str | None:
    """Return the name of a report's default method: REGrad with layers and smoothing.

    The method with the default settings comes first, then the first with any settings; None if
    there is neither.
    """
    if DEFAULT in content.methods:
        return DEFAULT
    for name in content.methods:
        if _is_default(find_method(content, name)):
            return name
    return None


def explain_no_default(content: Content) -> str:
    """Explain why a report does not open on the default method; empty if it does."""
    if find_default(content) is not None:
        return ""
    for row in content.left_out:
        if _is_default(find_method(content, row.get("method", ""))):
            return f"The default method, {DEFAULT}, could not be used: {row['why']}"
    return f"The default method, {DEFAULT}, was not among the requested methods."


def not_for_use(content: Content) -> list[str]:
    """Return the names of the methods that a report has for comparison with the paper only.

    If a report has no other methods, all of its methods are for use, and the list is empty.
    """
    unused = []
    for name in content.methods:
        method = find_method(content, name)
        if method is not None and method.name in NOT_FOR_USE:
            unused.append(name)
    if len(unused) == len(content.methods):
        return []
    return unused


def _is_default(method: Method | None) -> bool:
    """Whether a method is REGrad with layer weights and smoothing, in any settings."""
    if not isinstance(method, REGrad):
        return False
    return method.layers is not None and method.smooth is not None
