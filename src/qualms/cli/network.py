"""The network that a command is about: its weights, and how its inputs are normalised."""

import sys
from pathlib import Path

from torch import nn

from qualms.cli.options import listed
from qualms.data import DATASETS, Normalisation
from qualms.errors import QualmsError
from qualms.models import load_model, normalisation_of
from qualms.models.zoo import ZOO
from qualms.tasks.network import Network
from qualms.training import trained_with

PUBLISHED = {
    "mnist": "mnist-cnn-5x5",
    "cifar10": "cifar10-resnet20",
    "svhn": "svhn-cnn-4",
    "cifar100": "cifar100-resnet56",
    "digits": "digits-cnn",
}


def chosen_network(
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

    Weights are those given, else the published file in ROOT/weights; without either that is an error, unless random
    ones will do. The normalisation is the one given, else that of the training that wrote the weights, else what the
    network's publisher says, else the dataset's usual one.
    """
    if not name:
        raise QualmsError(f"there is no published network for {data!r}; name one with --model.")
    entry = ZOO.get(name)
    if entry is not None and weights is None:
        file = Path(root or "data") / "weights" / (entry.file or "")
        weights = file if entry.file is not None and file.is_file() else None
        if weights is None and not random:
            where = f" (or put {entry.file} into {file.parent})" if entry.file else ""
            raise QualmsError(f"{name} has no weights; train it with `qualms train` and pass --weights{where}.")
    if ":" in name:
        sys.path.insert(0, "")  # an import path may start in the working directory, which an installed command forgets
    if classes is None and entry is not None and data in DATASETS:
        classes = DATASETS[data].classes
    model = load_model(name, weights, classes=classes).to(device)
    return Network(name, model, _normalisation(data, name, model, weights, mean, std), size)


def _normalisation(
    data: str, name: str, model: nn.Module, weights: Path | None, mean: str | None, std: str | None
) -> Normalisation:
    if (mean is None) != (std is None):
        raise QualmsError("--mean and --std belong together; give both, or neither.")
    if mean is not None and std is not None:
        try:
            return Normalisation(tuple(map(float, listed(mean))), tuple(map(float, listed(std))))
        except ValueError as error:
            raise QualmsError(f"--mean {mean} and --std {std} are not numbers with commas between: {error}") from None
    known = trained_with(weights) if weights is not None else None
    known = known or normalisation_of(name, model)
    if known is None and data in DATASETS:
        known = DATASETS[data].normalisation
    if known is None:
        raise QualmsError(f"nobody says how the inputs of {name} are normalised; pass --mean and --std.")
    return known
