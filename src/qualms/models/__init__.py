"""The paper's networks, those of published checkpoints, and `load_model` for any other."""

from qualms.models.checkpoint import fit_state, read_state
from qualms.models.load import load_model, normalisation_of
from qualms.models.zoo import ZOO

__all__ = ["ZOO", "fit_state", "load_model", "normalisation_of", "read_state"]
