"""`qualms reproduce`: a table of the paper, its numbers beside ours."""

import json
from pathlib import Path
from typing import Annotated

import typer

from qualms.cli.options import Device, Json, Root, resolve_device
from qualms.cli.progress_bar import show_progress
from qualms.errors import QualmsError
from qualms.report.tables import list_left_out, list_networks, paper_table
from qualms.tasks.paper_tables import TABLES, Workspace
from qualms.tasks.presets import PRESETS


def reproduce(
    table: Annotated[str, typer.Argument(help=f"The table: {', '.join(TABLES)}.")],
    preset: Annotated[
        str,
        typer.Option(
            help="Size of the experiments: cpu (reduced; hours on two cores) or paper (full)."
        ),
    ] = "cpu",
    out: Annotated[
        Path,
        typer.Option(help="Write networks and rows to this folder, in a subfolder per preset."),
    ] = Path("runs"),
    root: Root = None,
    device: Device = "auto",
    json_lines: Json = False,
) -> None:
    """Reproduce a table of the paper: train or load its networks, score, and print the numbers.

    table1: OOD detection. table2: calibration. table3: active learning. table4: the parts of
    REGrad*. table5: λ and σ. runtime: the cost of each method. vit: a vision transformer. Run an
    interrupted command again to resume it; tables share their scores. Example:

        qualms reproduce table1 --preset cpu --root data

    \f

    Args:
        table: The name of the table.
        preset: The size of the experiments.
        out: The folder for networks and rows.
        root: The folder with the datasets.
        device: Where networks run.
        json_lines: Whether to print JSON lines in place of the table.
    """
    if table not in TABLES:
        raise QualmsError(f"there is no table {table!r}; choose one of {', '.join(TABLES)}.")
    if preset not in PRESETS:
        raise QualmsError(f"there is no preset {preset!r}; choose one of {', '.join(PRESETS)}.")
    chosen = PRESETS[preset]
    with show_progress() as progress:
        workspace = Workspace(Path(root or "data"), out / preset, resolve_device(device), progress)
        rows = list(TABLES[table](chosen, workspace))
    reasons = [row["why"] for row in rows if row["row"] == "left out"]
    if len(reasons) == len(rows):
        raise QualmsError(f"no part of {table} can be computed: {reasons[0]}")
    if json_lines:
        for row in rows:
            typer.echo(json.dumps(row))
        return
    parts = (
        paper_table(table, rows),
        list_networks(rows),
        list_left_out(rows),
        f"Preset {preset}. Differences from the paper: {chosen.cuts}.",
    )
    typer.echo("\n\n".join(filter(None, parts)))
