"""The network that a command is about: its weights, and how images become its inputs."""

import sys
from dataclasses import replace
from pathlib import Path

from qualms.cli.options import split_list
from qualms.data import DATASETS, ImageTransform, Normalization, dataset_name
from qualms.errors import QualmsError
from qualms.models import Preprocessing, load_model, preprocessing_of
from qualms.models.installed import installed_weights, require_installed_weights
from qualms.models.zoo import ZOO, Entry
from qualms.stream.network import Network
from qualms.training import trained_with

PUBLISHED = {
    "mnist": "mnist-cnn-5x5",
    "cifar10": "cifar10-resnet20",
    "svhn": "svhn-cnn-4",
    "cifar100": "cifar100-resnet56",
    "digits": "digits-cnn",
}


def published_network(data: str, root: Path | None) -> str:
    """The network whose published weights know a dataset; empty where there is none."""
    return PUBLISHED.get(dataset_name(data, root) or "", "")


def load_network(
    data: str,
    name: str,
    weights: Path | None,
    root: Path | None,
    mean: str | None,
    std: str | None,
    size: int | None,
    device: str,
    random: bool,
    classes: int | None = None,
) -> Network:
    """The network by its name.

    Weights are those given, else the published file in ROOT/weights, else that of the package that
    carries it; without any that is an error, unless random ones will do. The normalization is the
    one given, else that of the training that wrote the weights, else what the network's publisher
    says, else the dataset's usual one. The size is the one given, else what the publisher says.
    """
    if not name:
        raise QualmsError(f"there is no published network for {data!r}; name one with --model.")
    dataset, entry = dataset_name(data, root), ZOO.get(name)
    if entry is not None and weights is None:
        weights = _published_weights(name, entry, Path(root or "data") / "weights", random)
    if ":" in name:
        sys.path.insert(
            0, ""
        )  # an import path may start in the working directory, which an installed command forgets
    if classes is None and entry is not None and entry.file is None and dataset is not None:
        known = DATASETS[dataset]
        # Images of another shape are not what it was trained on: they say nothing of its classes.
        classes = (
            known.classes if (known.channels, known.size) == (entry.channels, entry.size) else None
        )
    if entry is not None and weights is None:
        model = entry.build(classes or entry.classes).eval().to(device)
    else:
        model = load_model(name, weights, classes=classes).to(device)
    said = preprocessing_of(name, model)
    normalization = _normalization(dataset, name, said, weights, mean, std)
    return Network(
        name, model, normalization, _fit(said, size, normalization), class_names=said.class_names
    )


def _published_weights(name: str, entry: Entry, folder: Path, random: bool) -> Path | None:
    """The published file, from the folder or from its installed package; without either None if
    random ones will do.
    """
    file = folder / (entry.file or "")
    if entry.file is not None and file.is_file():
        return file
    if random:
        return installed_weights(entry)
    if entry.package is not None:
        return require_installed_weights(name, entry, "--weights")
    where = f" (or put {entry.file} into {file.parent})" if entry.file else ""
    raise QualmsError(
        f"{name} has no weights; train it with `qualms train` and pass --weights{where}."
    )


def _normalization(
    dataset: str | None,
    name: str,
    said: Preprocessing,
    weights: Path | None,
    mean: str | None,
    std: str | None,
) -> Normalization:
    if (mean is None) != (std is None):
        raise QualmsError("--mean and --std belong together; give both, or neither.")
    channels = None if said.fit is None else said.fit.channels
    if mean is not None and std is not None:
        try:
            given = Normalization(
                tuple(map(float, split_list(mean))), tuple(map(float, split_list(std)))
            )
        except ValueError as error:
            raise QualmsError(
                f"--mean {mean} and --std {std} are not comma-separated numbers: {error}"
            ) from None
        if channels not in (None, len(given.mean)):
            raise QualmsError(
                f"--mean {mean} has {len(given.mean)} numbers, and {name} takes {channels} channels; give one for each."
            )
        return given
    known = trained_with(weights) if weights is not None else None
    known = known or said.normalization
    if known is None and dataset is not None and channels in (None, DATASETS[dataset].channels):
        known = DATASETS[dataset].normalization
    if known is None:
        raise QualmsError(
            f"the normalization of {name}'s inputs is not known; pass --mean and --std."
        )
    return known


def _fit(
    said: Preprocessing, size: int | None, normalization: Normalization
) -> ImageTransform | None:
    channels = len(normalization.mean)
    if size is not None:
        way = said.fit.interpolation if said.fit is not None else "bilinear"
        return ImageTransform((size, size), None, way, channels, by="as --size says")
    return None if said.fit is None else replace(said.fit, channels=channels)
