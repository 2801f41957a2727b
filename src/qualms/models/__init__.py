"""The paper's networks, those of published checkpoints, and `load_model` for any other."""

from typing import Any

from qualms.errors import warn_renamed
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


def __getattr__(name: str) -> Any:
    """Look up a deprecated name, and warn that it has a new one."""
    if name != "normalisation_of":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warn_renamed("qualms.models.normalisation_of", "qualms.models.normalization_of")
    return normalization_of
