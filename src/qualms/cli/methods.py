"""`qualms methods`: what there is to choose from."""

import json

import typer

from qualms.cli.options import Json
from qualms.methods.registry import list_methods
from qualms.report.tables import markdown


def methods(json_lines: Json = False) -> None:
    """List every method: what it needs, what it costs in forward passes, and where it comes from.

    C is the number of classes, N of draws. A spec adds modifiers to gradient scores: regrad+layers(0.3)+smooth(0.02,8).
    """
    found = [{"name": m.name, "needs": list(m.needs), "cost": m.cost, "paper": m.paper} for m in list_methods()]
    if json_lines:
        for row in found:
            typer.echo(json.dumps(row))
        return
    lines = [[m.name, ", ".join(m.needs), m.cost, m.paper] for m in list_methods()]
    typer.echo(markdown(["method", "needs", "cost", "paper"], lines))
