"""qualms: know what your pre-trained model does not know."""

from qualms.errors import QualmsError
from qualms.gradients.norms import (
    ClassGradientGram,
    ClassGradientNorms,
    class_gradient_gram,
    class_gradient_norms,
)
from qualms.gradients.smoothing import Smoothing
from qualms.version import __version__

__all__ = [
    "ClassGradientGram",
    "ClassGradientNorms",
    "QualmsError",
    "Smoothing",
    "__version__",
    "class_gradient_gram",
    "class_gradient_norms",
]
