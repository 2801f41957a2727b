"""The paper's tables, each from one call: networks are trained (or read), scored and measured, row
by row on disk.

Everything lands in one folder: `networks`, one file of rows for each network, one for each dataset
of active learning. Tables share them: what one has scored, the next does not score again.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from qualms.data import DATASETS, Images, load
from qualms.errors import QualmsError
from qualms.methods.method import Method
from qualms.models import load_model
from qualms.models.zoo import ZOO
from qualms.progress import ProgressFn
from qualms.stream.network import Network
from qualms.tasks.ablation import components, lambda_sweep, sigma_sweep
from qualms.tasks.active import COLOR, NETWORKS, RANDOM, active
from qualms.tasks.calibration import calibration
from qualms.tasks.image_scores import accuracy_row, select_usable
from qualms.tasks.journal import Journal
from qualms.tasks.ood import ood
from qualms.tasks.paper import VIT, methods_beside, paper_methods
from qualms.tasks.presets import Learning, Preset, Setup
from qualms.tasks.rows import LeftOutRow, Row
from qualms.tasks.runtime import runtime as measure_runtime
from qualms.tasks.score_rows import Methods
from qualms.training import fit

# What is to be told from each dataset. Tiny-ImageNet, not in the paper, stands beside LSUN where it
# is on disk.
PAIRS = {
    "mnist": ("omniglot", "fashion-mnist"),
    "cifar10": ("svhn", "lsun", "tiny-imagenet-32"),
    "svhn": ("cifar10", "cifar100"),
    "cifar100": ("svhn", "lsun", "tiny-imagenet-32"),
}
MAIN = {
    "mnist": "fashion-mnist",
    "cifar10": "svhn",
    "svhn": "cifar10",
    "cifar100": "svhn",
}  # table 4's
BESIDE_VIT = ("energy", "gen", "heat", "odin", "knn", "fisher")
PARTS = ("REGrad", "REGrad+layers", "REGrad*")
# As many images of the one dataset as of the other. The paper does not say so, but its AUPRs do:
# with all 26,032 test images of SVHN as the positives, GradNorm's 32.04 on CIFAR-10 → SVHN would be
# below the least possible AUPR, 50.8.
EQUAL = 10_000
LEARNT_FROM = (
    5000  # training images that methods see where a preset scores a part of the test images only
)


@dataclass(frozen=True)
class Workspace:
    """Where data is read and rows are kept, where it is computed, and who is told how far it is."""

    root: Path
    out: Path
    device: str = "cpu"
    progress: ProgressFn | None = None


def table1(preset: Preset, at: Workspace) -> Iterator[Row]:
    """Out-of-distribution detection by all methods."""
    for dataset, setup in preset.setups.items():
        yield from _ood(preset, at, dataset, setup, PAIRS[dataset], table_methods(dataset, preset))


def table2(preset: Preset, at: Workspace) -> Iterator[Row]:
    """Calibration of all methods."""
    for dataset, setup in preset.setups.items():
        methods = table_methods(dataset, preset)
        yield from _on_each_network(preset, at, dataset, setup, methods, _calibration)


def table3(preset: Preset, at: Workspace) -> Iterator[Row]:
    """Active learning."""
    for dataset, learning in preset.active.items():
        if (missing := _missing(at, dataset)) is not None:
            yield missing
            continue
        train, test = (_load(dataset, at.root, split) for split in ("train", "test"))
        test = test if preset.active_test is None else test.subset(preset.active_test)
        classes = DATASETS[dataset].classes
        methods = active_methods(dataset, learning, preset)
        normalization = DATASETS[dataset].normalization
        name = NETWORKS.get(dataset, COLOR)

        def build(name: str = name, classes: int | None = classes) -> torch.nn.Module:
            return load_model(name, classes=classes).to(at.device)

        plan = learning.plan
        about = {"data": dataset, "network": name, "plan": repr(plan), "train": train.fingerprint()}
        with Journal(
            at.out / f"active-{dataset}.jsonl", {**about, "test": test.fingerprint()}
        ) as journal:
            for seed in learning.seeds:
                yield from active(
                    build,
                    train,
                    test,
                    normalization,
                    methods,
                    plan,
                    journal,
                    seed=seed,
                    progress=at.progress,
                )


def table4(preset: Preset, at: Workspace) -> Iterator[Row]:
    """What each part of REGrad* adds."""
    for dataset, setup in preset.setups.items():
        rows = {
            k: v for k, v in components(dataset, preset.smooth).items() if k in ("ExGrad", *PARTS)
        }
        yield from _ood(preset, at, dataset, setup, (MAIN[dataset],), rows)


def table5(preset: Preset, at: Workspace) -> Iterator[Row]:
    """How much λ and σ matter, on SVHN against CIFAR-10."""
    methods = {**lambda_sweep(), **sigma_sweep("svhn", (0.015, 0.02, 0.025), preset.smooth)}
    yield from _ood(preset, at, "svhn", preset.setups["svhn"], ("cifar10",), methods)


def vit(preset: Preset, at: Workspace) -> Iterator[Row]:
    """Out-of-distribution detection by a vision transformer."""
    rows = next(iter(VIT.values()))
    for dataset, setup in preset.vit.items():
        own = paper_methods(dataset, preset.smooth, preset.draws)
        beside = {
            name: method for name, method in methods_beside(dataset).items() if name in BESIDE_VIT
        }
        methods = {**{k: v for k, v in own.items() if k in rows or k == "Entropy"}, **beside}
        yield from _ood(preset, at, dataset, setup, PAIRS[dataset], methods)


def runtime(preset: Preset, at: Workspace) -> Iterator[Row]:
    """What each method costs, on a ResNet-18 whose weights do not matter."""
    dataset, name = "cifar10", "resnet18"
    if (missing := _missing(at, dataset)) is not None:
        yield missing
        return
    images, train = (
        _load(dataset, at.root).subset(preset.timed),
        _load(dataset, at.root, "train").subset(LEARNT_FROM),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = Network(name, load_model(name).to(at.device), DATASETS[dataset].normalization)
    methods = table_methods(dataset, preset)
    with Journal(at.out / f"runtime-{name}.jsonl", network.about) as journal:
        good, reasons = select_usable(network, images, methods, train)
        yield from reasons
        yield from measure_runtime(
            network, images, good, journal, train=train, progress=at.progress
        )


TABLES: dict[str, Callable[[Preset, Workspace], Iterator[Row]]] = {
    f.__name__: f for f in (table1, table2, table3, table4, table5, runtime, vit)
}


def table_methods(dataset: str, preset: Preset) -> dict[str, Method]:
    """The paper's methods, and what stands beside them."""
    return {**paper_methods(dataset, preset.smooth, preset.draws), **methods_beside(dataset)}


