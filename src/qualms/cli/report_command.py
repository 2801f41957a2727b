"""`qualms report`: one page about a network, its data and the methods.

With --tokens, `report_texts` writes a page about texts.
"""

import json
import webbrowser
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from qualms.cli.bench_common import rows_file
from qualms.cli.input_images import echo_images, test_images, training_images
from qualms.cli.input_texts import forbid_options
from qualms.cli.load_network import published_network
from qualms.cli.options import (
    COUNT,
    SPECS,
    Classes,
    Count,
    Json,
    NetworkOptions,
    OpenPage,
    Page,
    Published,
    Seed,
    Strict,
    Tolerance,
    engine_option,
    methods_option,
    parse_methods,
    split_list,
    with_options,
)
from qualms.cli.price_estimate import echo_price_of_groups
from qualms.cli.progress_bar import show_progress
from qualms.cli.report_texts import METHODS, report_texts
from qualms.cli.scoring_run import load_classifier
from qualms.cli.status import exit_if_incomplete
from qualms.data import Images
from qualms.disk import require_writable
from qualms.errors import QualmsError
from qualms.gradients.settings import Engine, Settings
from qualms.report.content import Content, Group
from qualms.report.layer_chart import layers_of
from qualms.report.page import write_page
from qualms.report.tables import list_left_out
from qualms.stream.network import Network
from qualms.tasks.image_scores import choose_engine, score_images, select_usable
from qualms.tasks.journal import Journal, read
from qualms.tasks.ood import resize_like
from qualms.tasks.rows import LeftOutRow
from qualms.tasks.score_rows import Methods

# The options that have no effect with --tokens, and their defaults.
FOR_IMAGES = {
    "id": None,
    "ood": "",
    "weights": None,
    "classes": None,
    "size": None,
    "mean": None,
    "std": None,
    "count": COUNT,
    "cycles": None,
    "rows": None,
    "tolerance": None,
}


@dataclass(frozen=True, kw_only=True)
class ReportSubject:
    """What a report is about."""

    texts: Annotated[
        str | None,
        typer.Argument(
            help="With --tokens: a .txt, .jsonl or .parquet file, or a folder of .txt files."
        ),
    ] = None
    id: Annotated[
        str | None,
        typer.Option("--id", help="The dataset that the network knows, by name or path."),
    ] = None
    ood: Annotated[str, typer.Option("--ood", help="Other datasets, comma-separated.")] = ""
    model: Published = None
    methods: Annotated[str | None, methods_option(SPECS, f"paper; {METHODS} with --tokens")] = None
    count: Count = COUNT


@dataclass(frozen=True, kw_only=True)
class ReportOptions(NetworkOptions, ReportSubject):
    """The options of `qualms report`."""

    classes: Classes = None
    engine: Annotated[Engine | None, engine_option("auto; sketch with --tokens")] = None
    tolerance: Tolerance = None
    cycles: Annotated[
        Path | None,
        typer.Option(
            help="Plot the learning curves in this JSON lines file of `qualms bench active`."
        ),
    ] = None
    rows: Annotated[
        Path | None,
        typer.Option(
            help="Save scores to this JSON lines file, and reuse those already in it.",
            show_default="runs/ood-ID-MODEL-seedN.jsonl",
        ),
    ] = None
    tokens: Annotated[
        bool,
        typer.Option(
            "--tokens",
            help="Report on every token of TEXTS, with a language model (--model hf:FOLDER).",
        ),
    ] = False
    out: Page = Path("report.html")
    open_page: OpenPage = False
    seed: Seed = 0
    strict: Strict = False
    json_lines: Json = False


@with_options(ReportOptions)
def report(options: ReportOptions) -> None:
    """Write an offline HTML page that shows which images the network knows, by each method.

    It shows how many images are accepted at a threshold, and each image with its prediction and its
    score; --ood and labels add comparisons. Scores are shared with `qualms bench ood`. Run an
    interrupted command again to resume it. Examples:

        qualms report --id mine/ --ood others/ --model my_code:network --size 224 --open

        qualms report --id cifar10 --ood svhn --methods regrad+layers+smooth,energy --open

        qualms report story.txt --model hf:FOLDER --tokens --open
    """
    if options.tokens:
        _report_texts(options)
    else:
        _report_images(options)


def _report_texts(options: ReportOptions) -> None:
    """Write a page about the tokens of texts, and print where it is.

    Options for images are an error.
    """
    idle = [name for name, default in FOR_IMAGES.items() if getattr(options, name) != default]
    forbid_options(idle)
    require_writable(options.out)
    texts, about = report_texts(
        options.texts,
        options.model,
        options.methods,
        options.out,
        engine=options.engine,
        root=options.root,
        seed=options.seed,
        device=options.device,
        strict=options.strict,
    )
    _announce(options.out, [], about, options)
    exit_if_incomplete(len(texts.rejected))


