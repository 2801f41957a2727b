"""`qualms train`: one of the paper's networks by the paper's recipe.

The recipes are in `training/recipes.py`, the loop in `training/fit.py`.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
import typer

from qualms.cli.options import Device, Json, Root, Seed, model_option, resolve_device, with_options
from qualms.cli.progress_bar import show_progress
from qualms.data import DATASETS, load
from qualms.errors import QualmsError
from qualms.models import load_model
from qualms.stream.network import Network
from qualms.training import RECIPES, Recipe, fit

# By dataset, the network that the paper trains on it.
NETWORKS = {
    "mnist": "mnist-cnn",
    "cifar10": "resnet18",
    "svhn": "svhn-cnn",
    "cifar100": "resnet152",
    "digits": "digits-cnn",
}


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """The options of `qualms train`."""

    data: Annotated[str, typer.Argument(help=f"The dataset: {', '.join(NETWORKS)}.")]
    model: Annotated[
        str | None,
        model_option("the paper's"),
    ] = None
    out: Annotated[
        Path | None,
        typer.Option(
            help="Write the checkpoint to this file.", show_default="runs/DATA-MODEL-seedN.pt"
        ),
    ] = None
    epochs: Annotated[
        int | None,
        typer.Option(
            help="Number of epochs, instead of the recipe's; the schedule is rescaled to match."
        ),
    ] = None
    count: Annotated[
        int | None, typer.Option(help="Number of training images; all by default.")
    ] = None
    batch: Annotated[
        int | None, typer.Option(help="Number of images in a batch.", show_default="the recipe's")
    ] = None
    root: Root = None
    seed: Seed = 0
    device: Device = "auto"
    json_lines: Json = False


@with_options(TrainOptions)
def train(options: TrainOptions) -> None:
    """Train a network by the paper's recipe, and keep the epoch with the best validation accuracy.

    Run an interrupted command again to resume it after the last complete epoch. Example:

        qualms train digits --epochs 10
    """
    data = options.data
    if data not in DATASETS or DATASETS[data].classes is None:
        raise QualmsError(f"there is no recipe for {data!r}; choose one of {', '.join(NETWORKS)}.")
    network_name = options.model or NETWORKS.get(data)
    if network_name is None:
        raise QualmsError(f"the paper trains no network on {data}; pass a network as --model.")
    recipe = _choose_recipe(data, network_name, options)
    images = load(f"data:{data}", options.root, "train")
    test = load(f"data:{data}", options.root, "test")
    if options.count is not None:
        images = images.subset(options.count)
    checkpoint = options.out or _default_checkpoint(data, network_name, options.seed)
    torch.manual_seed(options.seed)
    model = load_model(network_name, classes=DATASETS[data].classes).to(
        resolve_device(options.device)
    )
    normalization = DATASETS[data].normalization
    with show_progress() as progress:
        result = fit(
            model,
            images,
            recipe,
            normalization,
            seed=options.seed,
            checkpoint=checkpoint,
            about={"network": network_name, "classes": DATASETS[data].classes},
            progress=progress,
        )
    accuracy = Network(network_name, model, normalization).accuracy(test)
    if options.json_lines:
        row = {
            "network": network_name,
            "data": data,
            "accuracy": accuracy,
            "test_images": len(test),
            "weights": str(checkpoint),
            "best_epoch": result.best_epoch,
            "epochs": result.history,
        }
        typer.echo(json.dumps(row))
        return
    typer.echo(
        f"{network_name} on {data}: accuracy {100 * accuracy:.2f} % on {len(test)} test images "
        f"after epoch {result.best_epoch} of {recipe.epochs} "
        f"(validation: {100 * result.validation_accuracy:.2f} %). Weights: {checkpoint}"
    )


def _choose_recipe(data: str, network_name: str, options: TrainOptions) -> Recipe:
    """Return the recipe for a dataset and network, with --epochs and --batch in place of its own.

    Args:
        data: The name of the dataset.
        network_name: The name of the network.
        options: The options of the command.
    """
    recipe_name = "vit" if network_name.startswith("vit") else data
    # Fashion-MNIST, for one, has no recipe of its own.
    recipe = RECIPES.get(recipe_name, RECIPES["mnist"])
    if options.epochs is not None:
        recipe = recipe.shortened(options.epochs)
    if options.batch is not None:
        recipe = replace(recipe, batch=options.batch)
    return recipe


def _default_checkpoint(data: str, network_name: str, seed: int) -> Path:
    """Return the default path of a checkpoint, such as `runs/digits-digits-cnn-seed0.pt`.

    Args:
        data: The name of the dataset.
        network_name: The name of the network.
        seed: The seed of the training.
    """
    file_name_part = network_name.replace(":", "-").replace("/", "-")
    return Path("runs") / f"{data}-{file_name_part}-seed{seed}.pt"
