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
from qualms.cli.input_images import echo_images, read_test_images, read_training_images
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
IMAGE_DEFAULTS = {
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
    """The options that name what a report is about: texts or images, network and methods."""

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
    """Write a page about the tokens of texts, and print where it is: `qualms report --tokens`.

    Raise an error if options are given that apply to images only.
    """
    image_options = []
    for name, default in IMAGE_DEFAULTS.items():
        if getattr(options, name) != default:
            image_options.append(name)
    forbid_options(image_options)
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
    _announce_page(options.out, [], about, options)
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
    cycle_rows = []
    if options.cycles is not None:
        cycle_rows = [row for row in read(options.cycles) if row.get("row") == "cycle"]
    network_name = options.model or published_network(options.id, options.root)
    network = load_classifier(options.id, network_name, options, options.classes)
    all_known_images, groups = _read_groups(network, options.id, options)
    known_images = groups[0]
    specs = "paper" if options.methods is None else options.methods
    requested_methods = parse_methods(specs, known_images.name)
    train = read_training_images(
        requested_methods, options.id, options.root, network.transform, test=all_known_images
    )
    methods, left_out = select_usable(network, known_images, requested_methods, train)
    engine, tolerance = choose_engine(
        network, known_images, methods, options.engine or "auto", options.tolerance
    )
    echo_price_of_groups(network, groups, methods, engine, tolerance)
    settings = {"seed": options.seed, "engine": engine, "tolerance": tolerance, "train": train}
    rows_path = options.rows or rows_file("ood", options.id, network_name, options.seed)
    scored_groups = _score_groups(network, groups, methods, rows_path, settings)
    about = {
        "Network": network.name,
        "Seed": str(options.seed),
        "Gradients": Settings(engine, tolerance=tolerance).description,
    }
    content = Content(
        f"What {network.name} does not know",
        known=scored_groups[0],
        unknown=scored_groups[1:],
        about=about,
        costs={label: method.cost for label, method in methods.items()},
        layers=layers_of(network, scored_groups, methods),
        cycles=cycle_rows,
        kinds=requested_methods,
        left_out=left_out,
        classes=network.class_names or known_images.classes,
    )
    page = write_page(content, options.out)
    facts = {**about, "methods": content.methods, "left out": left_out}
    _announce_page(page, left_out, facts, options)
    # `groups[0]` is a part of `all_known_images`.
    num_rejected = sum(len(images.rejected) for images in (all_known_images, *groups[1:]))
    exit_if_incomplete(num_rejected)


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
    all_images = read_test_images(names, options.root, network.transform, options.strict)
    # --count 0 stands for all images, as does None for `subset`.
    count = options.count or None
    known_images, *others = [images.subset(count) for images in all_images]
    echo_images(network, known_images, *others)
    network.require_input_size(known_images)
    known_images = network.relabel(known_images)
    others = [resize_like(network, known_images, images) for images in others]
    if known_images.labels is not None:
        # Called for its error if the network's classes are not those of the labels.
        network.accuracy(known_images)
    return all_images[0], [known_images, *others]


def _score_groups(
    network: Network,
    groups: list[Images],
    methods: Methods,
    rows_path: Path,
    settings: dict[str, Any],
) -> list[Group]:
    """Score all images; scores that an earlier run has saved in the file are not computed again.

    Args:
        network: The network whose uncertainty is scored.
        groups: The images that the network knows, then other groups.
        methods: The methods by name, with noise for pixels in [0, 1].
        rows_path: The file that the scores are saved in.
        settings: Keyword arguments of `score_images`.

    Returns:
        The groups with their scores and predictions. Only the first keeps its labels: those of
        other images need not be classes of the network.
    """
    scored_groups = []
    # The task is `ood`, so that `qualms bench ood` reads and writes the same scores.
    with (
        Journal(rows_path, {"task": "ood", **network.about}) as journal,
        show_progress() as progress,
    ):
        for images in groups:
            scored_images = score_images(
                network, images, methods, journal, progress=progress, **settings
            )
            labels = scored_images.labels if images is groups[0] else None
            scored_groups.append(
                Group(
                    name=images.name,
                    images=images,
                    scores=scored_images.scores,
                    predicted=scored_images.predicted,
                    labels=labels,
                    confidence=scored_images.confidence,
                )
            )
    return scored_groups


def _announce_page(
    page: Path, left_out: list[LeftOutRow], about: Mapping[str, object], options: ReportOptions
) -> None:
    """Print where the page is, and open it with --open.

    Args:
        page: The file of the page.
        left_out: Rows of the methods that could not be used, with reasons.
        about: Facts that --json prints, by name.
        options: The options of the command.
    """
    if options.json_lines:
        typer.echo(json.dumps({"page": str(page), **about}))
    else:
        sections = (list_left_out(left_out), f"The page: {page.resolve()}")
        # Without left-out methods, the first section is an empty string, which is left out.
        typer.echo("\n\n".join(filter(None, sections)))
    if options.open_page:
        webbrowser.open(page.resolve().as_uri())
