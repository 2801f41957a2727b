"""The paper's tables, each from one call: networks are trained (or read), scored and measured.

All results go into one folder: the trained networks in `networks`, a file of rows for each network,
and one for each dataset of active learning. Tables share these files, so that nothing is scored
twice.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
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
from qualms.tasks.active import COLOR_NETWORK, NETWORKS, RANDOM, active
from qualms.tasks.calibration import calibration
from qualms.tasks.image_scores import measure_accuracy, select_usable
from qualms.tasks.journal import Journal
from qualms.tasks.ood import ood
from qualms.tasks.paper_numbers import VIT, comparison_methods, paper_methods
from qualms.tasks.presets import Learning, Preset, Setup
from qualms.tasks.rows import LeftOutRow, Row
from qualms.tasks.runtime import runtime as measure_runtime
from qualms.tasks.score_rows import Methods
from qualms.training import fit

# The datasets to detect, by the dataset that the network was trained on. Tiny-ImageNet is not in the
# paper; its rows are left out if it is not on disk.
PAIRS = {
    "mnist": ("omniglot", "fashion-mnist"),
    "cifar10": ("svhn", "lsun", "tiny-imagenet-32"),
    "svhn": ("cifar10", "cifar100"),
    "cifar100": ("svhn", "lsun", "tiny-imagenet-32"),
}
# The dataset to detect in table 4, by the dataset that the network was trained on.
TABLE4_OUTSIDE = {
    "mnist": "fashion-mnist",
    "cifar10": "svhn",
    "svhn": "cifar10",
    "cifar100": "svhn",
}
TABLE4_METHODS = ("ExGrad", "REGrad", "REGrad+layers", "REGrad*")  # the rows of table 4
# Methods in the table of the vision transformer that the paper lacks.
RIVALS_OF_VIT = ("energy", "gen", "heat", "odin", "knn", "fisher")
# The most images of each of two datasets, so that both have the same number. The paper does not say
# so, but its AUPRs show it: with all 26,032 test images of SVHN as the positive class, GradNorm's
# 32.04 on CIFAR-10 → SVHN would be below the least possible AUPR, 50.8.
IMAGES_OF_EACH = 10_000
# The most training images that methods learn from if a preset scores only some of the test images.
MAX_TRAIN_IMAGES = 5000


@dataclass(frozen=True)
class Workspace:
    """Where experiments read and write.

    Args:
        root: the folder with the datasets and with published weights.
        out: the folder for networks and rows.
        device: the device that networks run on, as for `torch.device`.
        progress: called with a text, and with how much is done, during training and scoring.
    """

    root: Path
    out: Path
    device: str = "cpu"
    progress: ProgressFn | None = None


def table1(preset: Preset, workspace: Workspace) -> Iterator[Row]:
    """Measure out-of-distribution detection by all methods, on each dataset of the preset."""
    for dataset, setup in preset.setups.items():
        yield from _ood_rows(
            workspace, dataset, setup, PAIRS[dataset], table_methods(dataset, preset)
        )


def table2(preset: Preset, workspace: Workspace) -> Iterator[Row]:
    """Measure how well the scores of all methods rank predictions, on each dataset of the preset."""
    for dataset, setup in preset.setups.items():
        methods = table_methods(dataset, preset)
        yield from _measure_networks(workspace, dataset, setup, methods, _measure_calibration)


def table3(preset: Preset, workspace: Workspace) -> Iterator[Row]:
    """Measure active learning: how good a network gets with the images that each method picks."""
    for dataset, learning in preset.active.items():
        missing_row = _explain_missing(workspace, dataset)
        if missing_row is not None:
            yield missing_row
            continue
        train, test = _load(dataset, workspace.root, "train"), _load(dataset, workspace.root)
        if preset.active_test is not None:
            test = test.subset(preset.active_test)
        name = NETWORKS.get(dataset, COLOR_NETWORK)
        build = partial(_build_network, name, DATASETS[dataset].classes, workspace.device)
        about = {
            "data": dataset,
            "network": name,
            "plan": repr(learning.plan),
            "train": train.fingerprint(),
            "test": test.fingerprint(),
        }
        with Journal(workspace.out / f"active-{dataset}.jsonl", about) as journal:
            for seed in learning.seeds:
                yield from active(
                    build,
                    train,
                    test,
                    DATASETS[dataset].normalization,
                    active_methods(dataset, learning, preset),
                    learning.plan,
                    journal,
                    seed=seed,
                    progress=workspace.progress,
                )


def table4(preset: Preset, workspace: Workspace) -> Iterator[Row]:
    """Measure what each part of REGrad* adds to out-of-distribution detection."""
    for dataset, setup in preset.setups.items():
        methods = _select_methods(components(dataset, preset.smooth), TABLE4_METHODS)
        yield from _ood_rows(workspace, dataset, setup, (TABLE4_OUTSIDE[dataset],), methods)


def table5(preset: Preset, workspace: Workspace) -> Iterator[Row]:
    """Measure how well REGrad detects CIFAR-10 by networks of SVHN, for several λ and σ."""
    # The σ of the paper's table 5.
    methods = {**lambda_sweep(), **sigma_sweep("svhn", (0.015, 0.02, 0.025), preset.smooth)}
    yield from _ood_rows(workspace, "svhn", preset.setups["svhn"], ("cifar10",), methods)


def vit(preset: Preset, workspace: Workspace) -> Iterator[Row]:
    """Measure out-of-distribution detection by a vision transformer."""
    # `VIT` maps each pair of datasets to its rows, which have the same names for all pairs.
    paper_names = next(iter(VIT.values()))
    # Entropy is added as the baseline; the paper's table lacks it.
    for dataset, setup in preset.vit.items():
        all_paper_methods = paper_methods(dataset, preset.smooth, preset.draws)
        methods = {
            **_select_methods(all_paper_methods, (*paper_names, "Entropy")),
            **_select_methods(comparison_methods(dataset), RIVALS_OF_VIT),
        }
        yield from _ood_rows(workspace, dataset, setup, PAIRS[dataset], methods)


def runtime(preset: Preset, workspace: Workspace) -> Iterator[Row]:
    """Time each method on a ResNet-18 with random weights, which do not change the time."""
    dataset, name = "cifar10", "resnet18"
    missing_row = _explain_missing(workspace, dataset)
    if missing_row is not None:
        yield missing_row
        return
    images = _load(dataset, workspace.root).subset(preset.timed)
    train = _load(dataset, workspace.root, "train").subset(MAX_TRAIN_IMAGES)
    # The seed decides the random weights; afterwards torch's global random state is restored.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = load_model(name).to(workspace.device)
    network = Network(name, model, DATASETS[dataset].normalization)
    methods = table_methods(dataset, preset)
    with Journal(workspace.out / f"runtime-{name}.jsonl", network.about) as journal:
        usable, left_out = select_usable(network, images, methods, train)
        yield from left_out
        yield from measure_runtime(
            network, images, usable, journal, train=train, progress=workspace.progress
        )


TABLES: dict[str, Callable[[Preset, Workspace], Iterator[Row]]] = {
    "table1": table1,
    "table2": table2,
    "table3": table3,
    "table4": table4,
    "table5": table5,
    "runtime": runtime,
    "vit": vit,
}


def table_methods(dataset: str, preset: Preset) -> dict[str, Method]:
    """Return the methods that tables 1 and 2 and the runtime compare: the paper's, and others."""
    return {**paper_methods(dataset, preset.smooth, preset.draws), **comparison_methods(dataset)}


