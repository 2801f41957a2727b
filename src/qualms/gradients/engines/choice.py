"""Chooses the engine from an operation count, not from timings, so every machine chooses alike.

The unit is one forward pass; a backward pass through the activations counts as one more, plus the
cheaper of two ways to compute each layer's norms. The exact engine takes one backward pass for each
class. `engine="auto"` means:

- Scores: if exact gradients take at most `MAX_EXACT_PASSES` forward passes a row, all classes are
  measured. Otherwise as few classes as a standard error of `TOLERANCE` allows
  (`class_sampling.py`), and for `+layers` scores only the late layers (`layer_cut.py`).
- Norms of every class and layer: above the same limit a sketch, if it takes fewer passes.

Whether a score samples classes is asked in `methods/gradient_score.py`, by `uses_class_sampling`.
"""

import logging
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from qualms.errors import QualmsError
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
from qualms.gradients.settings import Engine as EngineName
from qualms.gradients.settings import Settings, Sketch

log = logging.getLogger("qualms")
# Costs are counted in forward passes over one row.
# The most forward passes that exact gradients of a row may take.
MAX_EXACT_PASSES = 60.0
# The standard error of estimates that `auto` allows, as a share of the score.
TOLERANCE = 0.03
# Cost of one tangent: a forward pass, and twice as much for the derivative.
SKETCH_PASSES = 3.0
# Cost of the traced forward pass and the plain one it is compared with.
FORWARD_PASSES = 2.0
# Cost of a backward pass by plain autograd, weight gradients included.
AUTOGRAD_PASSES = 2.0


def engines_for(request: GradientRequest, cache: PlanCache) -> list[Engine[Any]]:
    """List the engines for a request in order of preference.

    `run_first` runs the first engine whose `plan` does not return a `Fallback`.

    Args:
        request: the samples, and which of their gradients to compute.
        cache: the cached plans and measurements of the model.
    """
    if request.settings.sketch is not None:
        return [SketchEngine(cache)]
    if request.settings.engine == "reference":
        return [ReferenceEngine()]
    exact_engines: list[Engine[Any]] = [ExactEngine(cache), AutogradEngine()]
    # A layer cut runs these engines on the late layers; they run alone if there is no cut.
    run_exact = partial(run_first, exact_engines, cache=cache)
    return [LayerCutEngine(cache, run_inner=run_exact), *exact_engines]


def requested_engine(
    asked: EngineName | Sketch | None, tolerance: float | None
) -> EngineName | Sketch:
    """Return the engine that a user asked for: `auto` by default, `exact` if a tolerance is given.

    Args:
        asked: the user's `engine` argument.
        tolerance: the user's `tolerance` argument, which the exact engine keeps by sampling classes.
    """
    if tolerance is not None and asked in (None, "auto"):
        return "exact"
    return asked or "auto"


def requested_position_engine(
    asked: EngineName | Sketch | None, at_all: bool
) -> EngineName | Sketch:
    """Return the engine for scores at positions: the sketch at all of them, any engine at a few.

    Args:
        asked: the user's `engine` argument.
        at_all: whether scores are wanted at all positions, not only at a few that the user named.

    Raises:
        QualmsError: if this engine cannot compute the scores.
    """
    if at_all:
        if asked in ("exact", "reference"):
            raise QualmsError(
                f"engine={asked!r} takes one backward pass per class and position; pass a few "
                "positions as positions=, or use engine='sketch'."
            )
        return "sketch" if asked in (None, "auto") else asked
    if asked == "auto":
        raise QualmsError("engine='auto' cannot be used with positions=; pass 'exact' or 'sketch'.")
    return asked or "exact"


def resolve_engine(
    settings: Settings,
    model: nn.Module,
    batch: Batch,
    classes: int,
    cache: PlanCache,
) -> Settings:
    """Replace `engine="auto"` and `tolerance=None` by the engine and tolerance that scores will use.

    An explicitly named engine is kept; its tolerance defaults to 0, so `exact` uses every class.
    With `auto`, exact gradients of all classes are preferred if they are cheap enough.

    Args:
        settings: the settings as the user gave them.
        model: the model, inside `preserve_state`.
        batch: samples like those to be scored.
        classes: the number of classes of the model.
        cache: the cached plans of the model, to which the plan made here is added.

    Returns:
        The settings with an engine other than `auto` and a tolerance.
    """
    tolerance = settings.tolerance or 0.0
    if settings.engine != "auto":
        return replace(settings, tolerance=tolerance)
    exact = replace(settings, engine="exact", tolerance=tolerance)
    # The user chose the tolerance, or sampling a few classes would gain nothing.
    if settings.tolerance is not None or classes < MIN_CLASSES:
        return exact
    request = _request_all_classes(model, batch, exact)
    passes = count_exact_passes(request, classes, cache)
    if passes <= MAX_EXACT_PASSES:
        return exact
    log.info(
        "exact gradients would take %.0f forward passes per input; estimating scores from some of "
        "the classes",
        passes,
    )
    return replace(exact, tolerance=TOLERANCE)


