"""`qualms demo`: what the library does, in a minute, without a file."""

import json
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from qualms.cli.options import Json, Seed
from qualms.cli.progress_bar import show_progress
from qualms.demo import evaluate, prepare
from qualms.disk import require_writable
from qualms.report.page import write_page
from qualms.report.tables import glance_table, left_out

RESAMPLES = 200  # for the intervals: enough for a picture, in seconds


def demo(
    out: Annotated[Path, typer.Option(help="The page.")] = Path("demo/report.html"),
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    seed: Seed = 0,
    json_lines: Json = False,
) -> None:
    """Train the paper's CNN on the digits 0 to 6, ask every method what it does not know, and write
    a page about it.

    Unknown to it are the digits 7 to 9, letters, and patches of photographs. All images are
    bundled. Example:

        qualms demo --open
    """
    require_writable(out)
    with show_progress() as progress:
        content, reasons = evaluate(prepare(seed, progress), seed, progress)
    page = write_page(content, out, resamples=RESAMPLES)
    if json_lines:
        typer.echo(json.dumps({"page": str(page), **content.about, "methods": content.methods}))
    else:
        typer.echo("\n".join(f"{name}: {value}" for name, value in content.about.items()))
        typer.echo(
            f"\n{glance_table(content, RESAMPLES)}\n\n{left_out(reasons)}\n\nThe page: {page.resolve()}"
        )
    if open_page:
        webbrowser.open(page.resolve().as_uri())
