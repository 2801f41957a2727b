"""Networks that others trained, and the real test images inside and outside of what they know.

    QUALMS_DATA=folder python benchmarks/checkpoints.py         (prints the accuracy of each on its
    own test set)

A benchmark on random weights and random images can flatter a method: this file is the one place
where benchmarks get the real ones. The folder in the environment variable QUALMS_DATA holds the
datasets as they are published and the checkpoints in `weights`.
"""

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from qualms.data import DATASETS, Normalization, load
from qualms.models import load_model
from qualms.models.zoo import ZOO
from qualms.stream.network import Network
from qualms.tasks.paper_numbers import SIGMA
from qualms.training import Recipe, fit


def root() -> Path:
    """The folder with the data."""
    if "QUALMS_DATA" not in os.environ:
        raise SystemExit(
            "QUALMS_DATA is not set: name the folder with the datasets and checkpoints in it."
        )
    return Path(os.environ["QUALMS_DATA"])


@dataclass(frozen=True)
class Checkpoint:
    """A trained network, images like those it was trained on, and images of other things."""

    name: str
    network: str  # in the zoo, which knows its file and normalization
    known: str
    unknown: str

    def build(self) -> nn.Module:
        """The network with its weights, in evaluation mode."""
        return load_model(self.network, root() / "weights" / str(ZOO[self.network].file))

    def inside(self, count: int) -> Tensor:
        """`count` normalized test images of the network's own dataset, the same ones every time."""
        return self._normalization.apply(load(self.known, root()).subset(count).pixels)

    def outside(self, count: int) -> Tensor:
        """As many of another dataset, normalized as the network's own."""
        return self._normalization.apply(load(self.unknown, root()).subset(count).pixels)

    def accuracy(self, count: int) -> float:
        """On `count` images of its own test set."""
        return Network(self.name, self.build(), self._normalization).accuracy(
            load(self.known, root()).subset(count)
        )

    @property
    def sigma(self) -> float | tuple[float, ...]:
        """The noise of smoothing in normalized units, for each channel."""
        return self._normalization.in_model_units(SIGMA)

    @property
    def _normalization(self) -> Normalization:
        return ZOO[self.network].normalization or DATASETS[self.known].normalization


@dataclass(frozen=True)
class TrainedHere(Checkpoint):
    """A network that nobody published: by this recipe, on the training images of its own dataset,
    from seed 0.
    """

    recipe: Recipe

    def build(self) -> nn.Module:
        """Train the network, and return it in evaluation mode."""
        torch.manual_seed(0)
        model = ZOO[self.network].build(DATASETS[self.known].classes or 0)
        fit(model, load(self.known, root(), "train"), self.recipe, self._normalization, seed=0)
        return model.eval()


CHECKPOINTS = {
    c.name: c
    for c in (
        Checkpoint("MNIST CNN", "mnist-cnn-5x5", "mnist", "fashion-mnist"),
        Checkpoint("CIFAR-10 ResNet-20", "cifar10-resnet20", "cifar10", "svhn"),
        Checkpoint("CIFAR-100 ResNet-56", "cifar100-resnet56", "cifar100", "svhn"),
        Checkpoint("SVHN CNN", "svhn-cnn-4", "svhn", "cifar10"),
        TrainedHere("CIFAR-100 CNN", "cnn-32", "cifar100", "svhn", Recipe(epochs=4, rate=0.02)),
    )
}


def main() -> None:
    """Print each network's accuracy, which shows that weights, architecture and normalization
    belong together.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=10000, help="test images of each dataset")
    count = parser.parse_args().count
    print("| network | test images | accuracy, % |\n|---|---|---|")
    for checkpoint in CHECKPOINTS.values():
        print(
            f"| {checkpoint.name} | {count} | {100 * checkpoint.accuracy(count):.2f} |", flush=True
        )


if __name__ == "__main__":
    main()
