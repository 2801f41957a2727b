"""qualms: know what your pre-trained model does not know."""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from qualms.errors import QualmsError
from qualms.version import __version__

if TYPE_CHECKING:
    from qualms import data, metrics, models
    from qualms.gradients.norms import (
        ClassGradientGram,
        ClassGradientNorms,
        class_gradient_gram,
        class_gradient_norms,
    )
    from qualms.gradients.settings import Sketch
    from qualms.gradients.smoothing import Smoothing
    from qualms.methods.registry import methods
    from qualms.scores import compare, score, score_with_error
    from qualms.selection import select
    from qualms.threshold import Threshold

__all__ = [
    "ClassGradientGram",
    "ClassGradientNorms",
    "QualmsError",
    "Sketch",
    "Smoothing",
    "Threshold",
    "__version__",
    "class_gradient_gram",
    "class_gradient_norms",
    "compare",
    "data",
    "methods",
    "metrics",
    "models",
    "score",
    "score_with_error",
    "select",
]

# Where each name is, to be imported when it is first asked for: whoever wants only the version does not wait for torch.
_MODULES = {
    "ClassGradientGram": "qualms.gradients.norms",
    "ClassGradientNorms": "qualms.gradients.norms",
    "Sketch": "qualms.gradients.settings",
    "Smoothing": "qualms.gradients.smoothing",
    "Threshold": "qualms.threshold",
    "class_gradient_gram": "qualms.gradients.norms",
    "class_gradient_norms": "qualms.gradients.norms",
    "compare": "qualms.scores",
    "score": "qualms.scores",
    "score_with_error": "qualms.scores",
    "select": "qualms.selection",
}
_PACKAGES = ("data", "metrics", "models")


def __getattr__(name: str) -> object:
    if name in _PACKAGES:
        return import_module(f"qualms.{name}")
    if name in _MODULES:
        found = globals()[name] = getattr(import_module(_MODULES[name]), name)
        return found
    raise AttributeError(f"module 'qualms' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Qualms(ModuleType):
    """`qualms.methods` is the registry's function, which the package of the same name would replace when imported."""

    @property
    def methods(self) -> object:
        return import_module("qualms.methods.registry").methods

    @methods.setter
    def methods(self, package: ModuleType) -> None:
        """Leave the function where it is."""


sys.modules[__name__].__class__ = _Qualms
