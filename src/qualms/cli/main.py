"""`qualms`: the commands, and how errors are told."""

import sys
from typing import Annotated

import typer

from qualms.cli.bench import bench
from qualms.cli.demo import demo
from qualms.cli.doctor import doctor
from qualms.cli.methods import methods
from qualms.cli.report import report
from qualms.cli.reproduce import reproduce
from qualms.cli.score import score
from qualms.cli.train import train
from qualms.errors import QualmsError, reason
from qualms.version import __version__

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="markdown")
for command in (demo, score, methods, bench, report, train, reproduce, doctor):
    app.command()(command)


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

    Exit codes: 0 done, 1 something that the user can put right, 2 an option that does not exist, 3 a defect of qualms,
    130 stopped.
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
    except KeyboardInterrupt:
        typer.echo("qualms: stopped; the same command goes on from here.", err=True)
        sys.exit(130)
