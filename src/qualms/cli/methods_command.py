"""`qualms methods`: the methods, with their needs and costs."""

import json
import textwrap
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

from qualms.cli.options import Json, Weights
from qualms.cli.price_estimate import format_duration
from qualms.errors import QualmsError, reason
from qualms.methods.method import MODELS, TRAINING_DATA
from qualms.methods.registry import DEFAULT, list_methods, parse
from qualms.models import load_model, preprocessing_of
from qualms.scorer import Scorer

WIDTH = 80  # characters in a line of a terminal of the usual size


def methods(
    model: Annotated[
        str | None,
        typer.Option(
            help="A network, as for `qualms score`, to estimate what each method costs on this "
            "machine."
        ),
    ] = None,
    weights: Weights = None,
    json_lines: Json = False,
) -> None:
    """List the methods: what each needs, its cost in forward passes, and its paper.

    C is the number of classes, N the number of draws. Gradient scores take modifiers, as in
    `regrad+layers(0.3)+smooth(0.02,8)`. With --model, list the forward passes and the seconds that
    each method takes per image. Example:

        qualms methods --model timm:resnet18

    \f

    Args:
        model: A network to estimate costs for.
        weights: The checkpoint of the network.
        json_lines: Whether to print JSON lines in place of a table.
    """
    if model is not None:
        _list_prices(model, weights, json_lines)
    elif json_lines:
        for method in list_methods():
            row = {
                "name": method.name,
                "needs": list(method.needs),
                "cost": method.cost,
                "paper": method.paper,
            }
            typer.echo(json.dumps(row))
    else:
        _list_methods()


def _list_methods() -> None:
    """Print the methods in two columns: the name; and needs, cost and paper, wrapped to lines."""
    name_width = max(len(method.name) for method in list_methods()) + 2
    indent = " " * name_width
    for method in list_methods():
        facts = f"needs {', '.join(method.needs)}; costs {method.cost}"
        _print_paragraph(facts, method.name.ljust(name_width), indent)
        _print_paragraph(method.paper, indent, indent)


def _print_paragraph(text: str, first_indent: str, indent: str) -> None:
    """Print text that is wrapped to the width of a terminal.

    Args:
        text: The text, of any length.
        first_indent: The beginning of the first line.
        indent: The beginning of all further lines.
    """
    wrapped = textwrap.fill(
        text,
        WIDTH,
        initial_indent=first_indent,
        subsequent_indent=indent,
        break_on_hyphens=False,
    )
    typer.echo(wrapped)


def _list_prices(model: str, weights: Path | None, json_lines: bool) -> None:
    """Print what REGrad* and all methods with default settings cost for one image.

    Args:
        model: The network, as --model names it.
        weights: The network's checkpoint.
        json_lines: Whether to print JSON lines.
    """
    network = load_model(model, weights)
    transform = preprocessing_of(model, network).transform
    if transform is None:
        raise QualmsError(
            f"the image size of {model} is unknown, so costs cannot be estimated; "
            "choose another network."
        )
    # The price does not depend on the pixels.
    one_input = torch.zeros(1, transform.channels or 3, *transform.size)
    names = [method.name for method in list_methods()]
    for spec in (DEFAULT, "regrad+layers", *names):
        row = _estimate_price(spec, network, one_input)
        if json_lines:
            typer.echo(json.dumps(row))
        elif "why" in row:
            typer.echo(f"{spec:<24} {row['why']}")
        else:
            passes = f"{row['forward_passes']:>8,.1f} passes"
            typer.echo(f"{spec:<24} {passes}  {format_duration(row['seconds']):>8} per image")


def _estimate_price(spec: str, network: nn.Module, x: torch.Tensor) -> dict[str, Any]:
    """Return the row of a method: its price per image, or the reason why there is none.

    Args:
        spec: The spec of the method.
        network: The network that is scored.
        x: One input of the network, [1, c, h, w].

    Returns:
        A dict with the spec as `method`; and with `forward_passes`, `seconds` and `known`, as in
        `Price`, or with the reason as `why`.
    """
    method = parse(spec)
    for need in (TRAINING_DATA, MODELS):
        if need in method.needs:
            return {"method": spec, "why": f"needs {need}; {method.cost}"}
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
