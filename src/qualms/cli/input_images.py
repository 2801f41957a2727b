"""Read the images that a command line names: to score, and to learn from.

`report` and `bench` read with these functions; `score` and `threshold` with `ScoringRun.read`; and
shards with `open_source` (`stream/source.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from qualms.cli.status import count_of, echo
from qualms.data import Images, ImageTransform, Rejected, dataset_name, load
from qualms.errors import QualmsError
from qualms.methods.method import TRAINING_DATA, Method
from qualms.stream.network import Network
from qualms.tasks.paper_tables import MAX_TRAIN_IMAGES

# How many of the inputs that could not be read are named on the terminal.
MAX_LISTED = 3


def read_test_images(
    names: list[str],
    root: Path | None,
    transform: ImageTransform | None,
    strict: bool = True,
) -> list[Images]:
    """Read the test images of several datasets, files or folders.

    If two of them have the same short name, such as folders in different places, their images are
    named by the whole path instead.

    Args:
        names: The names of datasets, or the paths of files or folders, as --id and --ood give them.
        root: The folder with the datasets.
        transform: The transform that is applied to files, which may hold images of several sizes;
            None reads files unchanged. Datasets are transformed by the network, batch by batch.
        strict: Whether an image that cannot be read is an error.

    Returns:
        The images of each name, in the order of `names`.
    """
    groups = [_read_split(name, root, "test", transform, strict) for name in names]
    short_names = [images.name for images in groups]
    distinct_groups = []
    for name, images in zip(names, groups, strict=True):
        is_shared = short_names.count(images.name) > 1
        distinct_groups.append(replace(images, name=name) if is_shared else images)
    return distinct_groups


def read_training_images(
    methods: Mapping[str, Method],
    name: str,
    root: Path | None,
    transform: ImageTransform | None,
    test: Images,
) -> Images | None:
    """Read the training images of a dataset; None if there are none, or no method learns from them.

    A file or folder without separate parts has the same images for training and testing. Methods
    may not learn from the images that they score.

    Args:
        methods: The methods by name.
        name: A dataset, file or folder.
        root: The folder with the datasets.
        transform: The transform that is applied to files, as for `read_test_images`.
        test: The test images of the same dataset, file or folder. If the training images are these,
            None is returned.

    Returns:
        At most `MAX_TRAIN_IMAGES` images.
    """
    if not any(TRAINING_DATA in method.needs for method in methods.values()):
        return None
    try:
        train = _read_split(name, root, "train", transform, strict=True)
    # The dataset has no training images that can be read.
    except QualmsError:
        return None
    if train.fingerprint() == test.fingerprint():
        return None
    return train.subset(MAX_TRAIN_IMAGES)


def _read_split(
    name: str, root: Path | None, split: str, transform: ImageTransform | None, strict: bool
) -> Images:
    """Read one split of a dataset, file or folder.

    Args:
        name: The dataset, file or folder.
        root: The folder with the datasets.
        split: `test` or `train`.
        transform: The transform that is applied to files, which may hold images of several sizes;
            datasets are transformed by the network, batch by batch.
        strict: Whether an image that cannot be read is an error.
    """
    if dataset_name(name, root) is not None:
        return load(name, root, split)
    return load(name, root, split, transform=transform, strict=strict)


def echo_images(network: Network, *groups: Images) -> None:
    """Print how many images there are, where they come from, and how they are preprocessed.

    Args:
        network: The network, whose preprocessing is described.
        groups: The groups of images.
    """
    for images in groups:
        echo(f"{images.name}: {count_of(len(images), 'image')}, {images.source}")
        for note in network.describe_preprocessing(images):
            echo(f"  {note}")
        echo_rejections(images.rejected)


def echo_rejections(rejected: Sequence[Rejected]) -> None:
    """Print how many inputs could not be read, with the reasons of the first ones.

    Args:
        rejected: The images or documents that could not be read, with reasons.
    """
    if not rejected:
        return
    reasons = [f"{item.id} is {item.reason}" for item in rejected[:MAX_LISTED]]
    if len(rejected) > MAX_LISTED:
        reasons.append(f"and {len(rejected) - MAX_LISTED} more")
    echo(f"  {len(rejected)} could not be read ({'; '.join(reasons)})")
