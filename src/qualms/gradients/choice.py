"""`engine="auto"`: exact gradients or a sketch of them, by what each would cost here, measured on the first inputs.

The exact engine pays one backward pass for each direction, the sketch one pass for each tangent. A pass of either kind
is timed on a few inputs. Exact numbers are worth something, so the sketch must be cheaper by `WORTH` to be picked. As
times vary, so may a close choice; to fix it, name the engine that was picked.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from qualms.errors import QualmsError
from qualms.gradients.autograd import row_gradients
from qualms.gradients.directions import Directions
from qualms.gradients.exact.measure import Kind, measure
from qualms.gradients.exact.probe import Probe, along, recorded
from qualms.gradients.inputs import Batch, count, take
from qualms.gradients.layers import grouped
from qualms.gradients.settings import Settings, Sketch
from qualms.gradients.sketch.engine import Work, tangent
from qualms.gradients.smoothing import Smoothing

log = logging.getLogger("qualms")
TIMED = 8  # inputs
WORTH = 2


@dataclass(frozen=True)
class Choice:
    """The engine picked, and the seconds that each would take for one input; infinite if it cannot run the model."""

    engine: str
    exact: float
    sketch: float

    def __str__(self) -> str:
        return (
            f"engine='auto' picked {self.engine}: about {self.exact:.2g} s an input exact, {self.sketch:.2g} s sketched"
        )


def settled(
    settings: Settings,
    model: nn.Module,
    batch: Batch,
    directions: Sequence[str],
    smoothing: Smoothing | None,
    each_layer: bool = False,
) -> Settings:
    """The same settings with a definite engine. `each_layer`: the sketch needs tangents for every layer."""
    if settings.engine != "auto":
        return settings
    choice = choose(settings, model, batch, directions, smoothing, each_layer)
    # Estimates instead of exact numbers are something to be told of.
    log.log(logging.WARNING if choice.engine == "sketch" else logging.INFO, "%s", choice)
    return replace(settings, engine=choice.engine)


def choose(
    settings: Settings,
    model: nn.Module,
    batch: Batch,
    directions: Sequence[str],
    smoothing: Smoothing | None,
    each_layer: bool = False,
) -> Choice:
    """Times a pass of each kind on the first inputs."""
    some = take(batch, slice(0, min(TIMED, settings.batch_size or TIMED)))
    work = Work.on(model, some, range(count(some)), settings, directions, smoothing)
    exact = _exact_seconds(work, directions, "l1" if settings.norm == "l1" else "l2")
    try:
        tangents = Sketch().tangents * (len(grouped(model, work.probe.used, settings.layers)) if each_layer else 1)
        sketch = _sketch_seconds(work, tangents, count(batch))
    except QualmsError as reason:
        log.info("%s", reason)
        sketch = float("inf")
    return Choice("sketch" if WORTH * sketch < exact else "exact", exact, sketch)


def _exact_seconds(work: Work, directions: Sequence[str], kind: Kind) -> float:
    passes = sum(work.probe.classes if name in ("classes", "logits") else 1 for name in directions)
    on = work.rows_for(slice(0, work.inputs))
    probe = Probe.of(work.model, on, work.selected)
    if probe is None:
        one = on.take([0])
        return passes * on.per_input * _seconds(lambda: row_gradients(work.model, one, work.selected, along))
    if probe.by_features(work.budget, on.per_input, kind, directions) and probe.head is not None:
        passes = probe.head.weight.shape[1] + 2 + len(directions) - 1
    inputs = min(work.inputs, probe.inputs_in(work.budget, on.per_input, kind))
    on = probe.formatted(work.rows_for(slice(0, inputs)))
    twins = probe.twins if count(on.batch) > 1 else None
    forward = _seconds(lambda: recorded(work.model, on, probe.weights, twins))
    logits, recorder = recorded(work.model, on, probe.weights, twins)
    cotangents = Directions(("uniform", "uniform"))(logits.unflatten(0, (inputs, -1))).flatten(1, 2)
    a_pass = _seconds(partial(measure, logits, cotangents, recorder.pieces, probe.weights, inputs, kind)) / 2
    return (2 * forward + passes * a_pass) / inputs


def _sketch_seconds(work: Work, tangents: int, inputs: int) -> float:
    on = work.probe.formatted(work.rows_for(slice(0, min(work.inputs, work.at_once))))
    draw = partial(tangent, work.selected, [(list(work.selected), 1.0)], "normal", False, 0, 0)
    s = draw()
    push = work.probe.push(work.model, s)
    pushed = _seconds(lambda: push(work.model, on, s)) * on.per_input / count(on.batch)
    return tangents * (pushed + _seconds(draw) / inputs)


def _seconds(run: Callable[[], Any]) -> float:
    """The quicker of two runs."""
    times: list[float] = []
    for _ in range(2):
        start = time.perf_counter()
        result = run()
        if isinstance(result, tuple) and isinstance(result[0], Tensor) and result[0].is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times)
