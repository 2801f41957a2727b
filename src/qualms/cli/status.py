"""What a command says on the way, on stderr: a passing line on a terminal, and lines that stay.
Needs no torch.
"""

import sys

import typer

GOES_ON = "run the same command again to resume"
NOTHING = "nothing was kept, and no file was written"


def stopped(left: str | None) -> typer.Exit:
    """Say that Ctrl-C came, and what is left of the command; the exit to raise."""
    echo(f"qualms: stopped{f'; {left}' if left else ''}.")
    return typer.Exit(130)


def status_line(text: str) -> None:
    """A line that the next one takes the place of, on a terminal; an empty one only clears it."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[2K{text}")
        sys.stderr.flush()


def echo(text: str) -> None:
    """A line that stays."""
    status_line("")
    typer.echo(text, err=True)
