"""What scores cost, before they are computed: counted, in units of a plain forward pass, and timed
on one of them.
"""

import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from qualms.errors import SlowWarning
from qualms.gradients.batch import take_samples
from qualms.gradients.engines.choice import PASSES_BESIDE, PLAIN_BACKWARD, PUSH_PASSES, pass_work
from qualms.gradients.engines.exact import look_at
from qualms.gradients.engines.probe import Probe
from qualms.gradients.layer_table import late_layers
from qualms.gradients.model_input import ModelInput, forward_logits
from qualms.gradients.request import GradientRequest
from qualms.methods.coherence import Coherence
from qualms.methods.context import BatchContext
from qualms.methods.ensemble import Ensemble
from qualms.methods.gradient_score import GradientScore
from qualms.methods.heat import Heat
from qualms.methods.method import Method
from qualms.methods.recommended import Recommended

TIMED_RUNS = 3
LONG_SECONDS = 600.0
LONG = "a long run"


@dataclass(frozen=True)
class Price:
    """What the scores of one input cost.

    Args:
        forward_passes: in units of a plain forward pass over one input.
        seconds: on this machine, from the time of a forward pass over one input alone; in batches
            it is less.
        nbytes: that the work on a chunk of inputs may take.
        known: how these are known: `counted` from the shapes of layers and the logits of one input.

    Example:
        ```python
        import torch
        import qualms

        head = torch.nn.Linear(64, 1000)
        model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), head)
        price = qualms.Scorer(model, "regrad+layers").price(torch.randn(2, 8))
        print(price.forward_passes, price.seconds, price.nbytes, price.known)
        ```
    """

    forward_passes: float
    seconds: float
    nbytes: int
    known: str = "counted"


def price_of(passes: BatchContext, methods: Iterable[Method]) -> Price:
    """The price of some methods together, of which gradient scores with the same smoothing share a
    pass.
    """
    methods = list(methods)
    gradient = [m for m in methods if isinstance(m, GradientScore)]
    counted = 1.0 + sum(_count_beside(m, passes) for m in methods)
    for smooth in dict.fromkeys(m.smooth for m in gradient):
        counted += _count_gradients(passes, [m for m in gradient if m.smooth == smooth])
    job = passes.job(passes.subject.directions(None), None)
    return Price(round(counted, 1), counted * _forward_seconds(passes), job.budget)


def warn_of_long_run(
    passes: BatchContext, methods: Iterable[Method], forward_seconds: float
) -> None:
    """A SlowWarning, once and before the work, if the scores of a batch would take more than ten
    minutes.

    Args:
        passes: the batch, of which the plain forward pass is done.
        methods: that will be asked.
        forward_seconds: what that took for each input, the first one's preparations included.
    """
    learnt, inputs, methods = passes.subject.learnt, len(passes.logits), list(methods)
    gradient = [m for m in methods if isinstance(m, GradientScore)]
    rows = sum(1 + (s.draws if s else 0) for s in dict.fromkeys(m.smooth for m in gradient))
    at_most = 4.0 * rows * passes.logits.shape[1] + sum(m.extra_passes for m in methods)
    if LONG in learnt.warned or at_most * inputs * forward_seconds < LONG_SECONDS:
        return
    price = price_of(passes, methods)
    if price.seconds * inputs > LONG_SECONDS:
        learnt.warned.add(LONG)
        warnings.warn(
            f"scoring {inputs} input{'' if inputs == 1 else 's'} will take about {price.seconds * inputs / 60:,.0f} "
            f"minutes ({price.forward_passes:,.0f} forward passes each); engine='auto' or a tolerance measures fewer "
            "classes, and scores without +smooth cost one ninth as much.",
            SlowWarning,
            stacklevel=2,
        )


def _count_beside(method: Method, passes: BatchContext) -> float:
    """Passes of one method beside the plain forward pass; those of gradient scores are counted
    together.
    """
    if isinstance(method, GradientScore):
        return 0.0
    if isinstance(method, Recommended):
        method = method.picked(passes)[0]
    if isinstance(method, Ensemble):
        return float(len(passes.subject.members))
    if isinstance(method, Heat):
        unit = method.unit(passes)
        if unit.log_ratio is None:
            return 0.0
        names = [name for block in unit.blocks for name in block]
        return _count_late(passes, names, min(passes.logits.shape[1] - 1, 16))
    if isinstance(method, Coherence):
        return _count_late(
            passes, method.late(passes), method.directions_needed(passes.logits.shape[1])
        )
    return method.extra_passes


def _count_late(passes: BatchContext, names: Iterable[str], directions: int) -> float:
    """A recorded forward pass, and backward passes through the operations of some parameters."""
    job = passes.job(passes.subject.directions(None), None)
    whole = look_at(job, passes.subject.learnt)
    if not isinstance(whole, Probe):
        return 1 + PLAIN_BACKWARD * directions
    return 1 + (directions + 1) * pass_work(whole, directions, frozenset(names))


def _count_gradients(passes: BatchContext, methods: Sequence[GradientScore]) -> float:
    """Passes of the gradient scores that share one smoothing."""
    settings, subject = passes.subject.settings, passes.subject
    smooth, classes = methods[0].smooth, passes.logits.shape[1]
    rows = 1 + (smooth.draws if smooth else 0)
    wanted = subject.directions(smooth)
    if settings.sketch is not None:
        return rows * PUSH_PASSES * settings.sketch.tangents
    directions: float = wanted.size(classes)
    summed = [m for m in methods if passes.draws_classes(m)]
    lam = subject.smallest_lambda(smooth)
    if summed:
        needed = passes.class_sums(summed, lam).first_numbers(passes.logits).double().mean()
        directions = float(needed) + wanted.size(classes) - classes
    job: GradientRequest = passes.job(wanted, smooth)
    late = late_layers(job, lam, subject.learnt)
    whole = look_at(passes.job(wanted, None), subject.learnt)
    if settings.engine == "reference" or not isinstance(whole, Probe):
        return rows * (1 + PLAIN_BACKWARD * directions)
    work = pass_work(whole, round(directions), None if late is None else late.names)
    return rows * (
        PASSES_BESIDE - 1 + (directions + 1) * work
    )  # one more shows that rows are kept apart


@torch.no_grad()
def _forward_seconds(passes: BatchContext) -> float:
    """The time of a plain forward pass over one input."""
    one = ModelInput(take_samples(passes.batch, slice(0, 1)))
    times = []
    for _ in range(TIMED_RUNS):
        start = time.perf_counter()
        forward_logits(passes.model, one)
        times.append(time.perf_counter() - start)
    return min(times)
