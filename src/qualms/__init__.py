"""qualms: know what your pre-trained model does not know."""

from qualms import data, metrics, models
from qualms.errors import QualmsError, SlowWarning
from qualms.gradients.norms import ClassGradientGram, ClassGradientNorms, class_gradient_gram, class_gradient_norms
from qualms.gradients.settings import Sketch
from qualms.gradients.smoothing import Smoothing
from qualms.methods.registry import list_methods
from qualms.scored import Scored
from qualms.scorer import Scorer
from qualms.scores import compare, score, score_with_error
from qualms.selection import select
from qualms.threshold import Threshold
from qualms.version import __version__

__all__ = [
    "ClassGradientGram",
    "ClassGradientNorms",
    "QualmsError",
    "Scored",
    "Scorer",
    "Sketch",
    "SlowWarning",
    "Smoothing",
    "Threshold",
    "__version__",
    "class_gradient_gram",
    "class_gradient_norms",
    "compare",
    "data",
    "list_methods",
    "metrics",
    "models",
    "score",
    "score_with_error",
    "select",
]
