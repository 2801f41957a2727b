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
from qualms.cli.signals import (
    TERMINATED,
    at_sigterm,
    forget_sigterm,
    is_terminated,
    terminate_command,
)
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

# By command, what its interruption leaves behind: a clause of the sentence that reports it.
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
            with at_sigterm(terminate_command):
                return super().invoke(ctx)
        # Ctrl-C, or the `Terminated` that `terminate_command` raises.
        except KeyboardInterrupt:
            raise interruption(LEFTOVERS.get(ctx.invoked_subcommand)) from None


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


def _print_version(is_requested: bool) -> bool:
    """Print the version and exit if --version is given: the typer callback of that option."""
    if is_requested:
        typer.echo(__version__)
        raise typer.Exit
    return is_requested


@app.callback()
def qualms(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the version and exit.",
        ),
    ] = False,
) -> None:
    """Know what your pre-trained model does not know.

    Errors are one sentence; add `--debug` to any command for a traceback. Exit codes: 0 success, 1
    an error that you can fix, 2 an unknown command or option, 3 an unexpected error, 4 success
    except for inputs that could not be read, 130 interrupted by Ctrl-C, 143 terminated by SIGTERM.
    """


class UnexpectedError(QualmsError):
    """A bug of the library or of the user's code, for which the exit code is 3."""


def run() -> None:
    """Run the command line, and exit.

    Errors are printed in one sentence; `--debug` anywhere on the command line adds the traceback.
    After SIGTERM, the exit code is `TERMINATED`, whichever exception the signal has led to.
    """
    show_traceback = "--debug" in sys.argv
    if show_traceback:
        sys.argv.remove("--debug")
    forget_sigterm()
    try:
        with short_warnings():
            _run_app(show_traceback)
    except (SystemExit, KeyboardInterrupt) as exit_exception:
        # A command that still succeeded after the signal keeps its exit code, 0.
        if is_terminated() and getattr(exit_exception, "code", None) != 0:
            sys.exit(TERMINATED)
        raise


def _run_app(show_traceback: bool) -> None:
    """Run the command, and exit with a sentence if it fails.

    Args:
        show_traceback: Whether to raise the error instead, so that Python prints the traceback.
    """
    try:
        with explain_failure(_explain_unexpected):
            app()
    except QualmsError as error:
        # The exception that the signal raised may have been turned into this error.
        if is_terminated():
            sys.exit(TERMINATED)
        if show_traceback:
            raise
        echo(f"qualms: {use_option_names(str(error))}")
        sys.exit(3 if isinstance(error, UnexpectedError) else 1)


def _explain_unexpected(error: Exception) -> QualmsError:
    """Convert an error that this library does not raise itself to a one-sentence error.

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

    def keyword_to_option(match: re.Match[str]) -> str:
        """Return `--classes` for `classes=`, and `--weights 'x` for `weights='x`."""
        keyword, quote = match.groups()
        return f"--{keyword} {quote}" if quote else f"--{keyword}"

    return KEYWORD.sub(keyword_to_option, text)


@contextmanager
def short_warnings() -> Iterator[None]:
    """Print the warnings of qualms as one sentence each, once, without a line of code.

    Warnings of other libraries are shown as usual.
    """
    printed: set[str] = set()
    default_showwarning = warnings.showwarning

    def print_once(
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
            default_showwarning(message, category, filename, lineno, file, line)
        elif str(message) not in printed:
            printed.add(str(message))
            echo(f"qualms: {message}")

    with warnings.catch_warnings():
        # "always" turns off Python's own record of shown warnings; `printed` replaces it.
        for category in OUR_WARNINGS:
            warnings.simplefilter("always", category)
        warnings.showwarning = print_once
        yield
