"""qualms: know what your pre-trained model does not know."""

from importlib import import_module
from typing import TYPE_CHECKING

from qualms.errors import ProbabilitiesWarning, QualmsError, SlowWarning, UnitsWarning
from qualms.version import __version__

if TYPE_CHECKING:
    from qualms import data, methods, metrics, models
    from qualms.functional import compare, score, score_with_error
    from qualms.gradients.api import (
        ClassGradientGram,
        ClassGradientNorms,
        class_gradient_gram,
        class_gradient_norms,
    )
    from qualms.gradients.settings import Sketch, Smoothing
    from qualms.methods.registry import list_methods
    from qualms.positions import next_tokens
    from qualms.result import Scored
    from qualms.scorer import Scorer
    from qualms.selection import select
    from qualms.threshold import Threshold

__all__ = [
    "ClassGradientGram",
    "ClassGradientNorms",
    "ProbabilitiesWarning",
    "QualmsError",
    "Scored",
    "Scorer",
    "Sketch",
    "SlowWarning",
    "Smoothing",
    "Threshold",
    "UnitsWarning",
    "__version__",
    "class_gradient_gram",
    "class_gradient_norms",
    "compare",
    "data",
    "list_methods",
    "methods",
    "metrics",
    "models",
    "next_tokens",
    "score",
    "score_with_error",
    "select",
]

# The module that defines each public name. It is imported when the name is first used, so that
# reading the version does not wait for torch.
_MODULES = {
    "ClassGradientGram": "qualms.gradients.api",
    "ClassGradientNorms": "qualms.gradients.api",
    "Scored": "qualms.result",
    "Scorer": "qualms.scorer",
    "Sketch": "qualms.gradients.settings",
    "Smoothing": "qualms.gradients.settings",
    "Threshold": "qualms.threshold",
    "class_gradient_gram": "qualms.gradients.api",
    "class_gradient_norms": "qualms.gradients.api",
    "compare": "qualms.functional",
    "list_methods": "qualms.methods.registry",
    "next_tokens": "qualms.positions",
    "score": "qualms.functional",
    "score_with_error": "qualms.functional",
    "select": "qualms.selection",
}
_PACKAGES = ("data", "methods", "metrics", "models")


def __getattr__(name: str) -> object:
    """Import a public name or subpackage of `qualms` when it is first used.

    Python calls this for names that the module does not have yet.
    """
    if name in _PACKAGES:
        return import_module(f"qualms.{name}")
    if name in _MODULES:
        value = getattr(import_module(_MODULES[name]), name)
        # Stored in the module, so that Python does not call this function for the name again.
        globals()[name] = value
        return value
    raise AttributeError(f"module 'qualms' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return all names of the module, with the public ones not imported yet, for tab completion."""
    return sorted({*globals(), *__all__})
