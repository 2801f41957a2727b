"""The price first: what a command will take, said before it begins, and what would be cheaper."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from qualms.cli.status import echo
from qualms.data import Images
from qualms.gradients.settings import Engine, Sketch
from qualms.gradients.smoothing import Smoothing
from qualms.methods.gradient_score import GradientScore
from qualms.methods.method import Method
from qualms.methods.price import Price
from qualms.scorer import Scorer
from qualms.stream.network import Network
from qualms.tasks.scoring import Methods

LONG = 600.0  # seconds above which cheaper ways are named


def echo_price(scorer: Scorer, x: Any, images: int | None) -> None:
    """Say how long so many images will take, judged by one of them; above ten minutes, what is
    cheaper.

    Args:
        scorer: of the images.
        x: one of them, as the network takes it.
        images: how many are to be scored; None if nobody knows.
    """
    price = scorer.price(x)
    if images is None:
        echo(f"about {describe_price(price)}")
        return
    what = f"{images} image{'' if images == 1 else 's'}"
    echo(f"{what}, about {duration(images * price.seconds)} ({_passes(price)} each)")
    if images * price.seconds > LONG:
        for way, other in _cheaper(scorer, x, price):
            times = f"{_number(price.forward_passes / other.forward_passes)} times less"
            echo(
                f"  cheaper: {way}: about {duration(images * other.seconds)} ({_passes(other)} each, {times})"
            )


def echo_price_of_groups(
    network: Network,
    groups: Sequence[Images],
    methods: Methods,
    engine: Engine | Sketch,
    tolerance: float | None,
) -> None:
    """The same for a task, which scores several groups of images by the same methods.

    Args:
        network: what scores them.
        groups: of images; scores that an earlier run has kept take no time.
        methods: by name, noise in pixels.
        engine: of the gradient scores.
        tolerance: as for `Scorer`.
    """
    own = {name: network.scale_noise(method) for name, method in methods.items()}
    scorer = Scorer(network.model, own, models=network.members, engine=engine, tolerance=tolerance)
    echo_price(scorer, network.inputs(groups[0].take(slice(1))), sum(map(len, groups)))


def describe_price(price: Price) -> str:
    """`0.5 s per image (30 forward passes)`."""
    return f"{duration(price.seconds)} per image ({_passes(price)})"


def _passes(price: Price) -> str:
    return (
        f"{_number(price.forward_passes)} forward pass{'' if price.forward_passes == 1 else 'es'}"
    )


def _cheaper(scorer: Scorer, x: Any, price: Price) -> Iterator[tuple[str, Price]]:
    """Other ways to score, each with its price, that take less than half of this one."""
    methods, used = scorer.methods, scorer.settings
    ways: list[tuple[str, dict[str, Method] | str, dict[str, Any]]] = []
    if used.engine_name in ("exact", "reference") and not used.tolerance:
        ways.append(("without --engine", methods, {}))
    if any(isinstance(m, GradientScore) and m.smooth is not None for m in methods.values()):
        plain = {name: _without_smoothing(m) for name, m in methods.items()}
        ways.append(
            ("without +smooth", plain, {"engine": used.engine, "tolerance": used.tolerance})
        )
    ways.append(("--methods regrad+layers --tolerance 0.1", "regrad+layers", {"tolerance": 0.1}))
    ways.append(("--methods entropy", "entropy", {}))
    for way, wanted, how in ways:
        other = Scorer(scorer.model, wanted, pixel_std=1.0, **how).price(x)
        if 2 * other.forward_passes <= price.forward_passes:
            yield way, other


def _without_smoothing(method: Method) -> Method:
    if not isinstance(method, GradientScore):
        return method
    none: Smoothing | None = None
    return replace(method, smooth=none)


def duration(seconds: float) -> str:
    """`40 ms`, `0.8 s`, `6 s`, `12 min` or `3.5 h`."""
    if seconds < 0.1:
        return f"{max(1, round(seconds * 1000))} ms"
    if seconds < 2:
        return f"{seconds:.1f} s"
    if seconds < 100:
        return f"{round(seconds)} s"
    return f"{round(seconds / 60)} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _number(passes: float) -> str:
    return f"{passes:.1f}".rstrip("0").rstrip(".") if passes < 10 else f"{passes:,.0f}"
