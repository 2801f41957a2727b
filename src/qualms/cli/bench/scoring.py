"""What the tasks on a trained network have in common: network, images and methods are made ready,
then measured.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from qualms.cli.bench.options import Trained
from qualms.cli.bench.output import rows_file, show
from qualms.cli.image_options import tell_images, test_images, training_images
from qualms.cli.load_network import load_network, published_network
from qualms.cli.options import resolve_device, split_list
from qualms.cli.price import say_price_of_groups
from qualms.cli.progress_bar import show_progress
from qualms.data import Images
from qualms.errors import QualmsError
from qualms.methods.method import TRAINING_DATA
from qualms.stream.network import Network
from qualms.tasks.journal import Journal
from qualms.tasks.rows import AccuracyRow, Row
from qualms.tasks.scoring import Methods, accuracy_row, usable

Outside = Annotated[str, typer.Option("--ood", help="Other datasets, comma-separated.")]


@dataclass(frozen=True)
class Prepared:
    """All that a task on a trained network takes."""

    network: Network
    images: Images  # test images of what the network knows
    others: list[Images]
    methods: Methods
    journal: Journal
    how: dict[
        str, Any
    ]  # seed, engine, tolerance, training images and who is told, as tasks take them

    def accuracy(self) -> Iterator[AccuracyRow]:
        """A row that says how good the network is on the images that are scored, if that can be
        known.
        """
        if self.images.labels is not None:
            yield {
                **accuracy_row(self.network, self.images, self.journal),
                "network": self.network.name,
            }


def run_task(
    task: str,
    given: Trained,
    methods: Callable[[str], Methods],
    measure: Callable[[Prepared], Iterator[Row]],
    table: Callable[[Iterable[Row]], str],
    outside: Iterable[str] = (),
    random: bool = False,
) -> None:
    """Make ready, measure, print.

    Args:
        task: the name in files.
        given: the options.
        methods: those to be judged on a dataset.
        measure: the task itself.
        table: what its rows look like.
        outside: datasets to be told from the one that the network knows.
        random: whether a network without weights will do.
    """
    name = given.model or published_network(given.inside, given.root)
    file = given.out or rows_file(task, given.inside, name, given.seed)
    device = resolve_device(given.device)
    with show_progress() as progress:
        network = load_network(
            given.inside,
            name,
            given.weights,
            given.root,
            given.mean,
            given.std,
            given.size,
            device,
            random=random,
            classes=given.classes,
        )
        whole, *others = test_images(
            [given.inside, *outside], given.root, network.transform, strict=False
        )
        images, *others = (found.subset(given.count or None) for found in (whole, *others))
        wanted = methods(images.name)
        tell_images(network, images, *others)
        network.require_input_size(images)
        images = network.relabel(images)
        learns = any(TRAINING_DATA in method.needs for method in wanted.values())
        train = (
            training_images(given.inside, given.root, network.transform, whole) if learns else None
        )
        good, reasons = usable(network, images, wanted, train)
        say_price_of_groups(network, [images, *others], good, given.engine, given.tolerance)
        how = {
            "seed": given.seed,
            "engine": given.engine,
            "tolerance": given.tolerance,
            "train": train,
            "progress": progress,
        }
        with Journal(file, {"task": task, **network.about}) as journal:
            rows = [*reasons, *measure(Prepared(network, images, others, good, journal, how))]
    show(rows, table, file, given)


def told_apart(task: str, inside: str, outside: str) -> list[str]:
    """The datasets of --ood, each once."""
    if not outside:
        raise QualmsError(f"{task} needs --ood, the datasets to be told from {inside}.")
    if inside in split_list(outside):
        raise QualmsError(
            f"--ood names {inside}, which is what the network knows; name other datasets."
        )
    return list(dict.fromkeys(split_list(outside)))