def resolve_layer_engine(
    settings: Settings,
    model: nn.Module,
    batch: Batch,
) -> Settings:
    """Replace `engine="auto"` by the engine for norms of all classes and layers: `exact` or `sketch`.

    `sketch` is chosen if exact gradients take too many passes, and a sketch takes fewer. For norms
    of layers a sketch pushes its random tangents through the model once for each layer.

    Args:
        settings: the settings as the user gave them.
        model: the model, inside `preserve_state`.
        batch: samples like those to be measured.

    Returns:
        The settings with an engine other than `auto`.
    """
    if settings.engine != "auto":
        return settings
    request = _request_all_classes(model, batch, replace(settings, engine="exact"))
    first_sample = ModelInput(take_samples(batch, slice(0, 1)))
    num_classes = forward_logits(model, first_sample).shape[1]
    # A cache of its own, as the plan is made only to count passes.
    exact_passes = count_exact_passes(request, num_classes, PlanCache())
    num_layers = len(group_by_layer(model, list(request.selected), settings.granularity))
    sketch_passes = SKETCH_PASSES * Sketch().tangents * num_layers
    if exact_passes <= max(MAX_EXACT_PASSES, sketch_passes):
        log.info(
            "engine='auto' picked exact: %.0f forward passes per input, %.0f as a sketch",
            exact_passes,
            sketch_passes,
        )
        return replace(settings, engine="exact")
    # A warning, as the user gets estimates in place of exact norms.
    log.warning(
        "engine='auto' picked sketch: %.0f forward passes per input, %.0f exact",
        sketch_passes,
        exact_passes,
    )
    return replace(settings, engine="sketch")


def uses_class_sampling(settings: Settings, classes: int) -> bool:
    """Whether a score that is a sum over classes is estimated from a random subset of the classes.

    True for `MIN_CLASSES` classes or more, the engine `exact`, and a tolerance above 0.

    Args:
        settings: the settings that `resolve_engine` returned.
        classes: the number of classes of the model.
    """
    has_many_classes = classes >= MIN_CLASSES
    has_tolerance = bool(settings.tolerance)  # neither None nor 0
    return has_many_classes and has_tolerance and settings.engine_name == "exact"


def count_exact_passes(request: GradientRequest, classes: int, cache: PlanCache) -> float:
    """Count the cost of the exact gradients of all classes for one row, in forward passes.

    If samples of the request cannot be traced, plain autograd is counted instead.

    Args:
        request: a request for samples like those to be measured.
        classes: the number of classes of the model.
        cache: the cached plans of the model, to which the plan made here is added.
    """
    plan = ExactEngine(cache).plan(request)
    if isinstance(plan, Fallback):
        return FORWARD_PASSES + AUTOGRAD_PASSES * classes
    backward_passes = plan.passes_for_all_classes(request)
    return FORWARD_PASSES + backward_passes * plan.pass_cost(backward_passes)


def count_row_passes(
    request: GradientRequest,
    directions: float,
    cache: PlanCache,
    names: frozenset[str] | None = None,
) -> float:
    """Count the cost of some gradients of one row, in forward passes.

    It is the cost by the exact engine; by plain autograd for the reference engine, and if samples
    of the request cannot be traced. The plain forward pass that the traced one is compared with is
    not counted: all scores share it.

    Args:
        request: a request for samples like those to be measured.
        directions: the number of gradients for the row, on average.
        cache: the cached plans of the model, to which the plan made here is added.
        names: the names of the parameters whose gradients are wanted; None for all.
    """
    autograd_passes = 1 + AUTOGRAD_PASSES * directions
    # The reference engine computes each gradient by plain autograd.
    if request.settings.engine == "reference":
        return autograd_passes
    plan = ExactEngine(cache).plan(request)
    if isinstance(plan, Fallback):
        return autograd_passes
    # The exact engine takes one more backward pass, which shows that samples do not mix.
    backward_passes = directions + 1
    return 1 + backward_passes * plan.pass_cost(round(directions), names)


def _request_all_classes(model: nn.Module, batch: Batch, settings: Settings) -> GradientRequest:
    """Make a request for the gradients of all classes of the samples in `batch`."""
    return GradientRequest(
        model,
        batch,
        numbers=range(num_samples(batch)),
        settings=settings,
        directions=Directions(("classes",)),
    )
