"""`qualms report`: one page about a network, its data and the methods."""

import json
import webbrowser
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from qualms.cli.bench.output import rows_file
from qualms.cli.images import tell_images, test_images, training_images
from qualms.cli.network import chosen_network, published_network
from qualms.cli.options import (
    Chosen,
    Count,
    Device,
    Engine,
    Inside,
    Json,
    Mean,
    Published,
    Root,
    Seed,
    Size,
    Std,
    Weights,
    device_of,
    listed,
    telling,
)
from qualms.cli.own_images import Classes, Strict, class_names, end
from qualms.cli.specs import chosen_methods
from qualms.methods.method import TRAINING_DATA
from qualms.report.content import Content, Group
from qualms.report.layers import layers_of
from qualms.report.offline import require_writable
from qualms.report.page import write_page
from qualms.report.tables import left_out
from qualms.tasks.journal import Journal, read
from qualms.tasks.ood import alike
from qualms.tasks.scoring import chosen_engine, score_images, usable


def report(
    inside: Inside,
    outside: Annotated[str, typer.Option("--ood", help="Other datasets, comma-separated.")] = "",
    model: Published = None,
    weights: Weights = None,
    methods: Chosen = "paper",
    count: Count = 500,
    classes: Classes = None,
    engine: Engine = "exact",
    size: Size = None,
    mean: Mean = None,
    std: Std = None,
    cycles: Annotated[Path | None, typer.Option(help="Rows of `qualms bench active`, for their curves.")] = None,
    rows: Annotated[
        Path | None, typer.Option(help="Where scores are kept.", show_default="runs/ood-ID-MODEL-seedN.jsonl")
    ] = None,
    out: Annotated[Path, typer.Option(help="The page.")] = Path("report.html"),
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    root: Root = None,
    seed: Seed = 0,
    device: Device = "auto",
    strict: Strict = False,
    json_lines: Json = False,
) -> None:
    """Write a page that works offline: how much passes at a threshold, by which method, and which images.

    Without --ood and without labels it still shows each image, its prediction and its score. Scores are kept where
    `qualms bench ood` keeps them, and those that are there are taken. Examples:

        qualms report --id mine/ --ood others/ --model my_code:network --size 224 --open

        qualms report --id cifar10 --ood svhn --methods regrad+layers+smooth,energy --open
    """
    require_writable(out)
    curves = [row for row in read(cycles) if row.get("row") == "cycle"] if cycles else []
    name = model or published_network(inside, root)
    number, names = class_names(classes)
    network = chosen_network(
        inside, name, weights, root, mean, std, size, device_of(device), random=False, classes=number
    )
    network = replace(network, class_names=names or network.class_names)
    whole, *others = test_images([inside, *dict.fromkeys(listed(outside))], root, network.fit, strict=strict)
    known, *others = (images.subset(count or None) for images in (whole, *others))
    tell_images(network, known, *others)
    network.try_on(known)
    known = network.relabelled(known)
    others = [alike(network, known, images) for images in others]
    if known.labels is not None:
        network.accuracy(known)  # an error if its classes are not those of the labels
    asked = chosen_methods(methods, known.name)
    learns = any(TRAINING_DATA in method.needs for method in asked.values())
    train = training_images(inside, root, network.fit, whole) if learns else None
    wanted, reasons = usable(network, known, asked, train)
    used = chosen_engine(network, known, wanted, engine)
    groups = []
    with (
        Journal(rows or rows_file("ood", inside, name, seed), {"task": "ood", **network.about}) as kept,
        telling() as tell,
    ):
        for images in (known, *others):
            found = score_images(network, images, wanted, kept, seed=seed, engine=used, train=train, tell=tell)
            labels = found.labels if images is known else None
            groups.append(Group(images.name, images, found.scores, found.predicted, labels, found.confidence))
    about = {"Network": network.name, "Seed": str(seed)}
    content = Content(
        f"What {network.name} does not know",
        groups[0],
        groups[1:],
        about=about,
        costs={label: method.cost for label, method in wanted.items()},
        layers=layers_of(network, groups, wanted),
        cycles=curves,
        kinds=asked,
        left_out=reasons,
        classes=network.class_names or known.classes,
    )
    page = write_page(content, out)
    if json_lines:
        typer.echo(json.dumps({"page": str(page), **about, "methods": content.methods, "left out": reasons}))
    else:
        typer.echo("\n\n".join(part for part in (left_out(reasons), f"The page: {page.resolve()}") if part))
    if open_page:
        webbrowser.open(page.resolve().as_uri())
    end(whole, *others)
