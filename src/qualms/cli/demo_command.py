"""`qualms demo`: a tour of the library in a minute, without any files."""

import json
import webbrowser
from pathlib import Path

import typer

from qualms.cli.options import Json, OpenPage, Page, Seed
from qualms.cli.progress_bar import show_progress
from qualms.demo import evaluate, prepare
from qualms.disk import require_writable
from qualms.report.page import write_page
from qualms.report.tables import glance_table, list_left_out

RESAMPLES = 200  # for the intervals: enough for a picture, in seconds


def demo(
    out: Page = Path("demo/report.html"),
    open_page: OpenPage = False,
    seed: Seed = 0,
    json_lines: Json = False,
) -> None:
    """Train the paper's CNN on the digits 0 to 6, score known and unknown images with every method,
    and write a report page.

    The unknown images are the digits 7 to 9, letters, and patches of photographs, all of them
    bundled. Example:

        qualms demo --open

    \f

    Args:
        out: The page.
        open_page: Whether to open it in a browser.
        seed: The seed of all random draws.
        json_lines: Whether to print JSON in place of a table.
    """
    require_writable(out)
    with show_progress() as progress:
        scene = prepare(seed, progress)
        content, left_out = evaluate(scene, seed, progress)
    page = write_page(content, out, resamples=RESAMPLES)
    if json_lines:
        facts = {"page": str(page), **content.about, "methods": content.methods}
        typer.echo(json.dumps(facts))
    else:
        for name, value in content.about.items():
            typer.echo(f"{name}: {value}")
        typer.echo(f"\n{glance_table(content, RESAMPLES)}")
        typer.echo(f"\n{list_left_out(left_out)}")
        typer.echo(f"\nThe page: {page.resolve()}")
    if open_page:
        webbrowser.open(page.resolve().as_uri())
