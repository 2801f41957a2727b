"""`qualms methods`: what there is to choose from."""

import json
import textwrap
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

from qualms.cli.options import Json, Weights
from qualms.cli.price import duration
from qualms.errors import QualmsError, reason
from qualms.methods.method import MODELS, TRAINING_DATA
from qualms.methods.registry import DEFAULT, list_methods, parse
from qualms.models import load_model, preprocessing_of
from qualms.scorer import Scorer

WIDTH = 80  # of a terminal that nobody has widened


def methods(
    model: Annotated[
        str | None,
        typer.Option(
            help="A network, as for `score`: what each method costs with it on this machine, as counted."
        ),
    ] = None,
    weights: Weights = None,
    json_lines: Json = False,
) -> None:
    """List every method: what it needs, what it costs in forward passes, and where it comes from.

    C is the number of classes, N of draws. A spec adds modifiers to gradient scores:
    regrad+layers(0.3)+smooth(0.02,8). With --model: forward passes and seconds an image, each
    method by itself, one image at a time.
    """
    if model is not None:
        _prices(model, weights, json_lines)
        return
    found = [
        {"name": m.name, "needs": list(m.needs), "cost": m.cost, "paper": m.paper}
        for m in list_methods()
    ]
    if json_lines:
        for row in found:
            typer.echo(json.dumps(row))
        return
    names = max(len(method.name) for method in list_methods()) + 2
    for method in list_methods():
        facts = f"needs {', '.join(method.needs)}; costs {method.cost}"
        for text, indent in ((facts, method.name.ljust(names)), (method.paper, " " * names)):
            typer.echo(
                textwrap.fill(
                    text,
                    WIDTH,
                    initial_indent=indent,
                    subsequent_indent=" " * names,
                    break_on_hyphens=False,
                )
            )


def _prices(model: str, weights: Path | None, json_lines: bool) -> None:
    """A line for each method: its price for one image of the network's size."""
    network = load_model(model, weights)
    fit = preprocessing_of(model, network).fit
    if fit is None:
        raise QualmsError(
            f"the image size of {model} is not known, so nothing can be counted; name another network."
        )
    x = torch.zeros(1, fit.channels or 3, *fit.size)
    specs = [DEFAULT, "regrad+layers", *(m.name for m in list_methods())]
    for spec in specs:
        row = _price(spec, network, x)
        if json_lines:
            typer.echo(json.dumps(row))
        elif "why" in row:
            typer.echo(f"{spec:<24} {row['why']}")
        else:
            typer.echo(
                f"{spec:<24} {row['forward_passes']:>8,.1f} passes  {duration(row['seconds']):>8} an image"
            )


def _price(spec: str, network: nn.Module, x: torch.Tensor) -> dict[str, Any]:
    method = parse(spec)
    needs = [need for need in (TRAINING_DATA, MODELS) if need in method.needs]
    if needs:
        return {"method": spec, "why": f"needs {needs[0]}; {method.cost}"}
    try:
        price = Scorer(network, {spec: method}).price(x)
    except QualmsError as error:
        return {"method": spec, "why": reason(error)}
    return {
        "method": spec,
        "forward_passes": price.forward_passes,
        "seconds": price.seconds,
        "known": price.known,
    }
