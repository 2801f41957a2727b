"""`qualms bench`: a task on a network and images of the user's choice."""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from torch import nn

from qualms.cli.network import PUBLISHED, chosen_network
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
from qualms.data import DATASETS, Images, load
from qualms.errors import QualmsError
from qualms.methods.method import TRAINING_DATA, Method
from qualms.methods.registry import METHODS, parse
from qualms.models import load_model
from qualms.progress import Tell
from qualms.report.tables import active_table, calibration_table, left_out, networks, ood_table, runtime_table
from qualms.tasks.ablation import components, lambda_sweep, sigma_sweep
from qualms.tasks.active import COLOUR, NETWORKS, RANDOM, Plan, active
from qualms.tasks.calibration import calibration
from qualms.tasks.journal import Journal
from qualms.tasks.network import Network
from qualms.tasks.ood import ood
from qualms.tasks.paper import paper_methods
from qualms.tasks.reproduce import LEARNT_FROM
from qualms.tasks.rows import Row
from qualms.tasks.runtime import runtime
from qualms.tasks.scoring import BATCH, Methods, judged, usable
from qualms.training import RECIPES

TASKS: dict[str, Callable[[Iterable[Row]], str]] = {
    "ood": ood_table,
    "calibration": calibration_table,
    "ablation": ood_table,
    "runtime": runtime_table,
    "active": active_table,
}
BESIDE = ("energy", "gen", "coherence")  # what users would pick instead of the paper's methods, and ours


def bench(
    task: Annotated[str, typer.Argument(help=f"One of {', '.join(TASKS)}.")],
    inside: Inside,
    outside: Annotated[str, typer.Option("--ood", help="Other datasets, with commas between (ood, ablation).")] = "",
    model: Published = None,
    weights: Weights = None,
    methods: Chosen = "paper",
    count: Count = 500,
    engine: Engine = None,
    size: Size = None,
    mean: Mean = None,
    std: Std = None,
    start: Annotated[int | None, typer.Option(help="active: images to start with.", show_default="20")] = None,
    more: Annotated[int | None, typer.Option(help="active: images that each cycle adds.", show_default="20")] = None,
    cycles: Annotated[int | None, typer.Option(help="active: how many.", show_default="10")] = None,
    epochs: Annotated[int | None, typer.Option(help="active: at most, a training.", show_default="200")] = None,
    pool: Annotated[int | None, typer.Option(help="active: choose among so many images.")] = None,
    validation: Annotated[int | None, typer.Option(help="active: choose the epoch by so many images.")] = None,
    diversity: Annotated[float | None, typer.Option(help="active: as for qualms.select.")] = None,
    root: Root = None,
    out: Annotated[
        Path | None, typer.Option(help="The rows, as JSON lines.", show_default="runs/TASK-ID-MODEL-seedN.jsonl")
    ] = None,
    seed: Seed = 0,
    device: Device = "auto",
    json_lines: Json = False,
) -> None:
    """Judge methods on a network. Killed, the same command goes on where it was.

    ood: do scores tell other datasets apart? calibration: are certain predictions right? ablation: what do the parts of
    REGrad* add, and do λ and σ matter? runtime: what does each method cost? active: which images are worth a label?
    Noise levels in specs are in pixels from 0 to 1. Examples:

        qualms bench ood --id cifar10 --ood svhn --model cifar10-resnet20 --methods regrad+layers+smooth,entropy

        qualms bench active --id digits --methods random,entropy --cycles 5
    """
    if task not in TASKS:
        raise QualmsError(f"there is no task {task!r}; choose one of {', '.join(TASKS)}.")
    of_active: dict[str, Any] = {"start": start, "more": more, "cycles": cycles, "epochs": epochs, "pool": pool}
    of_active |= {"validation": validation, "diversity": diversity}
    of_scores = {"weights": weights, "engine": engine, "size": size, "mean": mean, "std": std}
    _refuse(task, of_scores if task == "active" else of_active)
    _refuse(task, {} if task in ("ood", "ablation") else {"ood": outside or None})
    if task in ("ood", "ablation") and not outside:
        raise QualmsError(f"{task} needs --ood, the datasets to be told from {inside}.")
    if inside in listed(outside):
        raise QualmsError(f"--ood names {inside}, which is what the network knows; name other datasets.")
    name = model or (NETWORKS.get(inside, COLOUR) if task == "active" else PUBLISHED.get(inside, ""))
    file = out or rows_file(task, inside, name, seed)
    with telling() as tell:
        if task == "active":
            recipe = RECIPES["active"] if epochs is None else RECIPES["active"].shortened(epochs)
            sizes = (20 if start is None else start, 20 if more is None else more)
            plan = Plan(*sizes, recipe, 10 if cycles is None else cycles, pool, validation, diversity)
            found = _active(inside, name, methods, plan, count, root, file, seed, device_of(device), tell)
        else:
            network = chosen_network(
                inside, name, weights, root, mean, std, size, device_of(device), random=task == "runtime"
            )
            test, *others = test_images([inside, *dict.fromkeys(listed(outside))], root, size)
            learn = partial(training_images, inside, root, size, test)
            found = _scored(task, network, test, others, methods, count, engine or "exact", learn, file, seed, tell)
        rows = list(found)
    if json_lines:
        typer.echo("\n".join(json.dumps(row) for row in rows))
        return
    parts = (TASKS[task](rows), networks(rows), left_out(rows), f"Rows: {file}. Seed {seed}.")
    typer.echo("\n\n".join(part for part in parts if part))


