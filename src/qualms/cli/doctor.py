"""`qualms doctor`: what is installed, what is missing, and what would fail for it."""

import importlib
import json
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import typer

from qualms.cli.options import Json, Root, resolve_device
from qualms.data import DATASETS, load
from qualms.errors import QualmsError, reason
from qualms.functional import score
from qualms.models.cnn import mnist_cnn
from qualms.report.tables import markdown
from qualms.version import __version__

# Import name, package, and what needs it.
PACKAGES = (
    ("torch", "torch", "everything"),
    ("numpy", "numpy", "everything"),
    ("jaxtyping", "jaxtyping", "everything"),
    ("sklearn", "scikit-learn", "the bundled digits and photographs, and so the demo"),
    ("PIL", "pillow", "image files, Omniglot, the demo's letters, the report's pictures"),
    ("pyarrow", "pyarrow", ".parquet files"),
    ("safetensors", "safetensors", ".safetensors checkpoints"),
    ("jinja2", "jinja2", "the report"),
    ("typer", "typer", "the command line"),
    ("rich", "rich", "progress bars"),
    ("transformers", "transformers", "hf: networks"),
    ("timm", "timm", "timm: networks (it needs torchvision)"),
)


def doctor(root: Root = None, json_lines: Json = False) -> None:
    """Say what is installed, which device is used, which datasets are there, and what would fail.

    Exit code 0 if scores can be computed, 1 if not.
    """
    packages = [
        {"package": package, "state": _state(module, package), "for": use}
        for module, package, use in PACKAGES
    ]
    works = _works()
    facts = {
        "qualms": __version__,
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "device": resolve_device("auto"),
        "threads": torch.get_num_threads(),
        "data folder": str(root or "data"),
        "a score": works,
    }
    data = [{"dataset": name, "state": _dataset(name, root)} for name in DATASETS]
    if json_lines:
        typer.echo(json.dumps({**facts, "packages": packages, "datasets": data}))
    else:
        typer.echo("\n".join(f"{name}: {value}" for name, value in facts.items()) + "\n")
        typer.echo(
            markdown(
                ["package", "version", "for"], [[str(v) for v in p.values()] for p in packages]
            )
            + "\n"
        )
        typer.echo(
            markdown(["dataset", "test images"], [[str(v) for v in d.values()] for d in data])
        )
    sys.exit(0 if works == "works" else 1)


def _state(module: str, package: str) -> str:
    try:
        importlib.import_module(module)
        return version(package)
    except PackageNotFoundError:
        return "installed"
    except Exception as error:  # a package that is there may still fail to import, whatever way
        there = (
            "fails to import: " + reason(error)
            if not isinstance(error, ModuleNotFoundError)
            else "missing"
        )
        return there


def _works() -> str:
    try:
        torch.manual_seed(0)
        found = score(
            mnist_cnn().to(resolve_device("auto")),
            torch.rand(2, 1, 28, 28, device=resolve_device("auto")),
        )
        return "works" if bool(torch.isfinite(found).all()) else "is not finite"
    except Exception as error:  # that is what a doctor is for
        return f"fails: {reason(error)}"


def _dataset(name: str, root: Path | None) -> str:
    # Without its files the folder is not read: a whole dataset would take long.
    if root is None and "QUALMS_DATA" not in os.environ and DATASETS[name].package is None:
        return "no folder named"
    try:
        return str(len(load(f"data:{name}", root)))
    except QualmsError:
        return "not there"
