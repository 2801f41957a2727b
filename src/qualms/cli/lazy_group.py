"""Command groups that import a command when it runs.

Importing torch takes seconds, and neither `--help` nor a mistyped name should wait for it. So a
group has a table with the module and the help line of each command: `Commands.table`
(`commands.py`) and `Tasks.table` (`bench_command.py`).
"""

from difflib import get_close_matches
from importlib import import_module
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup

from qualms.cli.signals import at_sigterm, exit_at_once
from qualms.cli.status import status_line
from qualms.errors import QualmsError


class LazyGroup(TyperGroup):
    """A group of commands, listed in a table, each of which is imported when it runs.

    Attributes:
        noun: What error messages call a command of the group.
        table: For each command its module, which holds the command under the same name (a function
            or a typer app), and its line in the list of commands.
    """

    noun: ClassVar[str] = "command"
    table: ClassVar[dict[str, tuple[str, str]]]

    def __init__(self, **settings: Any) -> None:
        """Create an entry for each command of the table; no command is imported yet.

        Args:
            settings: Keyword arguments of `TyperGroup`.
        """
        super().__init__(**settings)
        self.commands = {}
        for name, (module, help) in self.table.items():
            self.commands[name] = LazyCommand(name, module, help)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that the first word names.

        Args:
            ctx: Typer's context.
            args: The words of the command line; the first one names the command.

        Returns:
            What typer returns: the command's name, the command, and the words after the name.

        Raises:
            typer.Exit: If there is no such command, after printing the closest name or all names.
        """
        name = args[0]
        is_option = name.startswith("-")
        # Typer reports unknown options itself, and asks for completions (resilient parsing).
        if name in self.commands or is_option or ctx.resilient_parsing:
            return super().resolve_command(ctx, args)
        matches = get_close_matches(name, self.commands, n=1)
        advice = f"choose one of {', '.join(self.commands)}."
        if matches:
            advice = f"did you mean {matches[0]}?"
        typer.echo(f"qualms: there is no {self.noun} {name!r}; {advice}", err=True)
        raise typer.Exit(2)


class LazyCommand(TyperCommand):
    """A command in the list of commands, whose module is imported when the command is run.

    Args:
        name: The name of the command.
        module: The module to import it from.
        help: The line of the command in the list of commands.
    """

    def __init__(self, name: str, module: str, help: str) -> None:
        """Set up the entry; the module is not imported yet."""
        super().__init__(name, help=help)
        self.module = module

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **extra: Any) -> Any:
        """Import the command, and let it parse its options; return the context that runs it.

        Args:
            info_name: The name that the user typed.
            args: The words after the name.
            rest: Further positional arguments for typer.
            extra: Keyword arguments for typer.
        """
        return self.load().make_context(info_name, args, *rest, **extra)

    def load(self) -> Any:
        """Import the command, a function or a typer app, and convert it for typer to run.

        Returns:
            A command of typer's, or a group of commands for a typer app.

        Raises:
            QualmsError: If the command needs a package that is not installed.
        """
        status_line("starting …")
        try:
            with at_sigterm(exit_at_once):
                command = getattr(import_module(self.module), str(self.name))
        except ModuleNotFoundError as missing:
            raise QualmsError(
                f"`qualms {self.name}` needs {missing.name}; "
                "run pip install '.[app]' in a clone of qualms."
            ) from missing
        finally:
            # Clears the line.
            status_line("")
        if isinstance(command, typer.Typer):
            return typer.main.get_command(command)
        # The command is a function, which typer can only convert as part of an app.
        app = typer.Typer(
            add_completion=False,
            pretty_exceptions_enable=False,
            rich_markup_mode="markdown",
        )
        app.command(self.name)(command)
        return typer.main.get_command(app)
