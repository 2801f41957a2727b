"""qualms: know what your pre-trained model does not know."""

from importlib import import_module
from typing import TYPE_CHECKING

from qualms.errors import ProbabilitiesWarning, QualmsError, SlowWarning, UnitsWarning
from qualms.version import __version__

if TYPE_CHECKING:
    from qualms import data, methods, metrics, models
    from qualms.gradients.norms import (
        ClassGradientGram,
        ClassGradientNorms,
        class_gradient_gram,
        class_gradient_norms,
    )
    from qualms.gradients.settings import Sketch
    from qualms.gradients.smoothing import Smoothing
    from qualms.methods.registry import list_methods
    from qualms.positions import next_tokens
    from qualms.scored import Scored
    from qualms.scorer import Scorer
    from qualms.scores import compare, score, score_with_error
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

# Where each name is, to be imported when it is first asked for: whoever wants only the version does not wait for torch.
_MODULES = {
    "ClassGradientGram": "qualms.gradients.norms",
    "ClassGradientNorms": "qualms.gradients.norms",
    "Scored": "qualms.scored",
    "Scorer": "qualms.scorer",
    "Sketch": "qualms.gradients.settings",
    "Smoothing": "qualms.gradients.smoothing",
    "Threshold": "qualms.threshold",
    "class_gradient_gram": "qualms.gradients.norms",
    "class_gradient_norms": "qualms.gradients.norms",
    "compare": "qualms.scores",
    "list_methods": "qualms.methods.registry",
    "next_tokens": "qualms.positions",
    "score": "qualms.scores",
    "score_with_error": "qualms.scores",
    "select": "qualms.selection",
}
_PACKAGES = ("data", "methods", "metrics", "models")


def __getattr__(name: str) -> object:
    if name in _PACKAGES:
        return import_module(f"qualms.{name}")
    if name in _MODULES:
        found = globals()[name] = getattr(import_module(_MODULES[name]), name)
        return found
    raise AttributeError(f"module 'qualms' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
