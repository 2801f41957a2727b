"""The price of a command, printed before it begins: how long it will take, and what is cheaper.

    13 images, about 6 s (28 forward passes each)

If that is longer than ten minutes, further lines list what takes at most half as long:

    50000 images, about 3.5 h (28 forward passes each)
      cheaper: without +smooth: about 16 min (2 forward passes each, 14 times less)
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from qualms.cli.status import count_of, echo
from qualms.data import Images
from qualms.gradients.settings import Engine, Sketch
from qualms.methods.gradient_score import GradientScore
from qualms.methods.method import Method
from qualms.methods.pricing import Price
from qualms.scorer import Scorer
from qualms.stream.network import Network
from qualms.tasks.score_rows import Methods

LONG_SECONDS = 600.0  # for a command that takes longer, cheaper ways are listed


@dataclass(frozen=True)
class CheaperWay:
    """Methods and settings that may cost less, and the options that select them.

    Args:
        label: The options, as a user writes them.
        methods: The methods, by spec or by name.
        settings: Keyword arguments of `Scorer`.
    """

    label: str
    methods: dict[str, Method] | str
    settings: dict[str, Any] = field(default_factory=dict)


def echo_price(scorer: Scorer, one_input: Tensor, num_images: int | None) -> None:
    """Print how long it takes to score some images and, if that is long, what is cheaper.

    Args:
        scorer: The scorer of the images.
        one_input: One image as the network's input, [1, c, h, w].
        num_images: The number of images to score; None if it is not known.
    """
    price = scorer.price(one_input)
    if num_images is None:
        echo(f"about {describe_price(price)}")
        return
    seconds = num_images * price.seconds
    time = format_duration(seconds)
    echo(f"{count_of(num_images, 'image')}, about {time} ({_format_passes(price)} each)")
    if seconds <= LONG_SECONDS:
        return
    for label, cheaper_price in _cheaper_prices(scorer, one_input, price):
        time = format_duration(num_images * cheaper_price.seconds)
        passes = _format_passes(cheaper_price)
        times_less = _format_number(price.forward_passes / cheaper_price.forward_passes)
        echo(f"  cheaper: {label}: about {time} ({passes} each, {times_less} times less)")


def echo_price_of_groups(
    network: Network,
    groups: Sequence[Images],
    methods: Methods,
    engine: Engine | Sketch,
    tolerance: float | None,
) -> None:
    """Print how long it takes to score several groups of images by the same methods.

    Args:
        network: The network whose uncertainty is scored.
        groups: The groups of images; scores that an earlier run has saved take no time.
        methods: The methods by name, with noise for pixels in [0, 1].
        engine: The engine of the gradient scores.
        tolerance: The tolerance of the engine, as for `Scorer`.
    """
    scaled_methods = {name: network.scale_noise(method) for name, method in methods.items()}
    scorer = Scorer(
        network.model,
        scaled_methods,
        models=network.members,
        engine=engine,
        tolerance=tolerance,
    )
    total = sum(len(images) for images in groups)
    # The price does not depend on which image it is estimated with.
    one_input = network.inputs(groups[0].take(slice(1)))
    echo_price(scorer, one_input, total)


def describe_price(price: Price) -> str:
    """Format a price, such as `0.5 s per image (30 forward passes)`.

    Args:
        price: The price of one image.
    """
    return f"{format_duration(price.seconds)} per image ({_format_passes(price)})"


def format_duration(seconds: float) -> str:
    """Format a duration as `40 ms`, `0.8 s`, `6 s`, `12 min` or `3.5 h`.

    Args:
        seconds: A duration above 0, in seconds.
    """
    if seconds < 0.1:
        return f"{max(1, round(seconds * 1000))} ms"
    if seconds < 2:
        return f"{seconds:.1f} s"
    if seconds < 100:
        return f"{round(seconds)} s"
    if seconds < 6000:
        return f"{round(seconds / 60)} min"
    return f"{seconds / 3600:.1f} h"


def _cheaper_prices(scorer: Scorer, one_input: Tensor, price: Price) -> Iterator[tuple[str, Price]]:
    """Yield the ways to score that cost at most half of a price, each with its own price.

    Args:
        scorer: The scorer that is to be made cheaper.
        one_input: One input of the network, [1, c, h, w].
        price: The price of the scorer.
    """
    for way in _cheaper_ways(scorer):
        # With pixel_std=1.0, noise is in the units of the inputs, as that of these methods is.
        cheaper_scorer = Scorer(scorer.model, way.methods, pixel_std=1.0, **way.settings)
        cheaper_price = cheaper_scorer.price(one_input)
        if 2 * cheaper_price.forward_passes <= price.forward_passes:
            yield way.label, cheaper_price


def _cheaper_ways(scorer: Scorer) -> Iterator[CheaperWay]:
    """Yield ways to score that may be cheaper than a scorer; prices are not compared here.

    Args:
        scorer: The scorer that is to be made cheaper.
    """
    methods = scorer.methods
    settings = scorer.settings
    if settings.engine_name in ("exact", "reference") and not settings.tolerance:
        yield CheaperWay("without --engine", methods)
    without_smoothing = {name: _without_smoothing(method) for name, method in methods.items()}
    if without_smoothing != methods:
        same_engine = {"engine": settings.engine, "tolerance": settings.tolerance}
        yield CheaperWay("without +smooth", without_smoothing, same_engine)
    label = "--methods regrad+layers --tolerance 0.1"
    yield CheaperWay(label, "regrad+layers", {"tolerance": 0.1})
    yield CheaperWay("--methods entropy", "entropy")


def _without_smoothing(method: Method) -> Method:
    """Return a gradient score without `+smooth`, any other method unchanged.

    Args:
        method: Any method.
    """
    if not isinstance(method, GradientScore) or method.smooth is None:
        return method
    return replace(method, smooth=None)


def _format_passes(price: Price) -> str:
    """Format the forward passes of a price, such as `1 forward pass` or `28 forward passes`."""
    noun = "forward pass" if price.forward_passes == 1 else "forward passes"
    return f"{_format_number(price.forward_passes)} {noun}"


def _format_number(value: float) -> str:
    """Format a number as `1.5`, `3` or `1,200`."""
    if value < 10:
        return f"{value:.1f}".rstrip("0").rstrip(".")
    return f"{value:,.0f}"
