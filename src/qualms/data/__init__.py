"""Files on disk in, images out."""

from qualms.data.catalogue import DATASETS
from qualms.data.fit import Fit
from qualms.data.images import Images, Rejected
from qualms.data.load import dataset_name, load
from qualms.data.normalisation import Normalisation

__all__ = ["DATASETS", "Fit", "Images", "Normalisation", "Rejected", "dataset_name", "load"]
