"""The price first: what a command will take, said before it begins, and what would be cheaper."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from qualms.cli.status import say
from qualms.gradients.smoothing import Smoothing
from qualms.methods.gradient_score import GradientScore
from qualms.methods.method import Method
from qualms.methods.price import Price
from qualms.scorer import Scorer

LONG = 600.0  # seconds above which cheaper ways are named


def say_price(scorer: Scorer, x: Any, images: int) -> None:
    """Say how long so many images will take, judged by one of them; above ten minutes, what is cheaper.

    Args:
        scorer: of the images.
        x: one of them, as the network takes it.
        images: how many are to be scored.
    """
    price = scorer.price(x)
    passes = f"{_number(price.forward_passes)} forward pass{'' if price.forward_passes == 1 else 'es'} each"
    say(f"{images} image{'' if images == 1 else 's'}, about {duration(images * price.seconds)} ({passes})")
    if images * price.seconds > LONG:
        for way, other in _cheaper(scorer, x, price):
            say(f"  cheaper: {way}, {_number(other.forward_passes)} forward passes each")


def _cheaper(scorer: Scorer, x: Any, price: Price) -> Iterator[tuple[str, Price]]:
    """Other ways to score, each with its price, that take less than half of this one."""
    methods = scorer.methods
    ways: list[tuple[str, dict[str, Method] | str, dict[str, Any]]] = []
    if scorer.settings.engine_name in ("exact", "reference") and not scorer.settings.tolerance:
        ways.append(("without --engine, some of the classes within 3 %", methods, {}))
    if any(isinstance(m, GradientScore) and m.smooth is not None for m in methods.values()):
        plain = {name: _without_smoothing(m) for name, m in methods.items()}
        ways.append(("without +smooth", plain, {"engine": scorer.settings.engine, "tolerance": 0.03}))
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
    """`40 ms`, `6 s`, `12 min` or `3.5 h`."""
    if seconds < 1:
        return f"{max(1, round(seconds * 1000))} ms"
    if seconds < 100:
        return f"{round(seconds)} s"
    return f"{round(seconds / 60)} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _number(passes: float) -> str:
    return f"{passes:.1f}".rstrip("0").rstrip(".") if passes < 10 else f"{passes:,.0f}"
