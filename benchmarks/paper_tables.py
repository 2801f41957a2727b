"""The paper's tables on the real datasets: runs `qualms reproduce` table by table and keeps the
measured rows.

    QUALMS_DATA=folder python benchmarks/paper_tables.py TABLE [TABLE …] [--data mnist,svhn] [--out
    runs]

Each table and dataset has a file of rows in `results/tables`, without the scores of single images;
`results_page.py` makes docs/results.md of them. What is on disk in `runs` is not computed again, so
a killed run can be resumed. OMP_NUM_THREADS=1 lets several datasets run in parallel.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from checkpoints import root

from qualms.tasks.paper_tables import TABLES, Workspace
from qualms.tasks.presets import CPU, Preset
from qualms.tasks.rows import Row

RESULTS = Path(__file__).parent / "results" / "tables"


def only(preset: Preset, dataset: str) -> Preset:
    """The preset with one dataset."""

    def chosen(found: dict[str, Any]) -> dict[str, Any]:
        return {name: setup for name, setup in found.items() if name == dataset}

    return replace(
        preset, setups=chosen(preset.setups), vit=chosen(preset.vit), active=chosen(preset.active)
    )


def datasets(table: str) -> list[str]:
    """Those that a table has."""
    one = {"table5": "svhn", "runtime": "cifar10"}.get(table)
    if one is not None:
        return [one]
    return list(CPU.vit if table == "vit" else CPU.active if table == "table3" else CPU.setups)


def keep(table: str, dataset: str, rows: list[Row]) -> None:
    """The rows of a table and a dataset, in place of those that were there."""
    text = "".join(json.dumps({"table": table, **row}) + "\n" for row in rows).replace(
        str(root()), "data"
    )
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{table}-{dataset}.jsonl").write_text(text)


def main() -> None:
    """Run what is not there yet."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", nargs="+", choices=list(TABLES))
    parser.add_argument("--data", help="datasets, comma-separated; all of the table by default")
    parser.add_argument("--out", type=Path, default=Path("runs"))
    given = parser.parse_args()
    wanted = given.data.split(",") if given.data else None
    if wanted and (
        unknown := set(wanted) - {dataset for table in given.tables for dataset in datasets(table)}
    ):
        raise SystemExit(f"none of these tables has {', '.join(unknown)}; name other datasets.")
    began, last_report = time.monotonic(), 0.0

    def progress(what: str, done: int, of: int) -> None:
        nonlocal last_report
        if time.monotonic() - last_report > 60:
            last_report = time.monotonic()
            print(f"{last_report - began:.0f} s: {what} {done} of {of}", flush=True)

    at = Workspace(root(), given.out / CPU.name, progress=progress)
    for table in given.tables:
        for dataset in [d for d in datasets(table) if wanted is None or d in wanted]:
            keep(table, dataset, list(TABLES[table](only(CPU, dataset), at)))
            print(f"{time.monotonic() - began:.0f} s: {table}, {dataset}: done", flush=True)


if __name__ == "__main__":
    main()
