"""The network that a command evaluates: its weights, and how images become its inputs.

Weights, normalization and size each have several sources. An option takes precedence over what the
checkpoint or the publisher records, and this over what is usual for the dataset.
"""

import sys
from dataclasses import replace
from pathlib import Path

from qualms.cli.options import NetworkOptions, resolve_device, split_list
from qualms.data import DATASETS, ImageTransform, Normalization, dataset_name
from qualms.data.image_transform import Interpolation
from qualms.errors import QualmsError
from qualms.models import Preprocessing, load_model, preprocessing_of
from qualms.models.zoo import ZOO, Entry, installed_weights, require_installed_weights
from qualms.stream.network import Network
from qualms.training import trained_with

# By dataset, the network with published weights that is used without --model.
PUBLISHED = {
    "mnist": "mnist-cnn-5x5",
    "cifar10": "cifar10-resnet20",
    "svhn": "svhn-cnn-4",
    "cifar100": "cifar100-resnet56",
    "digits": "digits-cnn",
}


def published_network(data: str, root: Path | None) -> str:
    """Return the name of the network with published weights for a dataset; empty if there is none.

    Args:
        data: The dataset, by name or path.
        root: The folder with the datasets.
    """
    return PUBLISHED.get(dataset_name(data, root) or "", "")


def load_network(
    data: str,
    name: str,
    options: NetworkOptions,
    classes: int | None = None,
    allow_random: bool = False,
) -> Network:
    """Load a network by its name, with the preprocessing of its images.

    Args:
        data: The dataset that the network knows, by name or path.
        name: The name of the network, as for `qualms.models.load_model`.
        options: Weights, normalization, size and device. By default the weights are the published
            file in ROOT/weights, else in an installed package that contains it. The normalization
            is taken from the training that wrote the checkpoint, else from the publisher, else
            from the dataset. The size is the publisher's.
        classes: The number of classes, for networks that can have any.
        allow_random: Whether random weights are used if no others are found.

    Raises:
        QualmsError: If weights or the normalization are not found.
    """
    if not name:
        raise QualmsError(f"there is no published network for {data!r}; pass a network as --model.")
    device = resolve_device(options.device)
    dataset = dataset_name(data, options.root)
    entry = ZOO.get(name)
    weights = options.weights
    if entry is not None and weights is None:
        folder = Path(options.root or "data") / "weights"
        weights = _find_weights(name, entry, folder, allow_random)
    if ":" in name:
        # The name may be an import path, such as `my_code:network`. Its module may be in the
        # working directory, which Python does not search when an installed command runs.
        sys.path.insert(0, "")
    # A network without a published checkpoint can have as many classes as the dataset.
    if classes is None and entry is not None and entry.file is None and dataset is not None:
        classes = _count_dataset_classes(dataset, entry)
    # Without weights here, random ones are wanted; `load_model` would require published ones.
    if entry is not None and weights is None:
        model = entry.build(classes or entry.classes).eval().to(device)
    else:
        model = load_model(name, weights, classes=classes).to(device)
    published = preprocessing_of(name, model)
    normalization = _parse_normalization(name, published, options.mean, options.std)
    if normalization is None:
        normalization = _find_normalization(name, published, weights, dataset)
    transform = _make_transform(published, options.size, len(normalization.mean))
    return Network(name, model, normalization, transform, class_names=published.class_names)


def _find_weights(name: str, entry: Entry, folder: Path, allow_random: bool) -> Path | None:
    """Find the file with the published weights of a network.

    Args:
        name: The name of the network.
        entry: The entry of the network in the zoo.
        folder: The folder to search first, before the installed package that contains the weights.
        allow_random: Whether to return None, rather than raise an error, if there are no weights.

    Returns:
        The file, in the folder or in an installed package; None only with `allow_random`.
    """
    # Without a published file, this is the folder itself, which no line below uses then.
    file = folder / (entry.file or "")
    if entry.file is not None and file.is_file():
        return file
    if allow_random:
        return installed_weights(entry)
    if entry.package is not None:
        return require_installed_weights(name, entry, "--weights")
    where = f" (or put {entry.file} into {file.parent})" if entry.file else ""
    raise QualmsError(
        f"{name} has no weights; train it with `qualms train` and pass --weights{where}."
    )


def _count_dataset_classes(dataset: str, entry: Entry) -> int | None:
    """Return a dataset's number of classes; None if its images do not have the network's shape.

    Args:
        dataset: The name of the dataset.
        entry: The entry of the network in the zoo.
    """
    dataset_info = DATASETS[dataset]
    # A network for other images is not meant for this dataset, and keeps its own classes.
    has_same_shape = (dataset_info.channels, dataset_info.size) == (entry.channels, entry.size)
    return dataset_info.classes if has_same_shape else None


def _parse_normalization(
    name: str, published: Preprocessing, mean: str | None, std: str | None
) -> Normalization | None:
    """Parse --mean and --std, each a number per channel; return None if neither is given.

    Args:
        name: The name of the network.
        published: The publisher's preprocessing, which may state the number of channels.
        mean: The value of --mean.
        std: The value of --std.
    """
    if mean is None and std is None:
        return None
    if mean is None or std is None:
        raise QualmsError("--mean and --std belong together; pass both, or neither.")
    try:
        means = tuple(map(float, split_list(mean)))
        stds = tuple(map(float, split_list(std)))
        normalization = Normalization(means, stds)
    except ValueError as error:
        raise QualmsError(
            f"--mean {mean} and --std {std} are not comma-separated numbers: {error}"
        ) from None
    channels = _published_channels(published)
    if channels not in (None, len(means)):
        raise QualmsError(
            f"--mean {mean} has {len(means)} numbers, but {name} takes {channels}; pass one per "
            "channel."
        )
    return normalization


def _find_normalization(
    name: str, published: Preprocessing, weights: Path | None, dataset: str | None
) -> Normalization:
    """Return the normalization that a network was trained with, from the first source that has it.

    Args:
        name: The name of the network.
        published: The publisher's preprocessing, the second source.
        weights: The network's checkpoint, the first source: it may record the normalization.
        dataset: The dataset that the network knows, whose usual normalization is the last source.
    """
    if weights is not None:
        recorded = trained_with(weights)
        if recorded is not None:
            return recorded
    if published.normalization is not None:
        return published.normalization
    if dataset is not None:
        dataset_info = DATASETS[dataset]
        # A normalization has one mean per channel, so the network must have as many channels.
        if _published_channels(published) in (None, dataset_info.channels):
            return dataset_info.normalization
    raise QualmsError(f"the input normalization of {name} is unknown; pass --mean and --std.")


def _published_channels(published: Preprocessing) -> int | None:
    """Return the channels of a network's inputs, or None if its publisher does not state them."""
    return None if published.transform is None else published.transform.channels


def _make_transform(
    published: Preprocessing, size: int | None, channels: int
) -> ImageTransform | None:
    """Build the transform that resizes images for a network; return None if it takes any size.

    Args:
        published: The publisher's preprocessing.
        size: The value of --size, height and width in pixels; None for the publisher's size.
        channels: The number of channels of the network's inputs.
    """
    if size is not None:
        interpolation: Interpolation = "bilinear"
        if published.transform is not None:
            interpolation = published.transform.interpolation
        return ImageTransform(
            size=(size, size),
            resize=None,
            interpolation=interpolation,
            channels=channels,
            by="as set by --size",
        )
    if published.transform is None:
        return None
    return replace(published.transform, channels=channels)
