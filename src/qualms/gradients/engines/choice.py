"""`engine="auto"`: exact gradients where they are affordable, else estimates, by counted work and
not by the clock.

The exact engine pays one backward pass for each class. Multiplications are counted, in units of
those of a forward
pass: a backward pass through the activations takes as many again, and the norms of a layer's
gradients take whichever of two ways has fewer. So the same model has the same choice on every
machine.

- Scores: up to `EXACT_PASSES` forward passes for each row that is run, all classes are measured.
  Beyond, as few of them as a standard error of `TOLERANCE` allows (`exact/drawn_classes.py`), and
  of `+layers` scores the late layers alone.
- Norms of every class and layer: beyond that, a sketch, if it takes fewer passes.
"""

import logging
from dataclasses import replace

from torch import nn

from qualms.gradients.batch import Batch, num_samples, take_samples
from qualms.gradients.directions import Directions
from qualms.gradients.engines.class_sampling import MIN_CLASSES
from qualms.gradients.engines.exact import look_at
from qualms.gradients.engines.last_layer import count_multiplications
from qualms.gradients.engines.probe import Probe
from qualms.gradients.layers import group_by_layer
from qualms.gradients.model_input import ModelInput, forward_logits
from qualms.gradients.plan_cache import PlanCache
from qualms.gradients.request import GradientRequest
from qualms.gradients.settings import Settings, Sketch
from qualms.gradients.tracing.factors import GradFactor
from qualms.gradients.tracing.outer_product import Outer
from qualms.gradients.tracing.weights import roots

log = logging.getLogger("qualms")
EXACT_PASSES = 60.0  # forward passes that exact gradients of a row may take
TOLERANCE = 0.03  # the standard error of estimates, as a share of the score
PUSH_PASSES = 3.0  # of a tangent: a forward pass, and twice as much for the derivative
PASSES_BESIDE = 2.0  # the recorded forward pass, and the plain one that it is compared with
PLAIN_BACKWARD = 2.0  # by plain autograd, with the gradients of the weights


def resolve_engine(
    settings: Settings, model: nn.Module, batch: Batch, classes: int, learnt: PlanCache
) -> Settings:
    """The settings with the engine and the tolerance that scores of this model will have.

    An engine that was named keeps to what it says: without a tolerance, `exact` is exact.

    Args:
        settings: as they were given; `auto` and a tolerance of None are what is resolved.
        model: under `untouched`.
        batch: inputs like those to be scored.
        classes: of the model.
        learnt: where the look at the model is kept.
    """
    tolerance = settings.tolerance or 0.0
    if settings.engine != "auto":
        return replace(settings, tolerance=tolerance)
    exact = replace(settings, engine="exact", tolerance=tolerance)
    if settings.tolerance is not None or classes < MIN_CLASSES:
        return exact
    passes = exact_passes(_job(model, batch, exact), classes, learnt)
    if passes <= EXACT_PASSES:
        return exact
    log.info(
        "exact gradients would take %.0f forward passes a row: some of the classes stand for all",
        passes,
    )
    return replace(exact, tolerance=TOLERANCE)


def exact_passes(job: GradientRequest, classes: int, learnt: PlanCache) -> float:
    """Forward passes that the gradients of all classes of one row take, as counted."""
    probe = look_at(job, learnt)
    if isinstance(probe, Exception):  # rows run by plain autograd
        return PASSES_BESIDE + PLAIN_BACKWARD * classes
    last = probe.last_product
    by_features = probe.by_features(job.budget, 1, job.settings.norm, ("classes",))
    directions = last.weight.shape[1] + 2 if by_features and last is not None else classes
    return PASSES_BESIDE + directions * pass_work(probe, directions)


def pass_work(probe: Probe, directions: int, names: frozenset[str] | None = None) -> float:
    """What one backward pass takes, norms included, as a share of a forward pass.

    Args:
        probe: the model's operations.
        directions: how many share what is computed once.
        names: of the parameters whose gradients are wanted; all if not said. A pass goes no further
            than they do.
    """
    forward = sum(_forward(piece) for piece in probe.factors)
    late = [
        p
        for p in probe.factors
        if names is None or not names.isdisjoint(roots(p.target, probe.weights))
    ]
    work = sum(_forward(piece) + count_multiplications(piece, 1, directions) for piece in late)
    return work / max(1, forward)


def choose_for_layers(settings: Settings, model: nn.Module, batch: Batch) -> Settings:
    """The engine for norms of all classes and layers: exact, or a sketch with tangents for each
    layer if `auto`.
    """
    if settings.engine != "auto":
        return settings
    job = _job(model, batch, replace(settings, engine="exact"))
    classes = forward_logits(model, ModelInput(take_samples(batch, slice(0, 1)))).shape[1]
    passes = exact_passes(job, classes, PlanCache())
    layers = len(group_by_layer(job.model, list(job.selected), settings.granularity))
    sketched = PUSH_PASSES * Sketch().tangents * layers
    exact = passes <= max(EXACT_PASSES, sketched)
    if exact:
        log.info(
            "engine='auto' picked exact: %.0f forward passes a row, %.0f sketched", passes, sketched
        )
        return replace(settings, engine="exact")
    # Estimates instead of exact numbers are something to be told of.
    log.warning(
        "engine='auto' picked sketch: %.0f forward passes a row, %.0f exact", sketched, passes
    )
    return replace(settings, engine="sketch")


def _job(model: nn.Module, batch: Batch, settings: Settings) -> GradientRequest:
    return GradientRequest(
        model, batch, range(num_samples(batch)), settings, Directions(("classes",))
    )


def _forward(piece: GradFactor) -> int:
    """Multiplications of the operation on one row."""
    if not isinstance(piece.gradient, Outer):
        return piece.gradient.work
    t, o, f, g = piece.gradient.sizes
    return t * o * f * g
