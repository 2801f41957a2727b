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
from qualms.gradients.engines.choice import AUTOGRAD_PASSES, SKETCH_PASSES, row_passes
from qualms.gradients.engines.layer_cut import late_layers
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


def price_of(context: BatchContext, methods: Iterable[Method]) -> Price:
    """The price of some methods together, of which gradient scores with the same smoothing share a
    pass.
    """
    methods = list(methods)
    gradient = [m for m in methods if isinstance(m, GradientScore)]
    counted = 1.0 + sum(_count_beside(m, context) for m in methods)
    for smooth in dict.fromkeys(m.smooth for m in gradient):
        counted += _count_gradients(context, [m for m in gradient if m.smooth == smooth])
    request = context.request(context.model_context.directions(None), None)
    return Price(round(counted, 1), counted * _forward_seconds(context), request.budget)


def warn_of_long_run(
    context: BatchContext, methods: Iterable[Method], forward_seconds: float
) -> None:
    """A SlowWarning, once and before the work, if the scores of a batch would take more than ten
    minutes.

    Args:
        context: the batch, of which the plain forward pass is done.
        methods: that will be asked.
        forward_seconds: what that took for each input, the first one's preparations included.
    """
    cache, inputs, methods = context.model_context.cache, len(context.logits), list(methods)
    gradient = [m for m in methods if isinstance(m, GradientScore)]
    rows = sum(1 + (s.draws if s else 0) for s in dict.fromkeys(m.smooth for m in gradient))
    at_most = 4.0 * rows * context.logits.shape[1] + sum(m.extra_passes for m in methods)
    if LONG in cache.warned or at_most * inputs * forward_seconds < LONG_SECONDS:
        return
    price = price_of(context, methods)
    if price.seconds * inputs > LONG_SECONDS:
        cache.warned.add(LONG)
        warnings.warn(
            f"scoring {inputs} input{'' if inputs == 1 else 's'} will take about {price.seconds * inputs / 60:,.0f} "
            f"minutes ({price.forward_passes:,.0f} forward passes each); engine='auto' or a tolerance measures fewer "
            "classes, and scores without +smooth cost one ninth as much.",
            SlowWarning,
            stacklevel=2,
        )


def _count_beside(method: Method, context: BatchContext) -> float:
    """Passes of one method beside the plain forward pass; those of gradient scores are counted
    together.
    """
    if isinstance(method, GradientScore):
        return 0.0
    if isinstance(method, Recommended):
        method = method.picked(context)[0]
    if isinstance(method, Ensemble):
        return float(len(context.model_context.members))
    if isinstance(method, Heat):
        unit = method.unit(context)
        if unit.log_ratio is None:
            return 0.0
        names = [name for block in unit.blocks for name in block]
        return _count_late(context, names, min(context.logits.shape[1] - 1, 16))
    if isinstance(method, Coherence):
        return _count_late(
            context, method.late(context), method.directions_needed(context.logits.shape[1])
        )
    return method.extra_passes


def _count_late(context: BatchContext, names: Iterable[str], directions: int) -> float:
    """A recorded forward pass, and backward passes through the operations of some parameters."""
    request = context.request(context.model_context.directions(None), None)
    return row_passes(request, directions, context.model_context.cache, frozenset(names))


def _count_gradients(context: BatchContext, methods: Sequence[GradientScore]) -> float:
    """Passes of the gradient scores that share one smoothing."""
    settings, model_context = context.model_context.settings, context.model_context
    smooth, classes = methods[0].smooth, context.logits.shape[1]
    rows = 1 + (smooth.draws if smooth else 0)
    wanted = model_context.directions(smooth)
    if settings.sketch is not None:
        return rows * SKETCH_PASSES * settings.sketch.tangents
    directions: float = wanted.size(classes)
    summed = [m for m in methods if context.draws_classes(m)]
    lam = model_context.smallest_lambda(smooth)
    if summed:
        needed = context.class_sums(summed, lam).first_numbers(context.logits).double().mean()
        directions = float(needed) + wanted.size(classes) - classes
    request: GradientRequest = context.request(wanted, smooth)
    late = late_layers(request, lam, model_context.cache)
    if settings.engine == "reference":
        return rows * (1 + AUTOGRAD_PASSES * directions)
    names = None if late is None else late.names
    plain = context.request(wanted, None)
    return rows * row_passes(plain, directions, model_context.cache, names)


@torch.no_grad()
def _forward_seconds(context: BatchContext) -> float:
    """The time of a plain forward pass over one input."""
    one = ModelInput(take_samples(context.batch, slice(0, 1)))
    times = []
    for _ in range(TIMED_RUNS):
        start = time.perf_counter()
        forward_logits(context.model, one)
        times.append(time.perf_counter() - start)
    return min(times)
