"""`qualms report`: one page about a network, its data and the methods.

Texts go through the same door: `qualms.cli.text_report`.
"""

import json
import webbrowser
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from qualms.cli.bench.task_output import rows_file
from qualms.cli.image_options import echo_images, test_images, training_images
from qualms.cli.load_network import load_network, published_network
from qualms.cli.options import (
    Count,
    Device,
    Json,
    Mean,
    Published,
    Root,
    Seed,
    Size,
    Std,
    Tolerance,
    Weights,
    resolve_device,
    split_list,
)
from qualms.cli.own_images import Classes, Strict, exit_if_rejected, parse_class_names
from qualms.cli.price import echo_price_of_groups
from qualms.cli.progress_bar import show_progress
from qualms.cli.specs import parse_methods
from qualms.cli.text_report import METHODS, report_texts, require_unused
from qualms.disk import require_writable
from qualms.errors import QualmsError
from qualms.gradients.settings import Engine as EngineName
from qualms.gradients.settings import Settings
from qualms.methods.method import TRAINING_DATA
from qualms.report.content import Content, Group
from qualms.report.layer_chart import layers_of
from qualms.report.page import write_page
from qualms.report.tables import list_left_out
from qualms.tasks.journal import Journal, read
from qualms.tasks.ood import resize_like
from qualms.tasks.rows import LeftOutRow
from qualms.tasks.scoring import choose_engine, score_images, select_usable

COUNT = 500


def report(
    texts: Annotated[
        str | None,
        typer.Argument(
            help="With --tokens: a .txt, .jsonl or .parquet file, or a folder of .txt files."
        ),
    ] = None,
    inside: Annotated[
        str | None,
        typer.Option("--id", help="The dataset that the network knows, by name or path."),
    ] = None,
    outside: Annotated[str, typer.Option("--ood", help="Other datasets, comma-separated.")] = "",
    model: Published = None,
    weights: Weights = None,
    methods: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated specs, or `paper`, or `all`.",
            show_default=f"paper; {METHODS} with --tokens",
        ),
    ] = None,
    count: Count = COUNT,
    classes: Classes = None,
    engine: Annotated[
        EngineName | None,
        typer.Option(help="Of the gradient scores.", show_default="auto; sketch with --tokens"),
    ] = None,
    tolerance: Tolerance = None,
    size: Size = None,
    mean: Mean = None,
    std: Std = None,
    cycles: Annotated[
        Path | None, typer.Option(help="Rows of `qualms bench active`, for their curves.")
    ] = None,
    rows: Annotated[
        Path | None,
        typer.Option(help="Where scores are kept.", show_default="runs/ood-ID-MODEL-seedN.jsonl"),
    ] = None,
    tokens: Annotated[
        bool,
        typer.Option(
            "--tokens",
            help="A page about every token of TEXTS, by a language model, --model hf:FOLDER.",
        ),
    ] = False,
    out: Annotated[Path, typer.Option(help="The page.")] = Path("report.html"),
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    root: Root = None,
    seed: Seed = 0,
    device: Device = "auto",
    strict: Strict = False,
    json_lines: Json = False,
) -> None:
    """Write a page that works offline: how much passes at a threshold, by which method, and which
    images.

    Without --ood and without labels it still shows each image, its prediction and its score. Scores
    are kept where `qualms bench ood` keeps them, and those that are there are taken. Examples:

        qualms report --id mine/ --ood others/ --model my_code:network --size 224 --open

        qualms report --id cifar10 --ood svhn --methods regrad+layers+smooth,energy --open

        qualms report story.txt --model hf:FOLDER --tokens --open
    """
    if tokens:
        require_unused(
            id=inside, ood=outside, weights=weights, classes=classes, size=size, mean=mean, std=std
        )
        require_unused(
            count=None if count == COUNT else count, cycles=cycles, rows=rows, tolerance=tolerance
        )
        require_writable(out)
        of_texts, told = report_texts(
            texts,
            model,
            methods,
            out,
            engine=engine,
            root=root,
            seed=seed,
            device=device,
            strict=strict,
        )
        _tell(out, [], told, json_lines, open_page)
        exit_if_rejected(of_texts)
        return
    if texts is not None or inside is None:
        raise QualmsError(
            "name the images that the network knows with --id, or pass --tokens for a page about texts."
        )
    require_writable(out)
    curves = [row for row in read(cycles) if row.get("row") == "cycle"] if cycles else []
    name = model or published_network(inside, root)
    number, names = parse_class_names(classes)
    network = load_network(
        inside,
        name,
        weights,
        root,
        mean,
        std,
        size,
        resolve_device(device),
        random=False,
        classes=number,
    )
    network = replace(network, class_names=names or network.class_names)
    whole, *others = test_images(
        [inside, *dict.fromkeys(split_list(outside))], root, network.transform, strict=strict
    )
    known, *others = (images.subset(count or None) for images in (whole, *others))
    echo_images(network, known, *others)
    network.require_input_size(known)
    known = network.relabel(known)
    others = [resize_like(network, known, images) for images in others]
    if known.labels is not None:
        network.accuracy(known)  # an error if its classes are not those of the labels
    asked = parse_methods("paper" if methods is None else methods, known.name)
    learns = any(TRAINING_DATA in method.needs for method in asked.values())
    train = training_images(inside, root, network.transform, whole) if learns else None
    wanted, reasons = select_usable(network, known, asked, train)
    used, tolerance = choose_engine(network, known, wanted, engine or "auto", tolerance)
    echo_price_of_groups(network, [known, *others], wanted, used, tolerance)
    groups = []
    with (
        Journal(
            rows or rows_file("ood", inside, name, seed), {"task": "ood", **network.about}
        ) as kept,
        show_progress() as progress,
    ):
        for images in (known, *others):
            found = score_images(
                network,
                images,
                wanted,
                kept,
                seed=seed,
                engine=used,
                tolerance=tolerance,
                train=train,
                progress=progress,
            )
            labels = found.labels if images is known else None
            groups.append(
                Group(images.name, images, found.scores, found.predicted, labels, found.confidence)
            )
    how = Settings(used, tolerance=tolerance)
    about = {"Network": network.name, "Seed": str(seed), "Gradients": how.description}
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
    _tell(
        page,
        reasons,
        {**about, "methods": content.methods, "left out": reasons},
        json_lines,
        open_page,
    )
    exit_if_rejected(whole, *others)


def _tell(
    page: Path,
    reasons: list[LeftOutRow],
    about: Mapping[str, object],
    json_lines: bool,
    open_page: bool,
) -> None:
    """Say where the page is."""
    if json_lines:
        typer.echo(json.dumps({"page": str(page), **about}))
    else:
        typer.echo(
            "\n\n".join(
                part for part in (list_left_out(reasons), f"The page: {page.resolve()}") if part
            )
        )
    if open_page:
        webbrowser.open(page.resolve().as_uri())