def active_methods(dataset: str, learning: Learning, preset: Preset) -> dict[str, Method | None]:
    """Those of the preset; None stands for a random choice.

    NEGrad is not among them: it gives every image the score zero, and would take the pool in the
    order of its file.
    """
    every: dict[str, Method | None] = {
        RANDOM: None,
        **paper_methods(dataset, learning.smooth, preset.draws),
    }
    del every["NEGrad"]
    return {name: every[name] for name in learning.methods or every}


def _calibration(r: "Ready") -> Iterator[Row]:
    yield from calibration(r.network, r.images, r.methods, r.journal, **r.how)


def _ood(
    preset: Preset,
    at: Workspace,
    dataset: str,
    setup: Setup,
    outside: tuple[str, ...],
    methods: Methods,
) -> Iterator[Row]:
    def measured(r: "Ready") -> Iterator[Row]:
        others = []
        for name in outside:
            if (missing := _missing(at, name)) is not None:
                yield {**missing, "in": dataset}
            else:
                others.append(
                    _load(name, at.root).subset(setup.images).take(slice(EQUAL))
                )  # `ood` fits their size
        yield from ood(
            r.network, r.images.take(slice(EQUAL)), others, r.methods, r.journal, **r.how
        )

    yield from _on_each_network(preset, at, dataset, setup, methods, measured)


@dataclass(frozen=True)
class Ready:
    """A network with its test images, the methods that it allows, and the journal of its rows."""

    network: Network
    images: Images
    methods: Methods
    journal: Journal
    how: dict[str, Any]  # seed, engine, training images and who is told, as tasks take them


def _on_each_network(
    preset: Preset,
    at: Workspace,
    dataset: str,
    setup: Setup,
    methods: Methods,
    measured: Callable[[Ready], Iterator[Row]],
) -> Iterator[Row]:
    """For each seed: the network's accuracy, what is left out, and what is measured on it."""
    if (missing := _missing(at, dataset)) is not None:
        yield missing
        return
    whole, train = (_fitted(at, dataset, setup, split) for split in ("test", "train"))
    images, learnt = (
        whole.subset(setup.images),
        train if setup.images is None else train.subset(LEARNT_FROM),
    )
    for seed in setup.seeds:
        network = _network(at, dataset, setup, seed)
        with Journal(
            at.out / f"{dataset}-{setup.network}-seed{seed}.jsonl", network.about
        ) as journal:
            yield {**accuracy_row(network, whole, journal), "network": network.name}
            good, reasons = select_usable(network, images, methods, learnt)
            yield from reasons
            how = {"seed": seed, "engine": setup.engine, "train": learnt, "progress": at.progress}
            yield from measured(Ready(network, images, good, journal, how))


@lru_cache(maxsize=8)
def _load(dataset: str, root: Path, split: str = "test") -> Images:
    return load(f"data:{dataset}" if dataset in DATASETS else dataset, root, split)


def _missing(at: Workspace, dataset: str) -> LeftOutRow | None:
    """A row that says why a dataset is left out, if it cannot be read."""
    try:
        _load(dataset, at.root)
        return None
    except QualmsError as error:
        return {"row": "left out", "out": dataset, "why": str(error)}


def _fitted(at: Workspace, dataset: str, setup: Setup, split: str) -> Images:
    """Images in the size and channels of the network."""
    entry = ZOO[setup.network]
    return _load(dataset, at.root, split).convert(entry.channels, entry.size)


def _network(at: Workspace, dataset: str, setup: Setup, seed: int) -> Network:
    entry, classes = ZOO[setup.network], DATASETS[dataset].classes
    published = at.root / "weights" / (entry.file or "")
    if entry.file is not None and entry.normalization is not None and published.is_file():
        model = load_model(setup.network, published, classes=classes).to(at.device)
        return Network(f"{setup.network}, {entry.file}", model, entry.normalization)
    normalization = DATASETS[dataset].normalization.of_channels(entry.channels)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = load_model(setup.network, classes=classes).to(at.device)
    images = _fitted(at, dataset, setup, "train")
    images = images if setup.train is None else images.subset(setup.train)
    file = at.out / "networks" / f"{dataset}-{setup.network}-seed{seed}.pt"
    about = {"network": setup.network, "classes": classes}
    fit(
        model,
        images,
        setup.recipe,
        normalization,
        seed=seed,
        checkpoint=file,
        about=about,
        progress=at.progress,
    )
    return Network(f"{setup.network}, trained here, seed {seed}", model, normalization)
