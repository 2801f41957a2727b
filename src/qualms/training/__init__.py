"""Images and a network in, a trained classifier out."""

from qualms.deprecated import renamed_in
from qualms.training.fit import TrainingResult, fit
from qualms.training.recipes import RECIPES, Recipe
from qualms.training.resume import trained_with

__all__ = ["RECIPES", "Recipe", "TrainingResult", "fit", "trained_with"]

__getattr__ = renamed_in(__name__, Fitted=TrainingResult)
