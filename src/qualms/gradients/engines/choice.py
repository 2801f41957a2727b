"""Which engine serves a request, decided in one place, by counted work and not by the clock.

The exact engine pays one backward pass for each class. Multiplications are counted, in units of
those of a forward pass: a backward pass through the activations takes as many again, and the norms
of a layer's gradients take whichever of two ways has fewer. So the same model has the same choice
on every machine. `engine="auto"` means:

- Scores: up to `MAX_EXACT_PASSES` forward passes for each row that is run, all classes are measured.
  Beyond, as few of them as a standard error of `TOLERANCE` allows (`class_sampling.py`), and of
  `+layers` scores the late layers alone (`layer_cut.py`).
- Norms of every class and layer: beyond that, a sketch, if it takes fewer passes.
"""

import logging
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from qualms.gradients.batch import Batch, num_samples, take_samples
from qualms.gradients.directions import Directions
from qualms.gradients.engines.autograd import AutogradEngine
from qualms.gradients.engines.base import Engine, run_first
from qualms.gradients.engines.class_sampling import MIN_CLASSES
from qualms.gradients.engines.exact import ExactEngine
from qualms.gradients.engines.layer_cut import LayerCutEngine
from qualms.gradients.engines.reference import ReferenceEngine
from qualms.gradients.engines.sketch import SketchEngine
from qualms.gradients.fallback import Fallback
from qualms.gradients.layers import group_by_layer
from qualms.gradients.model_input import ModelInput, forward_logits
from qualms.gradients.plan_cache import PlanCache
from qualms.gradients.request import GradientRequest
from qualms.gradients.settings import Settings, Sketch

log = logging.getLogger("qualms")
MAX_EXACT_PASSES = 60.0  # forward passes that exact gradients of a row may take
TOLERANCE = 0.03  # the standard error of estimates, as a share of the score
SKETCH_PASSES = 3.0  # of a tangent: a forward pass, and twice as much for the derivative
FORWARD_PASSES = 2.0  # the traced one, and the plain one that it is compared with
AUTOGRAD_PASSES = 2.0  # a backward pass by plain autograd, with the gradients of the weights


def engines_for(request: GradientRequest, cache: PlanCache) -> list[Engine[Any]]:
    """The engines for a request, in order of preference: the first whose plan is no `Fallback` runs.

    Args:
        request: what to compute.
        cache: of the model.
    """
    if request.settings.sketch is not None:
        return [SketchEngine(cache)]
    if request.settings.engine == "reference":
        return [ReferenceEngine(cache)]
    exact: list[Engine[Any]] = [ExactEngine(cache), AutogradEngine(cache)]
    run_exact = partial(run_first, exact, cache=cache)
    return [LayerCutEngine(cache, run_exact), *exact]


def resolve_engine(
    settings: Settings,
    model: nn.Module,
    batch: Batch,
    classes: int,
    cache: PlanCache,
) -> Settings:
    """The settings with the engine and the tolerance that scores of this model will have.

    An engine that was named is kept: without a tolerance, `exact` is exact.

    Args:
        settings: as they were given; `auto` and a tolerance of None are what is resolved.
        model: the model, inside `preserve_state`.
        batch: samples like those to be scored.
        classes: of the model.
        cache: where the plan is kept.
    """
    tolerance = settings.tolerance or 0.0
    if settings.engine != "auto":
        return replace(settings, tolerance=tolerance)
    exact = replace(settings, engine="exact", tolerance=tolerance)
    if settings.tolerance is not None or classes < MIN_CLASSES:
        return exact
    passes = exact_passes(_request(model, batch, exact), classes, cache)
    if passes <= MAX_EXACT_PASSES:
        return exact
    log.info(
        "exact gradients would take %.0f forward passes a row: scores are estimated from some of "
        "the classes",
        passes,
    )
    return replace(exact, tolerance=TOLERANCE)


def resolve_layer_engine(
    settings: Settings,
    model: nn.Module,
    batch: Batch,
) -> Settings:
    """The settings with the engine for norms of all classes and layers.

    Args:
        settings: as they were given; only `auto` is resolved, to `exact` or to a `sketch` with
            tangents for each layer.
        model: the model, inside `preserve_state`.
        batch: samples like those to be measured.
    """
    if settings.engine != "auto":
        return settings
    request = _request(model, batch, replace(settings, engine="exact"))
    first = ModelInput(take_samples(batch, slice(0, 1)))
    classes = forward_logits(model, first).shape[1]
    passes = exact_passes(request, classes, PlanCache())
    layers = len(group_by_layer(model, list(request.selected), settings.granularity))
    sketch_passes = SKETCH_PASSES * Sketch().tangents * layers
    if passes <= max(MAX_EXACT_PASSES, sketch_passes):
        log.info(
            "engine='auto' picked exact: %.0f forward passes a row, %.0f as a sketch",
            passes,
            sketch_passes,
        )
        return replace(settings, engine="exact")
    # The user should know of estimates in place of exact numbers.
    log.warning(
        "engine='auto' picked sketch: %.0f forward passes a row, %.0f exact", sketch_passes, passes
    )
    return replace(settings, engine="sketch")


def uses_class_sampling(settings: Settings, classes: int) -> bool:
    """Whether scores that are sums over classes are estimated from some of them.

    Args:
        settings: as resolved by `resolve_engine`.
        classes: of the model.
    """
    has_many = classes >= MIN_CLASSES
    return has_many and bool(settings.tolerance) and settings.engine_name == "exact"


def exact_passes(request: GradientRequest, classes: int, cache: PlanCache) -> float:
    """Forward passes that the gradients of all classes of one row take, as counted.

    Args:
        request: samples like those to be measured.
        classes: of the model.
        cache: where the plan is kept.
    """
    plan = ExactEngine(cache).plan(request)
    if isinstance(plan, Fallback):
        return FORWARD_PASSES + AUTOGRAD_PASSES * classes
    directions = plan.passes_for_all_classes(request)
    return FORWARD_PASSES + directions * plan.pass_cost(directions)


def row_passes(
    request: GradientRequest,
    directions: float,
    cache: PlanCache,
    names: frozenset[str] | None = None,
) -> float:
    """Forward passes that some gradients of one row take by the exact engine, as counted.

    The plain forward pass that the traced one is compared with is not counted: scores share it.

    Args:
        request: samples like those to be measured.
        directions: how many gradients there are.
        cache: where the plan is kept.
        names: the parameters whose gradients are wanted; None for all.
    """
    plan = ExactEngine(cache).plan(request)
    if isinstance(plan, Fallback):
        return 1 + AUTOGRAD_PASSES * directions
    # One further pass shows that samples are separate.
    return 1 + (directions + 1) * plan.pass_cost(round(directions), names)


def _request(model: nn.Module, batch: Batch, settings: Settings) -> GradientRequest:
    """The gradients of all classes."""
    numbers = range(num_samples(batch))
    return GradientRequest(model, batch, numbers, settings, Directions(("classes",)))
