"""The `qualms` command group, and how its errors and warnings are printed.

Each command is in a file of its own, `NAME_command.py`.
"""

import errno
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, TextIO

import typer

from qualms.cli.lazy_group import LazyGroup
from qualms.cli.signals import TERMINATED, at_sigterm, begin, is_terminated, stop
from qualms.cli.status import GOES_ON, NOTHING, echo, interruption
from qualms.errors import (
    ProbabilitiesWarning,
    QualmsError,
    SlowWarning,
    UnitsWarning,
    explain_failure,
    reason,
)
from qualms.version import __version__

# What is left of a command that is interrupted, in the sentence that reports it.
LEFTOVERS = {
    **dict.fromkeys(("bench", "report", "train", "reproduce"), GOES_ON),
    **dict.fromkeys(("score", "threshold", "demo"), NOTHING),
}
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
OUR_WARNINGS = (SlowWarning, ProbabilitiesWarning, UnitsWarning)
# Keywords of the library that are options of commands.
KEYWORDS = ("classes", "size", "threshold", "train", "weights")
KEYWORD = re.compile(rf"\b({'|'.join(KEYWORDS)})=(['\"]?)")


class Commands(LazyGroup):
    """The commands of `qualms`: for each, the module that holds it, and its line in --help."""

    table = {  # noqa: RUF012 (the base class says that it belongs to the class)
        "demo": (
            "qualms.cli.demo_command",
            "Train a network on digits, and report what it does not know.",
        ),
        "score": (
            "qualms.cli.score_command",
            "Score the uncertainty of images, or of the tokens of texts.",
        ),
        "threshold": (
            "qualms.cli.threshold_command",
            "Set a threshold: the highest score at which a prediction is accepted.",
        ),
        "serve": (
            "qualms.cli.serve_command",
            "Serve predictions, scores and decisions over HTTP.",
        ),
        "methods": (
            "qualms.cli.methods_command",
            "List the methods, with their requirements and costs.",
        ),
        "bench": ("qualms.cli.bench_command", "Evaluate methods on a network."),
        "report": (
            "qualms.cli.report_command",
            "Write an HTML report about a network, its data and the methods.",
        ),
        "train": ("qualms.cli.train_command", "Train a network by the paper's recipe."),
        "reproduce": ("qualms.cli.reproduce_command", "Reproduce a table of the paper."),
        "doctor": ("qualms.cli.doctor_command", "Check the installation and the datasets."),
    }

    def invoke(self, ctx: Any) -> Any:
        """Run a command; report Ctrl-C and SIGTERM here, before typer handles them.

        Args:
            ctx: Typer's context, which names the command.
        """
        try:
            with at_sigterm(stop):
                return super().invoke(ctx)
        except KeyboardInterrupt:
            raise interruption(LEFTOVERS.get(ctx.invoked_subcommand)) from None


app = typer.Typer(
    cls=Commands, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="markdown"
)


def _print_version(wanted: bool) -> bool:
    """Print the version and exit, if --version is given: the callback of that option."""
    if wanted:
        typer.echo(__version__)
        raise typer.Exit
    return wanted


@app.callback()
def qualms(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Know what your pre-trained model does not know.

    Errors are one sentence; add `--debug` to any command for a traceback. Exit codes: 0 success, 1
    an error that you can fix, 2 an unknown command or option, 3 an unexpected error, 4 success
    except for inputs that could not be read, 130 interrupted by Ctrl-C, 143 terminated by SIGTERM.
    """


class UnexpectedError(QualmsError):
    """An error of any other class: a bug of the library or of the user's code; the exit code is 3."""


def run() -> None:
    """Run the command line, and exit.

    Errors are printed in one sentence; `--debug` anywhere on the command line adds the traceback.
    SIGTERM decides the exit code, whatever error it has caused on its way.
    """
    debug = "--debug" in sys.argv
    if debug:
        sys.argv.remove("--debug")
    begin()
    try:
        with short_warnings():
            _run_app(debug)
    except (SystemExit, KeyboardInterrupt) as end:
        if is_terminated() and getattr(end, "code", None) != 0:
            sys.exit(TERMINATED)
        raise


def _run_app(debug: bool) -> None:
    """Run the command, and exit with a sentence if it fails.

    Args:
        debug: Whether to raise the error instead.
    """
    try:
        with explain_failure(_explain):
            app()
    except QualmsError as error:
        # Code on the way here may have turned the signal into another error.
        if is_terminated():
            sys.exit(TERMINATED)
        if debug:
            raise
        echo(f"qualms: {use_option_names(str(error))}")
        sys.exit(3 if isinstance(error, UnexpectedError) else 1)


def _explain(error: Exception) -> QualmsError:
    """Return one sentence for an error that is not of this library.

    Args:
        error: The error that was raised while the command ran.
    """
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        return QualmsError(
            f"{error.filename or 'the output of the command'} cannot be written "
            f"({error.strerror}); free some space, and run the command again."
        )
    return UnexpectedError(
        f"an unexpected error occurred, {type(error).__name__}: {reason(error)}; pass --debug for "
        "a traceback."
    )


def use_option_names(text: str) -> str:
    """Replace keywords of the library, such as `classes=`, by options, such as `--classes`.

    Args:
        text: The message of an error of the library.
    """

    def replace(match: re.Match[str]) -> str:
        """Return the option for a keyword; a string keeps its quote."""
        keyword, quote = match.groups()
        return f"--{keyword} {quote}" if quote else f"--{keyword}"

    return KEYWORD.sub(replace, text)


@contextmanager
def short_warnings() -> Iterator[None]:
    """Print the warnings of qualms as one sentence each, once, without a line of code.

    Warnings of other libraries are shown as usual.
    """
    printed: set[str] = set()
    show_others = warnings.showwarning

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        """Print a warning: a replacement of `warnings.showwarning` with the same arguments.

        Args:
            message: The warning.
            category: The class of the warning.
            filename: The file that gave the warning.
            lineno: The number of the line in that file.
            file: The file to print the warning to.
            line: The source text of the line.
        """
        if not issubclass(category, OUR_WARNINGS):
            show_others(message, category, filename, lineno, file, line)
        elif str(message) not in printed:
            printed.add(str(message))
            echo(f"qualms: {message}")

    with warnings.catch_warnings():
        # "always", since Python would otherwise decide what was shown before; `printed` does here.
        for category in OUR_WARNINGS:
            warnings.simplefilter("always", category)
        warnings.showwarning = show
        yield
