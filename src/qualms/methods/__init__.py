"""The scores, by family, and the table of them."""

# ruff: noqa: F403  (type checkers see every class of a family; at run time the table is exported)

from typing import TYPE_CHECKING

from qualms.methods.gradient_score import GradientScore
from qualms.methods.method import Estimate, Method
from qualms.methods.registry import METHODS, list_methods, parse

if TYPE_CHECKING:
    from qualms.methods.coherence import *
    from qualms.methods.dropout import *
    from qualms.methods.feature_maps import *
    from qualms.methods.features import *
    from qualms.methods.gradients import *
    from qualms.methods.heat import *
    from qualms.methods.logits import *
    from qualms.methods.perturb_inputs import *
    from qualms.methods.perturb_model import *
    from qualms.methods.training_distances import *
    from qualms.methods.training_laplace_quam import *
    from qualms.methods.training_react_vim import *

__all__ = [
    "METHODS",
    "Estimate",
    "GradientScore",
    "Method",
    "list_methods",
    "parse",
]

# Every class of the table is exported: `qualms.methods.REGrad`.
globals().update({kind.__name__: kind for kind in METHODS})
__all__ += [kind.__name__ for kind in METHODS]
