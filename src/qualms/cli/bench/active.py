"""`qualms bench active`: which images are worth a label?"""

from typing import Annotated

import typer
from torch import nn

from qualms.cli.bench.options import Common
from qualms.cli.bench.output import rows_file, show
from qualms.cli.options import Chosen, resolve_device, split_list, with_options
from qualms.cli.progress_bar import show_progress
from qualms.cli.specs import parse_methods
from qualms.data import DATASETS, Images, dataset_name, load
from qualms.errors import QualmsError
from qualms.methods.method import Method
from qualms.models import load_model
from qualms.report.tables import active_table
from qualms.stream.network import Network
from qualms.tasks import active as task
from qualms.tasks.active import COLOR, NETWORKS, RANDOM, Plan
from qualms.tasks.journal import Journal
from qualms.tasks.rows import LeftOutRow, Row
from qualms.tasks.scoring import BATCH, usable
from qualms.training import RECIPES

Pickers = dict[str, Method | None]  # by the name that rows give them; None picks at random


@with_options(Common)
def active(
    given: Common,
    methods: Chosen = "paper",
    start: Annotated[int, typer.Option(help="Images to start with.")] = 20,
    more: Annotated[int, typer.Option(help="Images that each cycle adds.")] = 20,
    cycles: Annotated[int, typer.Option(help="How many.")] = 10,
    epochs: Annotated[int, typer.Option(help="The most epochs per training run.")] = RECIPES[
        "active"
    ].epochs,
    pool: Annotated[int | None, typer.Option(help="Size of the pool.")] = None,
    validation: Annotated[
        int | None, typer.Option(help="Images used to choose the best epoch.")
    ] = None,
    diversity: Annotated[float | None, typer.Option(help="As for qualms.select.")] = None,
) -> None:
    """Which images are worth a label? If it is stopped, the same command resumes where it left off.

    A network learns from a few images, asks for the labels of those that a method calls most
    uncertain, and learns anew. `random` among the methods asks for any. Example:

        qualms bench active --id digits --methods random,entropy --cycles 5
    """
    dataset = dataset_name(given.inside, given.root)
    if dataset is None:
        raise QualmsError(
            f"active learning needs a dataset with a name and labels; {given.inside!r} is not one."
        )
    name = given.model or NETWORKS.get(dataset, COLOR)
    file, device = (
        given.out or rows_file("active", given.inside, name, given.seed),
        resolve_device(given.device),
    )
    plan = Plan(
        start, more, RECIPES["active"].shortened(epochs), cycles, pool, validation, diversity
    )
    train = load(given.inside, given.root, "train")
    test = load(given.inside, given.root, "test").subset(given.count or None)
    classes, normalization = DATASETS[dataset].classes, DATASETS[dataset].normalization

    def build() -> nn.Module:
        return load_model(name, classes=classes).to(device)

    wanted, reasons = allowed(Network(name, build(), normalization), train, named(methods, dataset))
    about = {"task": "active", "network": name, "plan": repr(plan), "train": train.fingerprint()}
    with (
        show_progress() as progress,
        Journal(file, {**about, "test": test.fingerprint()}) as journal,
    ):
        found = task.active(
            build,
            train,
            test,
            normalization,
            wanted,
            plan,
            journal,
            seed=given.seed,
            progress=progress,
        )
        rows: list[Row] = [*reasons, *found]
    show(rows, active_table, file, given)


def named(methods: str, dataset: str) -> Pickers:
    """The methods that --methods asks for, by name; `random` may be one of them, and `paper`
    includes it.
    """
    specs = [spec for spec in split_list(methods) if spec != "random"]
    found: Pickers = {RANDOM: None} if "random" in split_list(methods) or methods == "paper" else {}
    return {**found, **parse_methods(",".join(specs), dataset)} if specs else found


def allowed(network: Network, train: Images, pickers: Pickers) -> tuple[Pickers, list[LeftOutRow]]:
    """Those that the network allows, and a row with the reason for each other one."""
    methods = {name: method for name, method in pickers.items() if method is not None}
    if not methods:
        return pickers, []
    few = train.take(slice(0, 2 * BATCH))
    good, reasons = usable(network, few, methods, few)
    return {
        name: method for name, method in pickers.items() if method is None or name in good
    }, reasons
