"""`qualms reproduce`: a table of the paper, its numbers beside ours."""

import json
from pathlib import Path
from typing import Annotated

import typer

from qualms.cli.options import Device, Json, Root, resolve_device
from qualms.cli.progress_bar import show_progress
from qualms.errors import QualmsError
from qualms.report.tables import left_out, networks, paper_table
from qualms.tasks.presets import PRESETS
from qualms.tasks.reproduce import TABLES, Workspace


def reproduce(
    table: Annotated[str, typer.Argument(help=f"One of {', '.join(TABLES)}.")],
    preset: Annotated[
        str, typer.Option(help="cpu, hours on two cores, or paper, the full protocol.")
    ] = "cpu",
    out: Annotated[
        Path, typer.Option(help="The folder for networks and rows; a subfolder for each preset.")
    ] = Path("runs"),
    root: Root = None,
    device: Device = "auto",
    json_lines: Json = False,
) -> None:
    """Reproduce a table of the paper: train or load the networks, score, measure, print.

    table1: OOD detection. table2: calibration. table3: active learning. table4: the parts of
    REGrad*. table5: λ and σ.
    runtime: what each method costs. vit: a vision transformer. If it is stopped, the same command
    resumes where it left off; tables share what they score. Example:

        qualms reproduce table1 --preset cpu --root data
    """
    if table not in TABLES:
        raise QualmsError(
            f"there is no table {table!r} to reproduce; choose one of {', '.join(TABLES)}."
        )
    if preset not in PRESETS:
        raise QualmsError(f"there is no preset {preset!r}; choose one of {', '.join(PRESETS)}.")
    chosen = PRESETS[preset]
    with show_progress() as progress:
        workspace = Workspace(Path(root or "data"), out / preset, resolve_device(device), progress)
        rows = list(TABLES[table](chosen, workspace))
    reasons = [row["why"] for row in rows if row["row"] == "left out"]
    if len(reasons) == len(rows):
        raise QualmsError(f"nothing of {table} can be computed: {reasons[0]}")
    if json_lines:
        for row in rows:
            typer.echo(json.dumps(row))
        return
    numbers = paper_table(table, rows)
    cuts = f"Preset {preset}. What it cuts: {chosen.cuts}."
    typer.echo(
        "\n\n".join(part for part in (numbers, networks(rows), left_out(rows), cuts) if part)
    )
