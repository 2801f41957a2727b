"""Images and a network in, a trained classifier out."""

from typing import Any

from qualms.errors import warn_renamed
from qualms.training.fit import TrainingResult, fit
from qualms.training.recipes import RECIPES, Recipe
from qualms.training.resume import trained_with

__all__ = ["RECIPES", "Recipe", "TrainingResult", "fit", "trained_with"]


def __getattr__(name: str) -> Any:
    """Resolve the deprecated names of this package, with a warning."""
    if name == "Fitted":
        warn_renamed("qualms.training.Fitted", "qualms.training.TrainingResult")
        return TrainingResult
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
