"""`qualms train`: one of the paper's networks by the paper's recipe."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer

from qualms.cli.options import Device, Json, Root, Seed, resolve_device
from qualms.cli.progress_bar import show_progress
from qualms.data import DATASETS, load
from qualms.errors import QualmsError
from qualms.models import load_model
from qualms.stream.network import Network
from qualms.training import RECIPES, fit

NETWORKS = {
    "mnist": "mnist-cnn",
    "cifar10": "resnet18",
    "svhn": "svhn-cnn",
    "cifar100": "resnet152",
    "digits": "digits-cnn",
}


def train(
    data: Annotated[str, typer.Argument(help=f"What to learn: {', '.join(NETWORKS)}.")],
    model: Annotated[
        str | None, typer.Option(help="A network, as for load_model; the paper's by default.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The checkpoint.", show_default="runs/DATA-MODEL-seedN.pt")
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(help="Fewer than the recipe's; its schedule is scaled to fit.")
    ] = None,
    count: Annotated[int | None, typer.Option(help="Train on this many images only.")] = None,
    batch: Annotated[int | None, typer.Option(help="Batch size, if not the recipe's.")] = None,
    root: Root = None,
    seed: Seed = 0,
    device: Device = "auto",
    json_lines: Json = False,
) -> None:
    """Train a network by the paper's recipe; the best epoch on validation images is kept.

    If it is stopped, the same command resumes after the last complete epoch. Example:

        qualms train digits --epochs 10
    """
    if data not in DATASETS or DATASETS[data].classes is None:
        raise QualmsError(f"there is no recipe for {data!r}; choose one of {', '.join(NETWORKS)}.")
    name = model or NETWORKS.get(data)
    if name is None:
        raise QualmsError(f"the paper trains no network on {data}; name one with --model.")
    recipe = RECIPES["vit" if name.startswith("vit") else data if data in RECIPES else "mnist"]
    recipe = recipe if epochs is None else recipe.shortened(epochs)
    recipe = recipe if batch is None else replace(recipe, batch=batch)
    images, test = (load(f"data:{data}", root, split) for split in ("train", "test"))
    images = images if count is None else images.subset(count)
    file = out or Path("runs") / f"{data}-{name.replace(':', '-').replace('/', '-')}-seed{seed}.pt"
    torch.manual_seed(seed)
    network = load_model(name, classes=DATASETS[data].classes).to(resolve_device(device))
    normalization = DATASETS[data].normalization
    about = {"network": name, "classes": DATASETS[data].classes}
    with show_progress() as progress:
        fitted = fit(
            network,
            images,
            recipe,
            normalization,
            seed=seed,
            checkpoint=file,
            about=about,
            progress=progress,
        )
    share = Network(name, network, normalization).accuracy(test)
    if json_lines:
        row = {
            "network": name,
            "data": data,
            "accuracy": share,
            "test_images": len(test),
            "weights": str(file),
        }
        typer.echo(json.dumps({**row, "best_epoch": fitted.best_epoch, "epochs": fitted.history}))
        return
    typer.echo(
        f"{name} on {data}: {100 * share:.2f} % of {len(test)} test images right after epoch {fitted.best_epoch} of "
        f"{recipe.epochs} (validation: {100 * fitted.validation_accuracy:.2f} %). Weights: {file}"
    )
