"""The cost of scores, before they are computed.

It is counted in plain forward passes, one of which is timed for the cost in seconds.
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
from qualms.gradients.memory import default_budget
from qualms.gradients.model_input import ModelInput, forward_logits
from qualms.methods.coherence import Coherence
from qualms.methods.context import BatchContext
from qualms.methods.gradient_score import (
    GradientPass,
    GradientScore,
    create_class_sums,
)
from qualms.methods.heat import Heat, Recommended
from qualms.methods.method import Method
from qualms.methods.perturb_model import Ensemble

TIMED_RUNS = 3
LONG_SECONDS = 600.0  # users are warned of runs that take longer
LONG = "a long run"  # marks in the cache that the user was warned


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
    """Count the cost of some methods for one input.

    Gradient scores with the same smoothing share a pass, so their cost is counted once.

    Args:
        context: one input, after its plain forward pass.
        methods: the methods that will be computed together.
    """
    methods = list(methods)
    gradient_methods = [m for m in methods if isinstance(m, GradientScore)]
    passes = 1.0 + sum(_count_method(m, context) for m in methods)
    for smooth in dict.fromkeys(m.smooth for m in gradient_methods):
        passes += _count_gradients(context, [m for m in gradient_methods if m.smooth == smooth])
    budget = context.model_context.settings.budget
    return Price(
        forward_passes=round(passes, 1),
        seconds=passes * _time_forward_pass(context),
        nbytes=budget or default_budget(context.device),
    )


def warn_of_long_run(
    context: BatchContext,
    methods: Iterable[Method],
    forward_seconds: float,
) -> None:
    """Warn, once for a model and before the work, if scoring a batch would take over ten minutes.

    Args:
        context: the batch, after its plain forward pass.
        methods: the methods that will be computed.
        forward_seconds: the time that the plain forward pass took for each input. A first pass may
            be slower than later ones, so the time is measured again before a warning.
    """
    methods = list(methods)
    cache = context.model_context.cache
    inputs = len(context.logits)
    smoothings = {m.smooth for m in methods if isinstance(m, GradientScore)}
    # Rows of one input: itself and its noisy copies, for each smoothing.
    rows = sum(1 + (smooth.draws if smooth else 0) for smooth in smoothings)
    # An upper bound, which costs nothing to compute; the true cost is counted only if it is high.
    sketch = context.model_context.settings.sketch
    row_passes = SKETCH_PASSES * sketch.tangents if sketch else 4.0 * context.num_classes
    max_passes = rows * row_passes + sum(m.extra_passes for m in methods)
    if LONG in cache.warned or max_passes * inputs * forward_seconds < LONG_SECONDS:
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
    """Count the passes of one method for one input, in addition to the plain forward pass.

    Gradient scores count as 0 here, since `_count_gradients` counts the passes that they share.
    """
    if isinstance(method, GradientScore):
        return 0.0
    if isinstance(method, Recommended):
        method, _ = method.pick(context)
    if isinstance(method, Ensemble):
        return float(len(context.model_context.members))
    if isinstance(method, Heat):
        unit = method.get_unit(context)
        # Without ρ₀ heat is the entropy, which needs no gradients.
        if unit.log_ratio is None:
            return 0.0
        names = [name for block in unit.blocks for name in block]
        # One gradient for each contrast between classes.
        contrasts = min(context.num_classes - 1, CONTRASTS)
        return _count_late_gradients(context, names, contrasts)
    if isinstance(method, Coherence):
        directions = method.num_directions(context.num_classes)
        return _count_late_gradients(context, method.late_params(context), directions)
    return method.extra_passes


def _count_late_gradients(
    context: BatchContext,
    names: Iterable[str],
    directions: int,
) -> float:
    """Count the cost, in forward passes, of gradients with respect to some late parameters.

    There is one forward pass, and one backward pass for each direction, which stops at the first of
    these parameters.

    Args:
        context: the batch.
        names: the names of the parameters.
        directions: the number of directions along which gradients are taken.
    """
    # The request's own directions play no part in the cost.
    request = context.create_request(GradientPass.of_scorer(context, None).directions, None)
    return count_row_passes(request, directions, context.model_context.cache, frozenset(names))


def _count_gradients(
    context: BatchContext,
    methods: Sequence[GradientScore],
) -> float:
    """Count the cost, in forward passes, of gradient scores that share one smoothing, for one input.

    Args:
        context: the batch. If classes are sampled, the mean number of classes over its inputs is
            counted.
        methods: all gradient scores with this smoothing.
    """
    model_context = context.model_context
    settings = model_context.settings
    smooth = methods[0].smooth
    rows = 1 + (smooth.draws if smooth else 0)
    if settings.sketch is not None:
        return rows * SKETCH_PASSES * settings.sketch.tangents
    shared_pass = GradientPass.of_scorer(context, smooth)
    directions: float = shared_pass.directions.num_directions(context.num_classes)
    sampling_methods = [m for m in methods if m.uses_class_sampling(context)]
    if sampling_methods:
        class_sums = create_class_sums(context, sampling_methods, shared_pass.lam)
        sampled_classes = class_sums.choose_first_numbers(context.logits).double().mean()
        # A sample of the classes takes the place of all of them.
        directions += float(sampled_classes) - context.num_classes
    # Backward passes stop at the first layer that is not skipped.
    request = context.create_request(shared_pass.directions, smooth, shared_pass.lam)
    cut = find_layer_cut(request, model_context.cache)
    late_names = None if cut is None else cut.late_names
    # Without smoothing, as the passes of a single row are counted.
    unsmoothed_request = context.create_request(shared_pass.directions, None)
    return rows * count_row_passes(unsmoothed_request, directions, model_context.cache, late_names)


@torch.no_grad()
def _time_forward_pass(context: BatchContext) -> float:
    """Measure the seconds of a plain forward pass over one input: the shortest of three passes."""
    first_input = ModelInput(take_samples(context.batch, slice(0, 1)))
    times: list[float] = []
    for _ in range(TIMED_RUNS):
        start = time.perf_counter()
        forward_logits(context.model, first_input)
        times.append(time.perf_counter() - start)
    # Other work on the machine only makes a pass slower.
    return min(times)
