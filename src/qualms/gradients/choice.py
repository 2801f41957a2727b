"""`engine="auto"`: exact gradients or a sketch of them, by what each would cost here, measured on the first inputs.

The exact engine pays one backward pass for each direction, the sketch one pass for each tangent. A pass of either kind
is timed on a few inputs. Exact numbers are worth something, so the sketch must be cheaper by `WORTH` to be picked. As
times vary, so may a close choice; to fix it, name the engine that was picked.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from qualms.errors import QualmsError
from qualms.gradients.autograd import row_gradients
from qualms.gradients.directions import Directions
from qualms.gradients.exact.measure import Kind, measure
from qualms.gradients.exact.probe import Probe
from qualms.gradients.first_look import random_direction
from qualms.gradients.inputs import Batch, count, take
from qualms.gradients.job import Job
from qualms.gradients.layers import grouped
from qualms.gradients.learnt import Learnt
from qualms.gradients.settings import Engine, Settings, Sketch
from qualms.gradients.sketch.engine import SketchRun
from qualms.gradients.smoothing import Smoothing
from qualms.gradients.watch.forward import recorded

log = logging.getLogger("qualms")
TIMED = 8  # inputs
WORTH = 2
RUNS, SHORT = 10, 0.03  # at most so many, and none after so many seconds
Needed = Callable[[Float[Tensor, "b c"]], float]


@dataclass(frozen=True)
class Choice:
    """The engine picked, and the seconds that each would take for one input; infinite if it cannot run the model."""

    engine: Engine
    exact: float
    sketch: float

    def __str__(self) -> str:
        return (
            f"engine='auto' picked {self.engine}: about {self.exact:.2g} s an input exact, {self.sketch:.2g} s sketched"
        )


def choose_engine(
    settings: Settings,
    model: nn.Module,
    batch: Batch,
    directions: Sequence[str],
    smoothing: Smoothing | None,
    each_layer: bool = False,
    needed: Needed | None = None,
) -> Engine | Sketch:
    """The engine, picked if it is `auto`.

    `each_layer`: the sketch needs tangents for every layer. `needed`: how many directions the exact engine will run for
    inputs with these logits, on average, where a tolerance lets it run fewer than there are.
    """
    if settings.engine != "auto":
        return settings.engine
    choice = timed(settings, model, batch, directions, smoothing, each_layer, needed)
    # Estimates instead of exact numbers are something to be told of.
    log.log(logging.WARNING if choice.engine == "sketch" else logging.INFO, "%s", choice)
    return choice.engine


def timed(
    settings: Settings,
    model: nn.Module,
    batch: Batch,
    directions: Sequence[str],
    smoothing: Smoothing | None,
    each_layer: bool = False,
    needed: Needed | None = None,
) -> Choice:
    """Times a pass of each kind on the first inputs."""
    some = take(batch, slice(0, min(TIMED, settings.batch_size or TIMED)))
    job = Job(model, some, range(count(some)), settings, Directions(tuple(directions)), smoothing)
    work = SketchRun.on(job, Learnt())
    exact = _exact_seconds(work, settings.norm, needed)
    try:
        layers = len(grouped(model, work.probe.counted, settings.granularity)) if each_layer else 1
        sketch = _sketch_seconds(work, Sketch().tangents * layers, count(batch))
    except QualmsError as reason:
        log.info("%s", reason)
        sketch = float("inf")
    return Choice("sketch" if WORTH * sketch < exact else "exact", exact, sketch)


def _exact_seconds(work: SketchRun, kind: Kind, needed: Needed | None) -> float:
    job, names = work.job, work.job.directions.names
    passes: float = job.directions.size(work.probe.classes)
    on = job.rows(slice(0, job.inputs))
    probe = Probe.of(job.model, on, job.selected, job.budget)
    if isinstance(probe, Exception):
        one = on.take([0])
        return passes * on.per_input * _seconds(lambda: row_gradients(job.model, one, job.selected, random_direction))
    if needed is None and probe.by_features(job.budget, on.per_input, kind, names) and probe.last_product is not None:
        passes = probe.last_product.weight.shape[1] + 2 + len(names) - 1
    inputs = max(1, min(job.inputs, probe.inputs_in(job.budget, on.per_input, kind)))
    on = probe.formatted(job.rows(slice(0, inputs)))
    twins = probe.twins if count(on.batch) > 1 else None
    forward = _seconds(lambda: recorded(job.model, on, probe.weights, twins))
    logits, recorder = recorded(job.model, on, probe.weights, twins)
    if needed is not None:
        passes = needed(logits.detach().unflatten(0, (inputs, -1))[:, 0])
    cotangents = Directions(("uniform", "uniform")).along(logits.unflatten(0, (inputs, -1)))
    a_pass = _seconds(partial(measure, logits, cotangents, recorder.pieces, probe.weights, inputs, kind)) / 2
    return (2 * forward + passes * a_pass) / inputs


def _sketch_seconds(work: SketchRun, tangents: int, inputs: int) -> float:
    job = work.job
    on = work.probe.formatted(job.rows(slice(0, min(job.inputs, work.at_once))))
    drawn = work.tangents([(list(job.selected), 1.0)])
    push, s = work.push(drawn), drawn[0]
    pushed = _seconds(lambda: push(job.model, on, s)) * on.per_input / count(on.batch)
    return tangents * (pushed + _seconds(lambda: drawn[0]) / inputs)


def _seconds(run: Callable[[], Any]) -> float:
    """The quickest of two runs, or of more while they are short: other work on the machine interrupts some of them."""
    times: list[float] = []
    while len(times) < 2 or (len(times) < RUNS and sum(times) < SHORT):
        start = time.perf_counter()
        result = run()
        if isinstance(result, tuple) and isinstance(result[0], Tensor) and result[0].is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times)
