"""Files on disk in, images out."""

from qualms.data.catalog import DATASETS
from qualms.data.image_transform import ImageTransform
from qualms.data.images import Images, Rejected
from qualms.data.loading import dataset_name, load
from qualms.data.normalization import Normalization
from qualms.deprecated import renamed_in

__all__ = [
    "DATASETS",
    "ImageTransform",
    "Images",
    "Normalization",
    "Rejected",
    "dataset_name",
    "load",
]

__getattr__ = renamed_in(__name__, Fit=ImageTransform, Normalisation=Normalization)
