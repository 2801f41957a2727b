"""`qualms doctor`: what is installed, and whether it works."""

import importlib
import json
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import typer

from qualms.cli.options import Json, Root, resolve_device
from qualms.data import DATASETS, load
from qualms.errors import QualmsError, explain_failure, reason
from qualms.functional import score
from qualms.models.cnn import mnist_cnn
from qualms.report.tables import markdown_table
from qualms.version import __version__

# For each package: its module, its name for pip, and what it is needed for.
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
WORKS = "works"


def doctor(root: Root = None, json_lines: Json = False) -> None:
    """Check the installation: packages, device, datasets, and whether a score can be computed.

    The exit code is 0 if scores can be computed, 1 if not.

    \f

    Args:
        root: The folder with the datasets.
        json_lines: Whether to print JSON in place of tables.
    """
    score_state = _try_score()
    facts = {
        "qualms": __version__,
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "device": resolve_device("auto"),
        "threads": torch.get_num_threads(),
        "data folder": str(root or "data"),
        "a score": score_state,
    }
    packages = []
    for module, package, use in PACKAGES:
        state = _package_version(module, package)
        packages.append({"package": package, "state": state, "for": use})
    datasets = [{"dataset": name, "state": _count_images(name, root)} for name in DATASETS]
    if json_lines:
        typer.echo(json.dumps({**facts, "packages": packages, "datasets": datasets}))
    else:
        for name, value in facts.items():
            typer.echo(f"{name}: {value}")
        _print_table(["package", "version", "for"], packages)
        _print_table(["dataset", "test images"], datasets)
    sys.exit(0 if score_state == WORKS else 1)


def _print_table(head: list[str], rows: list[dict[str, Any]]) -> None:
    """Print an empty line, then rows as a Markdown table.

    Args:
        head: The names of the columns.
        rows: The rows, each with one value per column, in the order of `head`.
    """
    cells = [list(row.values()) for row in rows]
    typer.echo(f"\n{markdown_table(head, cells)}")


def _package_version(module: str, package: str) -> str:
    """Return the version of a package, `missing`, or why it cannot be imported.

    Args:
        module: The name of the module to import.
        package: The name of its package for pip.
    """
    try:
        with explain_failure(_explain_import, let_through=(ModuleNotFoundError,)):
            importlib.import_module(module)
        return version(package)
    # The module can be imported, but was not installed by pip.
    except PackageNotFoundError:
        return "installed"
    except ModuleNotFoundError:
        return "missing"
    except QualmsError as error:
        return str(error)


def _explain_import(error: Exception) -> QualmsError:
    """Convert the error of an import to the one whose text the table of packages shows."""
    return QualmsError(f"fails to import: {reason(error)}")


def _try_score() -> str:
    """Score two random images by the default method; return `works`, or what goes wrong."""
    device = resolve_device("auto")
    torch.manual_seed(0)
    try:
        # Converts any error, also one of torch.
        with explain_failure(lambda error: QualmsError(reason(error))):
            scores = score(mnist_cnn().to(device), torch.rand(2, 1, 28, 28, device=device))
    except QualmsError as error:
        return f"fails: {reason(error)}"
    return WORKS if bool(torch.isfinite(scores).all()) else "is not finite"


def _count_images(name: str, root: Path | None) -> str:
    """Return the number of test images of a dataset, or why they cannot be counted.

    Args:
        name: The name of the dataset.
        root: The folder with the datasets.
    """
    # If no folder is named, ./data is not searched, since reading a whole dataset takes long.
    if root is None and "QUALMS_DATA" not in os.environ and DATASETS[name].package is None:
        return "pass --root"
    try:
        return str(len(load(f"data:{name}", root)))
    except QualmsError:
        return "not found"
