"""Files on disk in, images out."""

from qualms.data.catalogue import DATASETS
from qualms.data.images import Images
from qualms.data.load import load
from qualms.data.normalisation import Normalisation

__all__ = ["DATASETS", "Images", "Normalisation", "load"]
