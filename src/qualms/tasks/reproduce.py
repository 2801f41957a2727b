"""The paper's tables, each from one call: networks are trained (or read), scored, and measured, row by row on disk.

Everything lands in one folder for each preset: `networks`, one file of rows for each network, and one for each dataset
of active learning. Tables share them: what one has scored the next does not score again.
"""

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch

from qualms.data import DATASETS, Images, load
from qualms.errors import QualmsError
from qualms.methods.method import Method
from qualms.models import load_model
from qualms.models.zoo import ZOO
from qualms.tasks.ablation import components, lambda_sweep, sigma_sweep
from qualms.tasks.active import RANDOM, active
from qualms.tasks.calibration import calibration
from qualms.tasks.network import Network
from qualms.tasks.ood import ood
from qualms.tasks.paper import paper_methods
from qualms.tasks.presets import Preset, Setup
from qualms.tasks.rows import Row, Rows
from qualms.tasks.scoring import Methods, Tell, usable
from qualms.training import fit

# In-distribution dataset, and what is to be told from it. The image folder stands beside LSUN where it is on disk.
PAIRS = {
    "mnist": ("omniglot", "fashion-mnist"),
    "cifar10": ("svhn", "lsun", "tiny-imagenet-32"),
    "svhn": ("cifar10", "cifar100"),
    "cifar100": ("svhn", "lsun", "tiny-imagenet-32"),
}
EXTRA = ("tiny-imagenet-32",)  # not in the paper
MAIN = {"mnist": ("fashion-mnist",), "cifar10": ("svhn",), "svhn": ("cifar10",), "cifar100": ("svhn",)}
LEARNT_FROM = 5000  # training images that `laplace` sees under a preset that scores a part only


@dataclass(frozen=True)
class Place:
    """Where data is read and rows are kept, and who is told how far it is."""

    root: Path
    out: Path
    device: str = "cpu"
    tell: Tell | None = None


def table1(preset: Preset, at: Place) -> Iterator[Row]:
    """Out-of-distribution detection by all methods."""
    for dataset, setup in preset.setups.items():
        yield from _ood(preset, at, dataset, setup, PAIRS[dataset], paper_methods(dataset, preset.smooth))


def table2(preset: Preset, at: Place) -> Iterator[Row]:
    """Calibration of all methods."""
    for dataset, setup in preset.setups.items():
        methods = paper_methods(dataset, preset.smooth)
        for seed in preset.seeds:
            with _opened(preset, at, dataset, setup, seed) as (network, rows):
                test, train = _test(at, dataset, setup), _learnt_from(at, dataset, setup)
                good, reasons = usable(network, test, methods, train)
                yield from reasons
                how = {"seed": seed, "engine": setup.engine, "train": train, "tell": at.tell}
                yield from calibration(network, test, good, rows, **how)  # type: ignore[arg-type]
