"""`qualms`: the commands, and how errors are told."""

import sys
from typing import Annotated, Any

import typer

from qualms.cli.lazy import LazyGroup
from qualms.errors import QualmsError, reason
from qualms.version import __version__

RESUMED = ("bench", "report", "train", "reproduce")  # what these had done is on disk


class Commands(LazyGroup):
    """What there is to do, and where it is told how."""

    table = {  # noqa: RUF012 (the base class says that it belongs to the class)
        "demo": ("qualms.cli.demo", "Train a network on digits, and write a page about what it does not know."),
        "score": ("qualms.cli.score", "Score images: a table with the uncertainty of each."),
        "methods": ("qualms.cli.methods", "List every method: its needs, its cost, and where it comes from."),
        "bench": ("qualms.cli.bench", "Judge methods on a network: five tasks."),
        "report": ("qualms.cli.report", "Write a page about a network, its data and the methods."),
        "train": ("qualms.cli.train", "Train a network by the paper's recipe."),
        "reproduce": ("qualms.cli.reproduce", "Make a table of the paper again."),
        "doctor": ("qualms.cli.doctor", "Say what is installed, which datasets are there, and what would fail."),
    }

    def invoke(self, ctx: Any) -> Any:
        """Run a command. Ctrl-C is told here: one step further out, typer takes it for its own."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            goes_on = ctx.invoked_subcommand in RESUMED
            typer.echo(f"qualms: stopped{'; the same command goes on from here' if goes_on else ''}.", err=True)
            raise typer.Exit(130) from None


app = typer.Typer(cls=Commands, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="markdown")


def _version(wanted: bool) -> bool:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit
    return wanted


@app.callback()
def qualms(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Say which.")] = False,
) -> None:
    """Know what your pre-trained model does not know.

    Errors are one sentence; `--debug` before or after a command shows where they come from.
    """


def run() -> None:
    """Run a command, and tell what goes wrong in one sentence; `--debug` shows where.

    Exit codes: 0 done, 1 something that the user can put right, 2 a command or option that does not exist, 3 a defect
    of qualms, 130 stopped.
    """
    debug = "--debug" in sys.argv
    if debug:
        sys.argv.remove("--debug")
    try:
        app()
    except Exception as error:
        if debug:
            raise
        known = isinstance(error, QualmsError)
        unknown = f"something went wrong, {type(error).__name__}: {reason(error)}; --debug shows where."
        typer.echo(f"qualms: {error if known else unknown}", err=True)
        sys.exit(1 if known else 3)
