"""`qualms`: the commands, and how errors are told."""

import errno
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, TextIO

import typer

from qualms.cli.lazy import LazyGroup
from qualms.cli.signals import TERMINATED, at_sigterm, begin, is_terminated, stop
from qualms.cli.status import GOES_ON, NOTHING, echo, stopped
from qualms.cli.wording import in_options
from qualms.errors import ProbabilitiesWarning, QualmsError, SlowWarning, UnitsWarning, reason
from qualms.version import __version__

STOPPED = {  # what is left of a command that is stopped
    **dict.fromkeys(("bench", "report", "train", "reproduce"), GOES_ON),
    **dict.fromkeys(("score", "threshold", "demo"), NOTHING),
}
FULL = (errno.ENOSPC, errno.EDQUOT)  # a disk, or somebody's share of it
OURS = (SlowWarning, ProbabilitiesWarning, UnitsWarning)


class Commands(LazyGroup):
    """What there is to do, and where it is told how."""

    table = {  # noqa: RUF012 (the base class says that it belongs to the class)
        "demo": (
            "qualms.cli.demo",
            "Train a network on digits, and write a page about what it does not know.",
        ),
        "score": (
            "qualms.cli.score",
            "Score images, or the tokens of texts: a table with the uncertainty of each.",
        ),
        "threshold": (
            "qualms.cli.threshold",
            "Set the score up to which a network is trusted, or show it.",
        ),
        "serve": (
            "qualms.cli.serve",
            "Serve a network over HTTP: predictions, scores, and whether to trust them.",
        ),
        "methods": (
            "qualms.cli.methods",
            "List every method: its needs, its cost, and where it comes from.",
        ),
        "bench": ("qualms.cli.bench", "Judge methods on a network: five tasks."),
        "report": ("qualms.cli.report", "Write a page about a network, its data and the methods."),
        "train": ("qualms.cli.train", "Train a network by the paper's recipe."),
        "reproduce": ("qualms.cli.reproduce", "Reproduce a table of the paper."),
        "doctor": (
            "qualms.cli.doctor",
            "Say what is installed, which datasets are there, and what would fail.",
        ),
    }

    def invoke(self, ctx: Any) -> Any:
        """Run a command. Ctrl-C is told here: one step further out, typer takes it for its own."""
        try:
            with at_sigterm(stop):
                return super().invoke(ctx)
        except KeyboardInterrupt:
            raise stopped(STOPPED.get(ctx.invoked_subcommand)) from None


app = typer.Typer(
    cls=Commands, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="markdown"
)


def _version(wanted: bool) -> bool:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit
    return wanted


@app.callback()
def qualms(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Know what your pre-trained model does not know.

    Errors are one sentence; `--debug` before or after a command shows where they come from. Exit
    codes: 0 done, 1 an error that you can put right, 2 a command or option that does not exist, 3 a
    defect of qualms, 4 done but for inputs that could not be read, 130 stopped by Ctrl-C, 143 by
    SIGTERM.
    """


@contextmanager
def warnings_in_words() -> Iterator[None]:
    """Our own warnings as a sentence each, once, without the line of code that gives them."""
    said: set[str] = set()
    others = warnings.showwarning

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if not issubclass(category, OURS):
            others(message, category, filename, lineno, file, line)
        elif str(message) not in said:
            said.add(str(message))
            echo(f"qualms: {message}")

    with warnings.catch_warnings():
        for kind in OURS:
            warnings.simplefilter("always", kind)
        warnings.showwarning = show
        yield


def run() -> None:
    """Run a command, and tell what goes wrong in one sentence; `--debug` shows where. The help
    lists the exit codes.
    """
    debug = "--debug" in sys.argv
    if debug:
        sys.argv.remove("--debug")
    begin()
    try:
        with warnings_in_words():
            app()
    except BaseException as error:
        if (
            is_terminated() and getattr(error, "code", None) != 0
        ):  # whatever has become of it on its way here
            sys.exit(TERMINATED)
        if debug or not isinstance(error, Exception):
            raise
        if isinstance(error, OSError) and error.errno in FULL:
            error = QualmsError(
                f"{error.filename or 'what the command prints'} cannot be written ({error.strerror}); put that right, "
                "and run it again."
            )
        known = isinstance(error, QualmsError)
        unknown = (
            f"something went wrong, {type(error).__name__}: {reason(error)}; --debug shows where."
        )
        echo(f"qualms: {in_options(str(error)) if known else unknown}")
        sys.exit(1 if known else 3)