def _select_methods(methods: Methods, names: Collection[str]) -> dict[str, Method]:
    """Return the methods with these names, in the order of `methods`; ignore unknown names."""
    return {name: method for name, method in methods.items() if name in names}


def active_methods(dataset: str, learning: Learning, preset: Preset) -> dict[str, Method | None]:
    """Return the methods that pick images in active learning, `Random` among them.

    NEGrad is left out: it gives every image the score zero, so it would pick images in the
    order of the file.

    Args:
        dataset: the name of the dataset, which decides λ.
        learning: the settings: the names of the methods, and the smoothing of REGrad*.
        preset: the preset; only its number of random draws is used.

    Returns:
        The methods by name; None picks at random.
    """
    all_methods: dict[str, Method | None] = {RANDOM: None}
    all_methods.update(paper_methods(dataset, learning.smooth, preset.draws))
    del all_methods["NEGrad"]
    return {name: all_methods[name] for name in learning.methods or all_methods}


@dataclass(frozen=True)
class _Evaluation:
    """All that is needed to measure one network, except the measurement itself.

    Args:
        network: the network to measure.
        images: test images of the dataset that the network knows.
        methods: the methods that the network supports, by name.
        journal: saves the network's rows.
        settings: the keyword arguments `seed`, `engine`, `train` and `progress` of `ood` and of
            `calibration`.
    """

    network: Network
    images: Images
    methods: Methods
    journal: Journal
    settings: dict[str, Any]


def _measure_calibration(evaluation: _Evaluation) -> Iterator[Row]:
    """Measure rAULC, the paper's calibration: how well scores rank one network's predictions.

    Yields a row for each method.
    """
    yield from calibration(
        evaluation.network,
        evaluation.images,
        evaluation.methods,
        evaluation.journal,
        **evaluation.settings,
    )


def _ood_rows(
    workspace: Workspace, dataset: str, setup: Setup, outside: tuple[str, ...], methods: Methods
) -> Iterator[Row]:
    """Measure how well the networks of one dataset, one for each seed, detect other datasets.

    Args:
        workspace: where to read and write.
        dataset: the name of the dataset that the networks are trained on.
        setup: the setup of the networks.
        outside: the names of the datasets to detect. If a dataset cannot be read, a row says why.
        methods: the methods by the names that rows have.
    """

    def measure(evaluation: _Evaluation) -> Iterator[Row]:
        """Yield a row for each dataset in `outside` and each method, measured on one network.

        A dataset that cannot be read has a single row, which says why.
        """
        outside_images: list[Images] = []
        for name in outside:
            missing_row = _explain_missing(workspace, name)
            if missing_row is not None:
                yield {**missing_row, "in": dataset}
            else:
                images = _load(name, workspace.root).subset(setup.images)
                outside_images.append(images.take(slice(IMAGES_OF_EACH)))
        inside = evaluation.images.take(slice(IMAGES_OF_EACH))
        yield from ood(
            evaluation.network,
            inside,
            outside_images,
            evaluation.methods,
            evaluation.journal,
            **evaluation.settings,
        )

    yield from _measure_networks(workspace, dataset, setup, methods, measure)


