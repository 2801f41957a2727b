"""`qualms methods`: what there is to choose from."""

import json
import textwrap

import typer

from qualms.cli.options import Json
from qualms.methods.registry import list_methods

WIDTH = 80  # of a terminal that nobody has widened


def methods(json_lines: Json = False) -> None:
    """List every method: what it needs, what it costs in forward passes, and where it comes from.

    C is the number of classes, N of draws. A spec adds modifiers to gradient scores: regrad+layers(0.3)+smooth(0.02,8).
    """
    found = [{"name": m.name, "needs": list(m.needs), "cost": m.cost, "paper": m.paper} for m in list_methods()]
    if json_lines:
        for row in found:
            typer.echo(json.dumps(row))
        return
    names = max(len(method.name) for method in list_methods()) + 2
    for method in list_methods():
        facts = f"needs {', '.join(method.needs)}; costs {method.cost}"
        for text, indent in ((facts, method.name.ljust(names)), (method.paper, " " * names)):
            typer.echo(
                textwrap.fill(text, WIDTH, initial_indent=indent, subsequent_indent=" " * names, break_on_hyphens=False)
            )
