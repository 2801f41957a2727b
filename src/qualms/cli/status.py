"""What a command prints on stderr while it runs, and how it exits.

Results go to stdout, everything else to stderr. This module does not import torch, since commands
print before torch is loaded.
"""

import sys

import typer

GOES_ON = "run the same command again to resume"
NOTHING = "nothing was kept, and no file was written"
INTERRUPTED = 130  # the exit code of Ctrl-C
# The exit code of a run that is complete except for inputs that cannot be read.
SOME_REJECTED = 4


def interruption(remains: str | None) -> typer.Exit:
    """Print that the command was stopped; return the exception that exits with `INTERRUPTED`.

    Args:
        remains: A clause that says what the command leaves behind, such as `GOES_ON`; None to say
            nothing.
    """
    clause = f"; {remains}" if remains else ""
    echo(f"qualms: stopped{clause}.")
    return typer.Exit(INTERRUPTED)


def exit_if_incomplete(num_rejected: int) -> None:
    """Exit with `SOME_REJECTED` if some inputs could not be read.

    Args:
        num_rejected: The number of inputs that could not be read.
    """
    # Clears the line.
    status_line("")
    if num_rejected:
        raise typer.Exit(SOME_REJECTED)


def status_line(text: str) -> None:
    """Print a line on stderr that the next line replaces; print nothing if stderr is no terminal.

    Args:
        text: What to print, such as `loading timm:resnet18 …`; empty to clear the line.
    """
    if sys.stderr.isatty():
        # Back to the start of the line, and clear it.
        sys.stderr.write(f"\r\x1b[2K{text}")
        sys.stderr.flush()


def echo(text: str) -> None:
    """Clear the status line, and print a line on stderr that stays."""
    status_line("")
    typer.echo(text, err=True)


def count_of(count: int, noun: str) -> str:
    """Format a count with its noun, such as `1 image` or `6 images`.

    Args:
        count: A number, at least 0.
        noun: A noun in the singular.
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
