"""What a command says on the way, on stderr: a passing line on a terminal, and lines that stay. Needs no torch."""

import sys

import typer


def passing(text: str) -> None:
    """A line that the next one takes the place of, on a terminal; an empty one only clears it."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[2K{text}")
        sys.stderr.flush()


def say(text: str) -> None:
    """A line that stays."""
    passing("")
    typer.echo(text, err=True)