def _report_images(options: ReportOptions) -> None:
    """Write a page about a network and images, and print where it is.

    The steps: load the network, read the images, leave out the methods that cannot be used, choose
    the engine, score, write.
    """
    if options.texts is not None or options.id is None:
        raise QualmsError(
            "name the images that the network knows with --id, or pass --tokens for a page about "
            "texts."
        )
    require_writable(options.out)
    cycles = []
    if options.cycles is not None:
        cycles = [row for row in read(options.cycles) if row.get("row") == "cycle"]
    name = options.model or published_network(options.id, options.root)
    network = load_classifier(options.id, name, options, options.classes)
    whole, groups = _read_groups(network, options.id, options)
    known = groups[0]
    asked = parse_methods("paper" if options.methods is None else options.methods, known.name)
    train = training_images(asked, options.id, options.root, network.transform, whole)
    methods, left_out = select_usable(network, known, asked, train)
    engine, tolerance = choose_engine(
        network, known, methods, options.engine or "auto", options.tolerance
    )
    echo_price_of_groups(network, groups, methods, engine, tolerance)
    settings = {"seed": options.seed, "engine": engine, "tolerance": tolerance, "train": train}
    file = options.rows or rows_file("ood", options.id, name, options.seed)
    scored = _score_groups(network, groups, methods, file, settings)
    about = {
        "Network": network.name,
        "Seed": str(options.seed),
        "Gradients": Settings(engine, tolerance=tolerance).description,
    }
    content = Content(
        f"What {network.name} does not know",
        scored[0],
        scored[1:],
        about=about,
        costs={label: method.cost for label, method in methods.items()},
        layers=layers_of(network, scored, methods),
        cycles=cycles,
        kinds=asked,
        left_out=left_out,
        classes=network.class_names or known.classes,
    )
    page = write_page(content, options.out)
    facts = {**about, "methods": content.methods, "left out": left_out}
    _announce(page, left_out, facts, options)
    exit_if_incomplete(sum(len(images.rejected) for images in (whole, *groups[1:])))


def _read_groups(
    network: Network, known: str, options: ReportOptions
) -> tuple[Images, list[Images]]:
    """Read the images of --id and --ood, and print how many there are.

    Args:
        network: The network, which resizes the images.
        known: The value of --id.
        options: The options of the command.

    Returns:
        All images of --id, of which methods may not learn; and the groups of at most --count images
        to score, of which the first is from --id.
    """
    names = [known, *dict.fromkeys(split_list(options.ood))]
    all_images = test_images(names, options.root, network.transform, options.strict)
    first, *others = [images.subset(options.count or None) for images in all_images]
    echo_images(network, first, *others)
    network.require_input_size(first)
    first = network.relabel(first)
    others = [resize_like(network, first, images) for images in others]
    if first.labels is not None:
        # An error if its classes are not those of the labels.
        network.accuracy(first)
    return all_images[0], [first, *others]


def _score_groups(
    network: Network,
    groups: list[Images],
    methods: Methods,
    file: Path,
    settings: dict[str, Any],
) -> list[Group]:
    """Score all images; scores that an earlier run has kept are not computed again.

    Args:
        network: The network whose uncertainty is scored.
        groups: The images that the network knows, then other groups.
        methods: The methods by name, with noise for pixels in [0, 1].
        file: The file that the scores are saved in.
        settings: Keyword arguments of `score_images`.

    Returns:
        The groups with their scores and predictions. Only the first keeps its labels: those of
        other images need not be classes of the network.
    """
    scored = []
    with Journal(file, {"task": "ood", **network.about}) as journal, show_progress() as progress:
        for images in groups:
            scored_images = score_images(
                network, images, methods, journal, progress=progress, **settings
            )
            labels = scored_images.labels if images is groups[0] else None
            scored.append(
                Group(
                    images.name,
                    images,
                    scored_images.scores,
                    scored_images.predicted,
                    labels,
                    scored_images.confidence,
                )
            )
    return scored


def _announce(
    page: Path, left_out: list[LeftOutRow], about: Mapping[str, object], options: ReportOptions
) -> None:
    """Print where the page is, and open it with --open.

    Args:
        page: The file.
        left_out: The methods that could not be used, with reasons.
        about: Facts for --json.
        options: The options of the command.
    """
    if options.json_lines:
        typer.echo(json.dumps({"page": str(page), **about}))
    else:
        parts = (list_left_out(left_out), f"The page: {page.resolve()}")
        typer.echo("\n\n".join(filter(None, parts)))
    if options.open_page:
        webbrowser.open(page.resolve().as_uri())
