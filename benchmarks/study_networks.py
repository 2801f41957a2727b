"""The networks of the study in `study.py`: some that others trained, and some that are trained
here.

    QUALMS_DATA=folder python benchmarks/study_networks.py [NAME …]     (trains what is missing,
    prints accuracies)

What is trained goes to `runs/study`, and a run that is stopped goes on from its last epoch. The
recipes are short for two CPU cores. Nothing was tuned on the pairs of the study.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
from checkpoints import root
from torch import nn

from qualms.data import DATASETS, Images, load
from qualms.models import load_model
from qualms.models.zoo import ZOO
from qualms.stream.network import Network
from qualms.training import Recipe, fit

WEIGHTS = Path("runs") / "study"
TINY_IMAGENET = "tiny-imagenet-32"


@dataclass(frozen=True)
class Subject:
    """A network, what it knows, and what it does not: near (things of a like kind) and far.

    With a recipe it is trained here, from seed 0; without one its weights are published.
    """

    name: str
    network: str  # in the zoo
    known: str
    near: tuple[str, ...]
    far: tuple[str, ...]
    recipe: Recipe | None = None

    def build(self) -> Network:
        """The network with its weights."""
        entry = ZOO[self.network]
        normalization = (entry.normalization or DATASETS[self.known].normalization).of_channels(
            entry.channels
        )
        if self.recipe is None:
            model: nn.Module = load_model(self.network, root() / "weights" / str(entry.file))
        else:
            torch.manual_seed(0)
            model = entry.build(DATASETS[self.known].classes or 0)
            file = WEIGHTS / f"{self.name.replace(' ', '-')}.pt"
            file.parent.mkdir(parents=True, exist_ok=True)
            fit(
                model,
                self.images(self.known, "train"),
                self.recipe,
                normalization,
                seed=0,
                checkpoint=file,
                progress=print,
            )
        return Network(self.name, model.eval(), normalization)

    def images(self, dataset: str, split: str = "test") -> Images:
        """Images of a dataset in the size and the channels of this network."""
        entry = ZOO[self.network]
        source = str(root() / dataset) if dataset == TINY_IMAGENET else f"data:{dataset}"
        return load(source, root(), split).convert(entry.channels, entry.size)


DIGITS = (("omniglot", "fashion-mnist"), ("cifar10", "svhn"))
HOUSE_NUMBERS = (("omniglot",), ("cifar10", "cifar100", TINY_IMAGENET))
OBJECTS = (("cifar100", TINY_IMAGENET), ("svhn", "mnist", "fashion-mnist"))
MANY_OBJECTS = (("cifar10", TINY_IMAGENET), ("svhn", "mnist", "fashion-mnist"))
TRANSFORMER = Recipe(epochs=20, rate=1e-3, batch=128, adam=True, decay=0.0, validate_every=2)

STUDY = {
    s.name: s
    for s in (
        Subject("MNIST CNN 5x5", "mnist-cnn-5x5", "mnist", *DIGITS),
        Subject("SVHN CNN", "svhn-cnn-4", "svhn", *HOUSE_NUMBERS),
        Subject("SVHN CNN, dropout", "svhn-cnn-4-dropout", "svhn", *HOUSE_NUMBERS),
        Subject("CIFAR-10 ResNet-20", "cifar10-resnet20", "cifar10", *OBJECTS),
        Subject("CIFAR-100 ResNet-56", "cifar100-resnet56", "cifar100", *MANY_OBJECTS),
        Subject(
            "MNIST paper's CNN",
            "mnist-cnn",
            "mnist",
            *DIGITS,
            Recipe(epochs=10, rate=0.01, drops=(7,)),
        ),
        Subject(
            "SVHN paper's CNN",
            "svhn-cnn",
            "svhn",
            *HOUSE_NUMBERS,
            Recipe(epochs=20, rate=0.02, drops=(10, 16)),
        ),
        Subject(
            "SVHN ResNet-20",
            "cifar10-resnet20",
            "svhn",
            *HOUSE_NUMBERS,
            Recipe(epochs=5, rate=0.1, drops=(3,)),
        ),
        Subject("MNIST ViT", "vit-tiny", "mnist", *DIGITS, TRANSFORMER.shortened(6)),
        Subject("SVHN ViT", "vit-tiny", "svhn", *HOUSE_NUMBERS, TRANSFORMER),
    )
}


def main() -> None:
    """Train what is missing, and print how much of its test set each network gets right."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", default=list(STUDY))
    for name in parser.parse_args().names:
        subject = STUDY[name]
        print(
            f"{name}: {100 * subject.build().accuracy(subject.images(subject.known)):.2f} %",
            flush=True,
        )


if __name__ == "__main__":
    main()
