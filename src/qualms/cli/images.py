"""The images that a command line names: to score, and to learn from."""

from dataclasses import replace
from pathlib import Path

from qualms.data import DATASETS, Images, load
from qualms.errors import QualmsError
from qualms.tasks.reproduce import LEARNT_FROM


def test_images(names: list[str], root: Path | None, size: int | None) -> list[Images]:
    """Test images; those whose files have the same name are called by the whole path.

    Files may hold images of several sizes, so those are resized as they are read; named datasets by the network, batch
    by batch.
    """
    found = [load(name, root, "test", size=None if name in DATASETS else size) for name in names]
    short = [images.name for images in found]
    return [
        replace(images, name=name) if short.count(images.name) > 1 else images
        for name, images in zip(names, found, strict=True)
    ]


def training_images(name: str, root: Path | None, size: int | None, test: Images) -> Images | None:
    """Training images, if they are there, for the methods that learn from them.

    A file or folder without parts for training and testing gives the test images for both: those are not for learning.
    """
    try:
        train = load(name, root, "train", size=None if name in DATASETS else size)
    except QualmsError:
        return None
    return None if train.fingerprint() == test.fingerprint() else train.subset(LEARNT_FROM)
