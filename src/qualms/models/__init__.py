"""The paper's networks, those of published checkpoints, and `load_model` for any other."""

from qualms.deprecated import renamed_in
from qualms.models.checkpoint import fit_state, read_state
from qualms.models.load import load_model
from qualms.models.preprocessing import Preprocessing, normalization_of, preprocessing_of
from qualms.models.zoo import ZOO

__all__ = [
    "ZOO",
    "Preprocessing",
    "fit_state",
    "load_model",
    "normalization_of",
    "preprocessing_of",
    "read_state",
]

__getattr__ = renamed_in(__name__, normalisation_of=normalization_of)
