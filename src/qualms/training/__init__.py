"""Images and a network in, a trained classifier out."""

from qualms.training.fit import Fitted, fit, trained_with
from qualms.training.recipes import RECIPES, Recipe

__all__ = ["RECIPES", "Fitted", "Recipe", "fit", "trained_with"]
