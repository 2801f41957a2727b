"""Files on disk in, images out."""

from typing import Any

from qualms.data.catalog import DATASETS
from qualms.data.image_transform import ImageTransform
from qualms.data.images import Images, Rejected
from qualms.data.loading import dataset_name, load
from qualms.data.normalization import Normalization
from qualms.errors import warn_renamed

__all__ = [
    "DATASETS",
    "ImageTransform",
    "Images",
    "Normalization",
    "Rejected",
    "dataset_name",
    "load",
]


def __getattr__(name: str) -> Any:
    """Look up a deprecated name, and warn that it has a new one."""
    renamed: dict[str, Any] = {"Fit": ImageTransform, "Normalisation": Normalization}
    if name not in renamed:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warn_renamed(f"qualms.data.{name}", f"qualms.data.{renamed[name].__name__}")
    return renamed[name]
