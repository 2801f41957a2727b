"""Files on disk in, images out."""

from qualms.data.catalog import DATASETS
from qualms.data.image_transform import ImageTransform
from qualms.data.images import Images, Rejected
from qualms.data.loading import dataset_name, load
from qualms.data.normalization import Normalization

__all__ = [
    "DATASETS",
    "ImageTransform",
    "Images",
    "Normalization",
    "Rejected",
    "dataset_name",
    "load",
]
