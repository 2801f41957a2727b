"""`qualms bench ood`, `calibration`, `ablation` and `runtime`: tasks that score images.

Each command loads the network and the images, leaves out the methods that cannot be used, runs a
task of `qualms.tasks`, and prints its rows as a table. The commands differ in the methods, in the
task and in the table, which are the arguments of `run_task`.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from qualms.cli.bench_common import (
    NetworkTaskOptions,
    parse_outside,
    print_rows,
    rows_file,
)
from qualms.cli.input_images import echo_images, test_images, training_images
from qualms.cli.load_network import load_network, published_network
from qualms.cli.options import Outside, Specs, parse_methods, with_options
from qualms.cli.price_estimate import echo_price_of_groups
from qualms.cli.progress_bar import show_progress
from qualms.data import Images
from qualms.report.tables import calibration_table, ood_table, runtime_table
from qualms.stream.network import Network
from qualms.tasks import calibration as calibration_task
from qualms.tasks import ood as ood_task
from qualms.tasks import runtime as runtime_task
from qualms.tasks.ablation import components, lambda_sweep, sigma_sweep
from qualms.tasks.image_scores import measure_accuracy, select_usable
from qualms.tasks.journal import Journal
from qualms.tasks.rows import AccuracyRow, Row
from qualms.tasks.score_rows import Methods


@with_options(NetworkTaskOptions)
def ood(options: NetworkTaskOptions, outside: Outside = "", methods: Specs = "paper") -> None:
    """Measure how well scores detect images from other datasets.

    Noise levels in methods assume pixels from 0 to 1. Run an interrupted command again to resume
    it.
    Example:

        qualms bench ood --id cifar10 --ood svhn --methods regrad+layers+smooth,entropy
    """
    others = parse_outside("ood", options.inside, outside)
    choose = partial(parse_methods, methods)
    run_task("ood", options, choose, _measure_ood, ood_table, others)


@with_options(NetworkTaskOptions)
def calibration(options: NetworkTaskOptions, methods: Specs = "paper") -> None:
    """Measure whether the predictions with the lowest scores are the correct ones.

    Noise levels in methods assume pixels from 0 to 1. Run an interrupted command again to resume
    it.
    Example:

        qualms bench calibration --id cifar10 --methods regrad+layers+smooth,entropy --count 0
    """
    choose = partial(parse_methods, methods)
    run_task("calibration", options, choose, _measure_calibration, calibration_table)


@with_options(NetworkTaskOptions)
def ablation(options: NetworkTaskOptions, outside: Outside = "") -> None:
    """Measure what each part of REGrad* adds, and how much λ and σ matter.

    The measure is how well images from other datasets are detected. Run an interrupted command
    again to resume it. Example:

        qualms bench ablation --id svhn --ood cifar10
    """
    others = parse_outside("ablation", options.inside, outside)
    run_task("ablation", options, ablation_methods, _measure_ood, ood_table, others)


@with_options(NetworkTaskOptions)
def runtime(options: NetworkTaskOptions, methods: Specs = "paper") -> None:
    """Measure the time that each method takes, relative to Entropy.

    The network may have random weights. Run an interrupted command again to resume it. Example:

        qualms bench runtime --id cifar10 --model resnet18 --count 64
    """
    choose = partial(parse_methods, methods)
    run_task("runtime", options, choose, _measure_runtime, runtime_table, allow_random=True)


@dataclass(frozen=True)
class ImageTask:
    """The arguments of a task, loaded.

    Args:
        network: The network to evaluate.
        images: Test images of the dataset that the network knows.
        others: Test images of other datasets.
        methods: The methods that can be used, by name.
        journal: Saves the rows.
        settings: The keyword arguments that all tasks share: `seed`, `engine`, `tolerance`, `train`
            and `progress`.
    """

    network: Network
    images: Images
    others: list[Images]
    methods: Methods
    journal: Journal
    settings: dict[str, Any]

    def accuracy(self) -> Iterator[AccuracyRow]:
        """Yield a row with the network's accuracy on the images; nothing if they have no labels."""
        if self.images.labels is not None:
            row = measure_accuracy(self.network, self.images, self.journal)
            yield {**row, "network": self.network.name}


def run_task(
    name: str,
    options: NetworkTaskOptions,
    choose_methods: Callable[[str], Methods],
    measure: Callable[[ImageTask], Iterator[Row]],
    table: Callable[[Iterable[Row]], str],
    outside: Iterable[str] = (),
    allow_random: bool = False,
) -> None:
    """Load the network and the images, leave out unusable methods, measure, and print the rows.

    Args:
        name: The name of the task, which is part of the file's name and of its first line.
        options: The options of the command.
        choose_methods: Returns the methods to evaluate, given the name of the dataset.
        measure: Runs the task, and yields its rows.
        table: Formats the rows as a table.
        outside: The names of the other datasets.
        allow_random: Whether a network with random weights is accepted.
    """
    model = options.model or published_network(options.inside, options.root)
    file = options.out or rows_file(name, options.inside, model, options.seed)
    with show_progress() as progress:
        network = load_network(options.inside, model, options, options.classes, allow_random)
        names = [options.inside, *outside]
        all_images = test_images(names, options.root, network.transform, strict=False)
        images, *others = [
            images_of_dataset.subset(options.count or None) for images_of_dataset in all_images
        ]
        wanted = choose_methods(images.name)
        echo_images(network, images, *others)
        network.require_input_size(images)
        images = network.relabel(images)
        train = training_images(
            wanted, options.inside, options.root, network.transform, all_images[0]
        )
        methods, left_out = select_usable(network, images, wanted, train)
        groups = [images, *others]
        echo_price_of_groups(network, groups, methods, options.engine, options.tolerance)
        settings = {
            "seed": options.seed,
            "engine": options.engine,
            "tolerance": options.tolerance,
            "train": train,
            "progress": progress,
        }
        with Journal(file, {"task": name, **network.about}) as journal:
            task = ImageTask(network, images, others, methods, journal, settings)
            rows: list[Row] = [*left_out, *measure(task)]
    print_rows(rows, table, file, options.seed, options.json_lines)


def ablation_methods(dataset: str) -> Methods:
    """Return REGrad*, its variants without each part, and its sweeps over λ and σ.

    Args:
        dataset: The dataset for which REGrad* has the paper's λ and σ.
    """
    return {**components(dataset), **lambda_sweep(), **sigma_sweep(dataset)}


def _measure_ood(task: ImageTask) -> Iterator[Row]:
    """Yield the accuracy, then how well each method detects each other dataset."""
    yield from task.accuracy()
    yield from ood_task.ood(
        task.network, task.images, task.others, task.methods, task.journal, **task.settings
    )


def _measure_calibration(task: ImageTask) -> Iterator[Row]:
    """Yield the accuracy, then how well each method ranks predictions."""
    yield from task.accuracy()
    yield from calibration_task.calibration(
        task.network, task.images, task.methods, task.journal, **task.settings
    )


def _measure_runtime(task: ImageTask) -> Iterator[Row]:
    """Yield a row with the time of each method."""
    yield from runtime_task.runtime(
        task.network, task.images, task.methods, task.journal, **task.settings
    )
