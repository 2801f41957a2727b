"""What a method is to the reader of a report: the default, one among others, or one that is not for
use.
"""

from qualms.errors import QualmsError
from qualms.methods.method import Method
from qualms.methods.registry import DEFAULT, parse
from qualms.methods.regrad import REGrad
from qualms.report.content import Content

NOT_FOR_USE = (
    "negrad",
    "ungrad",
    "gradnorm",
)  # rows of the paper's tables that rank at chance or backwards


def kind_of(content: Content, name: str) -> Method | None:
    """The method of this name, where that can be told."""
    if name in content.kinds:
        return content.kinds[name]
    try:
        return parse(name)
    except QualmsError:
        return None


def default_of(content: Content) -> str | None:
    """What the report calls the default method: REGrad with layers and smoothing, in whatever
    settings.
    """
    if DEFAULT in content.methods:
        return DEFAULT
    return next((name for name in content.methods if _is_default(kind_of(content, name))), None)


def why_not_default(content: Content) -> str:
    """Why the page does not open on the default; empty if it does."""
    if default_of(content) is not None:
        return ""
    for row in content.left_out:
        if _is_default(kind_of(content, row.get("method", ""))):
            return f"The default, {DEFAULT}, could not be used: {row['why']}"
    return f"The default, {DEFAULT}, was not among the methods that were asked for."


def not_for_use(content: Content) -> list[str]:
    """Methods that are there for comparison with the paper; none of them if there are no others."""
    found = [
        name
        for name in content.methods
        if (kind := kind_of(content, name)) and kind.name in NOT_FOR_USE
    ]
    return found if len(found) < len(content.methods) else []


def _is_default(kind: Method | None) -> bool:
    return isinstance(kind, REGrad) and kind.layers is not None and kind.smooth is not None