def rows_file(task: str, inside: str, name: str, seed: int) -> Path:
    """Where rows are kept unless told otherwise."""
    return Path("runs") / f"{task}-{_plain(inside)}-{_plain(name)}-seed{seed}.jsonl"


def _scored(
    task: str,
    network: Network,
    test: Images,
    others: list[Images],
    methods: str,
    count: int,
    engine: str,
    learn: Callable[[], Images | None],
    file: Path,
    seed: int,
    tell: Tell | None,
) -> Iterator[Row]:
    whole = test
    test, *others = (images.subset(count or None) for images in (test, *others))
    wanted = _ablated(test.name) if task == "ablation" else chosen(methods, test.name)
    train = learn() if any(TRAINING_DATA in method.needs for method in wanted.values()) else None
    good, reasons = usable(network, test, wanted, train)
    yield from reasons
    how: dict[str, Any] = {"seed": seed, "engine": engine, "train": train, "tell": tell}
    with Journal(file, {"task": task, **network.about}) as rows:
        if whole.labels is not None and task != "runtime":
            yield {**judged(network, whole, rows), "network": network.name}
        if task == "calibration":
            yield from calibration(network, test, good, rows, **how)
        elif task == "runtime":
            yield from runtime(network, test, good, rows, **how)
        else:
            yield from ood(network, test, others, good, rows, **how)


def _active(
    inside: str,
    name: str,
    methods: str,
    plan: Plan,
    count: int,
    root: Path | None,
    file: Path,
    seed: int,
    device: str,
    tell: Tell | None,
) -> Iterator[Row]:
    if inside not in DATASETS:
        raise QualmsError(f"active learning needs a dataset with a name and labels; {inside!r} is not one.")
    train, test = load(inside, root, "train"), load(inside, root, "test").subset(count or None)
    classes, normalisation = DATASETS[inside].classes, DATASETS[inside].normalisation
    specs = [spec for spec in listed(methods) if spec != "random"]
    wanted: dict[str, Method | None] = {RANDOM: None} if "random" in listed(methods) or methods == "paper" else {}
    wanted |= chosen(",".join(specs), inside) if specs else {}
    about = {"task": "active", "network": name, "plan": repr(plan), "train": train.fingerprint()}

    def build() -> nn.Module:
        return load_model(name, classes=classes).to(device)

    methods_only = {label: method for label, method in wanted.items() if method is not None}
    if methods_only:
        few = train.take(slice(0, 2 * BATCH))
        good, reasons = usable(Network(name, build(), normalisation), few, methods_only, few)
        yield from reasons
        wanted = {label: method for label, method in wanted.items() if method is None or label in good}
    with Journal(file, {**about, "test": test.fingerprint()}) as rows:
        yield from active(build, train, test, normalisation, wanted, plan, rows, seed=seed, tell=tell)


def chosen(text: str, dataset: str) -> dict[str, Method]:
    """The methods that the command line names: specs, `paper`, or `all`."""
    found: dict[str, Method] = {}
    for spec in listed(text):
        if spec in ("paper", "all"):
            found |= paper_methods(dataset)
            found |= {name: parse(name) for name in BESIDE}
        if spec == "all":
            known = {type(method) for method in found.values()}
            found |= {kind.name: kind() for kind in METHODS if kind not in known}
        if spec not in ("paper", "all"):
            found[spec] = parse(spec)
    if not found:
        raise QualmsError("--methods names no method; give specs with commas between, or `paper`.")
    return found


def _ablated(dataset: str) -> Methods:
    return {**components(dataset), **lambda_sweep(), **sigma_sweep(dataset)}


def test_images(names: list[str], root: Path | None, size: int | None) -> list[Images]:
    """Test images; those whose files have the same name are called by the whole path.

    Files may hold images of several sizes, so those are resized as they are read; named datasets by the network, batch
    by batch.
    """
    found = [load(name, root, "test", size=None if name in DATASETS else size) for name in names]
    short = [images.name for images in found]
    return [
        replace(images, name=name) if short.count(images.name) > 1 else images
        for name, images in zip(names, found, strict=True)
    ]


def training_images(name: str, root: Path | None, size: int | None, test: Images) -> Images | None:
    """Training images, if they are there, for the methods that learn from them.

    A file or folder without parts for training and testing gives the test images for both: those are not for learning.
    """
    try:
        train = load(name, root, "train", size=None if name in DATASETS else size)
    except QualmsError:
        return None
    return None if train.fingerprint() == test.fingerprint() else train.subset(LEARNT_FROM)


def _refuse(task: str, options: dict[str, Any]) -> None:
    """An option that the task would not look at is a mistake."""
    for name, value in options.items():
        if value is not None:
            raise QualmsError(f"{task} takes no --{name}; leave it out.")


def _plain(text: str) -> str:
    return "".join(c if c.isalnum() or c in "-." else "-" for c in text)
