"""`qualms score`: images in, a table with the uncertainty of each out."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from qualms.cli.network import chosen_network
from qualms.cli.options import Device, Engine, Json, Mean, Root, Seed, Size, Std, Weights, device_of, telling
from qualms.cli.specs import chosen_methods
from qualms.data import Images, load
from qualms.errors import QualmsError
from qualms.methods.registry import DEFAULT
from qualms.tasks.journal import Journal
from qualms.tasks.network import Network
from qualms.tasks.scoring import scored

Columns = dict[str, list[Any]]


def score(
    images: Annotated[str, typer.Argument(help="A folder of images, a .npz or .parquet file, or a dataset's name.")],
    model: Annotated[str, typer.Option(help="As for load_model: a name, timm:…, hf:…, FILE.pt2, module:factory.")],
    weights: Weights = None,
    methods: Annotated[str, typer.Option(help="Specs with commas between.")] = DEFAULT,
    out: Annotated[Path, typer.Option(help="The table: .parquet or .csv.")] = Path("scores.csv"),
    classes: Annotated[int | None, typer.Option(help="How many, where the network leaves that open.")] = None,
    engine: Engine = None,
    size: Size = None,
    mean: Mean = None,
    std: Std = None,
    root: Root = None,
    seed: Seed = 0,
    device: Device = "auto",
    json_lines: Json = False,
) -> None:
    """Score images: a row for each with its id, the prediction, its confidence, and one column for each method.

    Higher means more uncertain. Noise levels in specs are in pixels from 0 to 1. Example:

        qualms score photos/ --model timm:resnet18 --size 224 --methods regrad+layers+smooth,energy --out scores.parquet
    """
    if out.suffix not in (".csv", ".parquet"):
        raise QualmsError(f"a table cannot be written to {out}; name a .csv or .parquet file.")
    wanted = chosen_methods(methods, images)
    network = chosen_network(
        images, model, weights, root, mean, std, size, device_of(device), random=False, classes=classes
    )
    found = load(images, root, size=size)
    network = replace(network, size=found.pixels.shape[2])  # its channels may be others than the images'
    with telling() as tell:
        scores = scored(
            network, found, wanted, Journal(None, {}), seed=seed, engine=engine or "exact", tell=tell
        ).scores
    table = columns(network, found) | {name: values.tolist() for name, values in scores.items()}
    if json_lines:
        for row in zip(*table.values(), strict=True):
            typer.echo(json.dumps(dict(zip(table, row, strict=True))))
        return
    write(table, out)
    typer.echo(f"{len(found)} images scored by {', '.join(wanted)}: {out}")


def columns(network: Network, images: Images) -> Columns:
    """What the network says of each image."""
    probs = network.logits(images).double().softmax(1)
    confidence, predicted = probs.max(1)
    names = images.classes if len(images.classes) == probs.shape[1] else ()
    return {
        "id": list(images.ids or range(len(images))),
        "prediction": [names[p] if names else p for p in predicted.tolist()],
        "confidence": confidence.tolist(),
    }


def write(table: Columns, out: Path) -> None:
    """As .csv or .parquet."""
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.suffix == ".csv":
        with open(out, "w", newline="") as file:
            lines = csv.writer(file)
            lines.writerow(table)
            lines.writerows(zip(*table.values(), strict=True))
        return
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise QualmsError("writing .parquet needs pyarrow; pip install 'qualms[app]', or write .csv.") from None
    parquet.write_table(pyarrow.table(table), out)
