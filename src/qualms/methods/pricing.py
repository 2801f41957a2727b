"""What scores cost, before they are computed: a count of plain forward passes, one of which is timed
for the cost in seconds.
"""

import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from qualms.errors import SlowWarning
from qualms.gradients.batch import take_samples
from qualms.gradients.directions import CONTRASTS
from qualms.gradients.engines.choice import SKETCH_PASSES, count_row_passes
from qualms.gradients.engines.layer_cut import find_layer_cut
from qualms.gradients.model_input import ModelInput, forward_logits
from qualms.methods.coherence import Coherence
from qualms.methods.context import BatchContext
from qualms.methods.gradient_score import (
    GradientPass,
    GradientScore,
    class_sums,
)
from qualms.methods.heat import Heat, Recommended
from qualms.methods.method import Method
from qualms.methods.perturb_model import Ensemble

TIMED_RUNS = 3
LONG_SECONDS = 600.0
LONG = "a long run"


@dataclass(frozen=True)
class Price:
    """What the scores of one input cost.

    Attributes:
        forward_passes: the work, in plain forward passes over one input.
        seconds: the time on this machine, from that of a forward pass over one input alone; less
            in batches.
        nbytes: the memory that the work on a chunk of inputs may take.
        known: how the numbers were found. Always `counted`: from the shapes of layers and the
            logits of one input.

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
    """Count the price of some methods together; gradient scores with the same smoothing share a
    pass.

    Args:
        context: one input, after its plain forward pass.
        methods: the methods that will be computed.
    """
    methods = list(methods)
    gradient_methods = [m for m in methods if isinstance(m, GradientScore)]
    passes = 1.0 + sum(_count_method(m, context) for m in methods)
    for smooth in dict.fromkeys(m.smooth for m in gradient_methods):
        passes += _count_gradients(context, [m for m in gradient_methods if m.smooth == smooth])
    request = context.request(GradientPass.of_scorer(context, None).directions, None)
    return Price(round(passes, 1), passes * _forward_seconds(context), request.budget)


def warn_of_long_run(
    context: BatchContext,
    methods: Iterable[Method],
    forward_seconds: float,
) -> None:
    """Warn, once and before the work, if the scores of a batch would take more than ten minutes.

    Args:
        context: the batch, after its plain forward pass.
        methods: the methods that will be computed.
        forward_seconds: the time that the plain pass took for each input. It may include what only
            a first pass has to do, so `price_of` measures the time again.
    """
    methods = list(methods)
    cache = context.model_context.cache
    inputs = len(context.logits)
    smoothings = {m.smooth for m in methods if isinstance(m, GradientScore)}
    rows = sum(1 + (s.draws if s else 0) for s in smoothings)
    # A bound that costs nothing to compute; only if it is high is the price counted.
    at_most = 4.0 * rows * context.num_classes + sum(m.extra_passes for m in methods)
    if LONG in cache.warned or at_most * inputs * forward_seconds < LONG_SECONDS:
        return
    price = price_of(context, methods)
    if price.seconds * inputs > LONG_SECONDS:
        cache.warned.add(LONG)
        warnings.warn(
            f"scoring {inputs} input{'' if inputs == 1 else 's'} will take about "
            f"{price.seconds * inputs / 60:,.0f} minutes ({price.forward_passes:,.0f} forward "
            "passes each); engine='auto' or a tolerance measures fewer classes, and scores "
            "without +smooth cost one ninth as much.",
            SlowWarning,
            stacklevel=2,
        )


def _count_method(method: Method, context: BatchContext) -> float:
    """Count the passes of one method for one input, beside the plain forward pass.

    Gradient scores count as 0 here, since `_count_gradients` counts the passes that they share.
    """
    if isinstance(method, GradientScore):
        return 0.0
    if isinstance(method, Recommended):
        method = method.pick(context)[0]
    if isinstance(method, Ensemble):
        return float(len(context.model_context.members))
    if isinstance(method, Heat):
        unit = method.unit(context)
        if unit.log_ratio is None:
            return 0.0
        names = [name for block in unit.blocks for name in block]
        return _count_late(context, names, min(context.num_classes - 1, CONTRASTS))
    if isinstance(method, Coherence):
        directions = method.num_directions(context.num_classes)
        return _count_late(context, method.late_params(context), directions)
    return method.extra_passes


def _count_late(context: BatchContext, names: Iterable[str], directions: int) -> float:
    """Count the passes for gradients of some late parameters: one forward, and several backward
    that stop at these parameters.

    Args:
        context: the batch.
        names: the names of the parameters.
        directions: the number of backward passes.
    """
    request = context.request(GradientPass.of_scorer(context, None).directions, None)
    return count_row_passes(request, directions, context.model_context.cache, frozenset(names))


def _count_gradients(context: BatchContext, methods: Sequence[GradientScore]) -> float:
    """Count the passes for one input of the gradient scores that share one smoothing.

    Args:
        context: the batch; where classes are sampled, their mean number over its inputs counts.
        methods: all gradient scores with this smoothing.
    """
    model_context = context.model_context
    settings = model_context.settings
    smooth = methods[0].smooth
    rows = 1 + (smooth.draws if smooth else 0)
    if settings.sketch is not None:
        return rows * SKETCH_PASSES * settings.sketch.tangents
    shared = GradientPass.of_scorer(context, smooth)
    directions: float = shared.directions.size(context.num_classes)
    sampled = [m for m in methods if m.uses_class_sampling(context)]
    if sampled:
        sums = class_sums(context, sampled, shared.lam)
        classes = float(sums.first_numbers(context.logits).double().mean())
        # A sample of the classes takes the place of all of them.
        directions = classes + directions - context.num_classes
    # Backward passes stop where the early layers begin that are skipped, if there are any.
    late = find_layer_cut(
        context.request(shared.directions, smooth), shared.lam, model_context.cache
    )
    names = None if late is None else late.names
    plain = context.request(shared.directions, None)
    return rows * count_row_passes(plain, directions, model_context.cache, names)


@torch.no_grad()
def _forward_seconds(context: BatchContext) -> float:
    """Measure the time of a plain forward pass over one input: the shortest of three."""
    one = ModelInput(take_samples(context.batch, slice(0, 1)))
    times: list[float] = []
    for _ in range(TIMED_RUNS):
        start = time.perf_counter()
        forward_logits(context.model, one)
        times.append(time.perf_counter() - start)
    return min(times)
