"""What a command prints on stderr while it runs. It does not import torch."""

import sys

import typer

GOES_ON = "run the same command again to resume"
NOTHING = "nothing was kept, and no file was written"


def interruption(left: str | None) -> typer.Exit:
    """Report that Ctrl-C was pressed, and what is left of the command; return the exit to raise."""
    echo(f"qualms: stopped{f'; {left}' if left else ''}.")
    return typer.Exit(130)


def status_line(text: str) -> None:
    """Print a line that the next one replaces, on a terminal only; an empty one clears it."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[2K{text}")
        sys.stderr.flush()


def echo(text: str) -> None:
    """Print a line that stays, in place of the status line."""
    status_line("")
    typer.echo(text, err=True)