def _measure_networks(
    workspace: Workspace,
    dataset: str,
    setup: Setup,
    methods: Methods,
    measure: Callable[[_Evaluation], Iterator[Row]],
) -> Iterator[Row]:
    """Train the network of each seed, or read its published weights, and measure it.

    Args:
        workspace: where to read and write.
        dataset: the name of the dataset that the networks are trained on.
        setup: the setup of the networks, with their seeds.
        methods: the methods by the names that rows have.
        measure: called for each network; yields rows of results.

    Yields:
        For each seed the network's accuracy, rows for the methods that it does not support, and the
        rows that `measure` yields.
    """
    missing_row = _explain_missing(workspace, dataset)
    if missing_row is not None:
        yield missing_row
        return
    # Accuracy is measured on all test images, and all else on the number that the setup asks for.
    test = _load_for_network(workspace, dataset, setup, "test")
    images = test.subset(setup.images)
    train = _load_for_network(workspace, dataset, setup, "train")
    # Few test images are for a quick run, so methods learn from fewer images as well.
    if setup.images is not None:
        train = train.subset(MAX_TRAIN_IMAGES)
    for seed in setup.seeds:
        network = _prepare_network(workspace, dataset, setup, seed)
        path = workspace.out / f"{dataset}-{setup.network}-seed{seed}.jsonl"
        with Journal(path, network.about) as journal:
            yield {**measure_accuracy(network, test, journal), "network": network.name}
            usable, left_out = select_usable(network, images, methods, train)
            yield from left_out
            settings = {
                "seed": seed,
                "engine": setup.engine,
                "train": train,
                "progress": workspace.progress,
            }
            yield from measure(_Evaluation(network, images, usable, journal, settings))


@lru_cache(maxsize=8)
def _load(dataset: str, root: Path, split: str = "test") -> Images:
    """Load a dataset, given its name in the catalog or the path of a folder or file of images."""
    return load(f"data:{dataset}" if dataset in DATASETS else dataset, root, split)


def _explain_missing(workspace: Workspace, dataset: str) -> LeftOutRow | None:
    """Try to load a dataset; return a row that says why it cannot be read, or None if it can."""
    try:
        _load(dataset, workspace.root)
    except QualmsError as error:
        return {"row": "left out", "out": dataset, "why": str(error)}
    return None


def _load_for_network(workspace: Workspace, dataset: str, setup: Setup, split: str) -> Images:
    """Load a dataset in the size and channels that a network takes.

    Args:
        workspace: where to read.
        dataset: the name of the dataset.
        setup: the setup that names the network.
        split: "train" or "test".
    """
    entry = ZOO[setup.network]
    return _load(dataset, workspace.root, split).convert(entry.channels, entry.size)


def _build_network(name: str, classes: int | None, device: str) -> torch.nn.Module:
    """Build a network of the zoo with random weights, which torch's global seed decides."""
    return load_model(name, classes=classes).to(device)


def _prepare_network(workspace: Workspace, dataset: str, setup: Setup, seed: int) -> Network:
    """Read a network's published weights, or train it if there are none.

    Training resumes from its checkpoint if it was stopped.

    Args:
        workspace: where to read and write.
        dataset: the name of the dataset that the network is trained on.
        setup: the setup that names the network and its recipe.
        seed: the seed of the fresh weights and of the order of training.
    """
    entry, classes = ZOO[setup.network], DATASETS[dataset].classes
    if entry.file is not None and entry.normalization is not None:
        published = workspace.root / "weights" / entry.file
        if published.is_file():
            model = load_model(setup.network, published, classes=classes).to(workspace.device)
            return Network(f"{setup.network}, {entry.file}", model, entry.normalization)
    normalization = DATASETS[dataset].normalization.of_channels(entry.channels)
    # The seed decides the fresh weights; afterwards torch's global random state is restored.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _build_network(setup.network, classes, workspace.device)
    images = _load_for_network(workspace, dataset, setup, "train")
    if setup.train is not None:
        images = images.subset(setup.train)
    fit(
        model,
        images,
        setup.recipe,
        normalization,
        seed=seed,
        checkpoint=workspace.out / "networks" / f"{dataset}-{setup.network}-seed{seed}.pt",
        about={"network": setup.network, "classes": classes},
        progress=workspace.progress,
    )
    return Network(f"{setup.network}, trained here, seed {seed}", model, normalization)
