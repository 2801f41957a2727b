"""`qualms bench active`: which images are worth labeling?"""

from dataclasses import dataclass
from typing import Annotated

import typer
from torch import nn

from qualms.cli.bench_common import TaskOptions, print_rows, rows_file
from qualms.cli.options import Specs, parse_methods, resolve_device, split_list, with_options
from qualms.cli.progress_bar import show_progress
from qualms.data import DATASETS, Images, dataset_name, load
from qualms.errors import QualmsError
from qualms.methods.method import Method
from qualms.models import load_model
from qualms.report.tables import active_table
from qualms.stream.network import Network
from qualms.stream.sizes import FORWARD_BATCH
from qualms.tasks import active as task
from qualms.tasks.active import COLOR_NETWORK, NETWORKS, RANDOM, Plan
from qualms.tasks.image_scores import select_usable
from qualms.tasks.journal import Journal
from qualms.tasks.rows import LeftOutRow, Row
from qualms.training import RECIPES

# A dict from the name of a picker, as rows have it, to the method whose highest scores are picked,
# or to None, which picks at random.
Pickers = dict[str, Method | None]
EPOCHS = RECIPES["active"].epochs


@dataclass(frozen=True, kw_only=True)
class ActiveOptions(TaskOptions):
    """The options of `qualms bench active`."""

    methods: Specs = "paper"
    start: Annotated[int, typer.Option(help="Number of labeled images to start with.")] = 20
    more: Annotated[int, typer.Option(help="Number of images that each cycle adds.")] = 20
    cycles: Annotated[int, typer.Option(help="Number of cycles.")] = 10
    epochs: Annotated[int, typer.Option(help="Maximum number of epochs per training run.")] = EPOCHS
    pool: Annotated[int | None, typer.Option(help="Number of images to pick from.")] = None
    validation: Annotated[
        int | None, typer.Option(help="Number of validation images for choosing the best epoch.")
    ] = None
    diversity: Annotated[
        float | None,
        typer.Option(help="Pick diverse images, from this many candidates per pick; at least 1."),
    ] = None

    def make_plan(self) -> Plan:
        """Return the schedule: how many images each cycle labels, and how it trains on them."""
        recipe = RECIPES["active"].shortened(self.epochs)
        return Plan(
            start=self.start,
            more=self.more,
            recipe=recipe,
            cycles=self.cycles,
            pool=self.pool,
            validation=self.validation,
            diversity=self.diversity,
        )


@with_options(ActiveOptions)
def active(options: ActiveOptions) -> None:
    """Train on the images that a method picks, and measure how much they help.

    A network is trained on a few images, receives labels for those with the highest scores, and is
    trained again. The method `random` picks at random. Run an interrupted command again to resume
    it. Example:

        qualms bench active --id digits --methods random,entropy --cycles 5
    """
    dataset = dataset_name(options.inside, options.root)
    if dataset is None:
        raise QualmsError(
            f"bench active needs a known dataset with labels, but {options.inside!r} is not one; "
            f"choose one of {', '.join(DATASETS)}."
        )
    network_name = options.model or NETWORKS.get(dataset, COLOR_NETWORK)
    rows_path = options.out or rows_file("active", options.inside, network_name, options.seed)
    device = resolve_device(options.device)
    plan = options.make_plan()
    train = load(options.inside, options.root, "train")
    # --count 0 stands for all images, as does None for `subset`.
    test = load(options.inside, options.root, "test").subset(options.count or None)
    normalization = DATASETS[dataset].normalization

    def build_network() -> nn.Module:
        """Build the network with fresh weights, which follow torch's global seed."""
        return load_model(network_name, classes=DATASETS[dataset].classes).to(device)

    requested_pickers = parse_pickers(options.methods, dataset)
    network = Network(network_name, build_network(), normalization)
    pickers, left_out = select_usable_pickers(network, train, requested_pickers)
    # What decides the rows: an earlier run can be resumed only if all of it is equal.
    about = {
        "task": "active",
        "network": network_name,
        "plan": repr(plan),
        "train": train.fingerprint(),
        "test": test.fingerprint(),
    }
    with show_progress() as progress, Journal(rows_path, about) as journal:
        cycle_rows = task.active(
            build_network,
            train,
            test,
            normalization,
            pickers,
            plan,
            journal,
            seed=options.seed,
            progress=progress,
        )
        rows: list[Row] = [*left_out, *cycle_rows]
    print_rows(rows, active_table, rows_path, options.seed, options.json_lines)


def parse_pickers(methods: str, dataset: str) -> Pickers:
    """Parse --methods, of which `random` may be one; `paper` includes it.

    Args:
        methods: The value of --methods.
        dataset: The dataset that decides the settings of the paper's methods.

    Returns:
        The pickers by name: methods whose highest scores are picked, and None for random picks.
    """
    pickers: Pickers = {}
    specs = split_list(methods)
    # Rows call it `RANDOM`, a name as in the paper's tables.
    if "random" in specs or methods == "paper":
        pickers[RANDOM] = None
    scored_specs = ",".join(spec for spec in specs if spec != "random")
    if scored_specs:
        pickers.update(parse_methods(scored_specs, dataset))
    return pickers


def select_usable_pickers(
    network: Network, train: Images, pickers: Pickers
) -> tuple[Pickers, list[LeftOutRow]]:
    """Try each picker on a few images, and keep those that the network supports.

    Args:
        network: The network that scores the images.
        train: The images to pick from.
        pickers: The pickers by name: methods, and None for random picks, which always work.

    Returns:
        The pickers that work, and a row with the reason for each other picker.
    """
    methods = {name: method for name, method in pickers.items() if method is not None}
    if not methods:
        return pickers, []
    # Two batches, as a real run has several. Methods that learn from images learn from these.
    trial_images = train.take(slice(0, 2 * FORWARD_BATCH))
    usable, left_out = select_usable(network, trial_images, methods, train=trial_images)
    kept: Pickers = {}
    for name, method in pickers.items():
        if method is None or name in usable:
            kept[name] = method
    return kept, left_out
