"""Commands that are imported when they run, so that neither help nor a mistyped name waits for
torch.
"""

from difflib import get_close_matches
from importlib import import_module
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup

from qualms.cli.signals import at_sigterm, leave
from qualms.cli.status import status_line
from qualms.errors import QualmsError


class LazyGroup(TyperGroup):
    """Commands by a table. A module of the table holds the command, a function or a typer app,
    under its own name.
    """

    what: ClassVar[str] = "command"
    table: ClassVar[dict[str, tuple[str, str]]]  # name: module, and what the list of commands says

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = {name: LazyCommand(name, *entry) for name, entry in self.table.items()}

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that the first word names; if there is none, exit with the nearest name or a
        list of all.
        """
        name = args[0]
        if name not in self.commands and not name.startswith("-") and not ctx.resilient_parsing:
            near = get_close_matches(name, self.commands, n=1)
            advice = (
                f"did you mean {near[0]}?" if near else f"choose one of {', '.join(self.commands)}."
            )
            typer.echo(f"qualms: there is no {self.what} {name!r}; {advice}", err=True)
            raise typer.Exit(2)
        return super().resolve_command(ctx, args)


class LazyCommand(TyperCommand):
    """What the list of commands shows of a command, until somebody asks for the command itself."""

    def __init__(self, name: str, module: str, help: str) -> None:
        super().__init__(name, help=help)
        self.module = module

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **extra: Any) -> Any:
        """A context of the command itself."""
        return self.loaded().make_context(info_name, args, *rest, **extra)

    def loaded(self) -> Any:
        """The command itself."""
        status_line("starting …")  # torch takes seconds to import
        try:
            with at_sigterm(leave):
                found = getattr(import_module(self.module), str(self.name))
        except ModuleNotFoundError as missing:
            raise QualmsError(
                f"`qualms {self.name}` needs {missing.name}; pip install '.[app]' in a clone of qualms."
            ) from missing
        finally:
            status_line("")
        if isinstance(found, typer.Typer):
            return typer.main.get_command(found)
        alone = typer.Typer(
            add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown"
        )
        alone.command(self.name)(found)
        return typer.main.get_command(alone)
