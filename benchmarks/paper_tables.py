"""The paper's tables beside ours, on the real datasets: runs every `qualms reproduce` and fills docs/results.md.

    QUALMS_DATA=folder python benchmarks/paper_tables.py [--preset cpu] [--out runs] [--tables table1,table2]

What is on disk in `runs` is not computed again, so a killed run goes on, and a complete one only writes the page. The
measured rows, without the scores of single images, go to `results/tables-PRESET.jsonl`.
"""

import argparse
import json
import os
from pathlib import Path

from pages import fill

from qualms.report.tables import active_table, calibration_table, left_out, networks, ood_table
from qualms.tasks.presets import PRESETS
from qualms.tasks.reproduce import TABLES, Workspace
from qualms.tasks.rows import Row

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "results.md"
TITLES = {
    "table1": "Out-of-distribution detection (table 1)",
    "table2": "Calibration (table 2)",
    "table3": "Active learning (table 3)",
    "table4": "The parts of REGrad\\* (table 4)",
    "table5": "λ and σ (table 5)",
    "vit": "A vision transformer",
}


def section(table: str, rows: list[Row]) -> str:
    """A table of the page, what its networks are and what is left out."""
    kind = {"table2": calibration_table, "table3": active_table}.get(table)
    numbers = kind(rows) if kind else ood_table(rows, "vit" if table == "vit" else "table1")
    parts = (f"## {TITLES[table]}", f"`qualms reproduce {table}`", numbers, networks(rows), left_out(rows))
    return "\n\n".join(part for part in parts if part)


def main() -> None:
    """Run what is not there yet, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=list(PRESETS), default="cpu")
    parser.add_argument("--out", type=Path, default=Path("runs"))
    parser.add_argument("--tables", default=",".join(TABLES), help="which ones the page gets")
    chosen = parser.parse_args()
    if "QUALMS_DATA" not in os.environ:
        raise SystemExit("QUALMS_DATA is not set: name the folder with the datasets and checkpoints in it.")
    preset, root = PRESETS[chosen.preset], Path(os.environ["QUALMS_DATA"])
    workspace = Workspace(root, chosen.out / chosen.preset)
    found = {table: list(TABLES[table](preset, workspace)) for table in chosen.tables.split(",")}
    lines = [json.dumps({"table": table, **row}) for table, rows in found.items() for row in rows]
    (HERE / "results" / f"tables-{preset.name}.jsonl").write_text("\n".join(lines).replace(str(root), "data") + "\n")
    cuts = f"Preset `{preset.name}`, seeds {', '.join(map(str, preset.seeds))}. What it cuts: {preset.cuts}."
    missing = [f"`{table}`" for table in TABLES if table not in found]
    not_run = f"Not run for this page: {', '.join(missing)}." if missing else ""
    parts = [part for part in (cuts, not_run, *(section(table, rows) for table, rows in found.items())) if part]
    fill(PAGE, {"tables": "\n\n".join(parts).replace(str(root), "data")})


if __name__ == "__main__":
    main()
