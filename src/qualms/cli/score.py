"""`qualms score`: images in, a table with the uncertainty of each out."""

import csv
import json
from collections.abc import Iterator
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
from qualms.progress import Tell
from qualms.scored import Scored
from qualms.scorer import Scorer
from qualms.tasks.network import Network
from qualms.tasks.scoring import CHUNK, require_finite

Columns = dict[str, list[Any]]


def score(
    images: Annotated[str, typer.Argument(help="A folder of images, a .npz or .parquet file, or a dataset's name.")],
    model: Annotated[str, typer.Option(help="As for load_model: a name, timm:…, hf:…, FILE.pt2, module:factory.")],
    weights: Weights = None,
    methods: Annotated[str, typer.Option(help="Specs with commas between.")] = DEFAULT,
    out: Annotated[Path, typer.Option(help="The table: .parquet or .csv.")] = Path("scores.csv"),
    classes: Annotated[int | None, typer.Option(help="How many, where the network leaves that open.")] = None,
    engine: Engine = "exact",
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
    own = {name: network.in_its_units(method) for name, method in wanted.items()}
    with telling() as tell:
        parts = list(_scored(Scorer(network.model, own, engine=engine, seed=seed), network, found, tell))
    table = _named(Scored.concatenated(parts), found).columns()
    if json_lines:
        for row in zip(*table.values(), strict=True):
            typer.echo(json.dumps(dict(zip(table, row, strict=True))))
        return
    write(table, out)
    typer.echo(f"{len(found)} images scored by {', '.join(wanted)}: {out}")


def _scored(scorer: Scorer, network: Network, images: Images, tell: Tell | None) -> Iterator[Scored]:
    starts = range(0, len(images), CHUNK)
    for part in scorer.stream(network.inputs(images.take(slice(start, start + CHUNK))) for start in starts):
        for name, scores in part.scores.items():
            require_finite(name, images.name, part.ids[0], scores)
        yield part
        if tell is not None:
            tell(f"{images.name} scored", part.ids[-1] + 1, len(images))


def _named(scored: Scored, images: Images) -> Scored:
    """The same with the images' names and, where they fit, those of their classes."""
    names = images.classes if len(images.classes) == scored.probs.shape[1] else None
    return replace(scored, ids=images.ids or scored.ids, class_names=names)


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
