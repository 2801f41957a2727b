"""What the gradient scores share: Σ_m w_m ‖g_m‖, or Σ_m w_m ‖g_m‖², over gradients g_m along some
directions.

With `+layers(λ)` ‖g‖ becomes Σ_l exp(λ(l - L)) ‖g_l‖, in which deeper layers count more. With
`+smooth(σ, N)` each g is averaged over perturbed inputs before any norm is taken (Wang & Ji, CVPR
2024, sections 4.2 and 4.3).

All gradient scores of a scorer with the same smoothing share one `GradientPass`. Norms are measured
(`_measure`), or estimated from random tangents (`_sketch`) or from a subset of the classes
(`_sample_classes`).
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from qualms.gradients.directions import Directions
from qualms.gradients.engines.choice import uses_class_sampling
from qualms.gradients.engines.layer_cut import find_layer_cut
from qualms.gradients.engines.sketch import project_gradients
from qualms.gradients.layer_table import LayerTable
from qualms.gradients.layers import total_norms
from qualms.gradients.request import GradientRequest
from qualms.gradients.settings import Smoothing
from qualms.gradients.sketching.projections import Projections
from qualms.methods.context import BatchContext
from qualms.methods.few_classes import ClassSums, layer_sums_by_few_classes
from qualms.methods.method import (
    FEW,
    GRADIENTS,
    Estimate,
    Method,
    Scale,
    convert_noise,
)
from qualms.parameters import FINITE_OR_NONE, Rule

LAMBDA = 0.3


def _as_smoothing(value: Any) -> Smoothing | None:
    """Return a `Smoothing` or None unchanged; raise a ValueError for other values.

    This is the `convert` function of the rule `SMOOTHING`.
    """
    if value is not None and not isinstance(value, Smoothing):
        raise ValueError
    return value


SMOOTHING = Rule("a qualms.Smoothing, or None", _as_smoothing)


def weighted_sum(norms: Float[Tensor, "b m"], weights: Float[Tensor, "b m"]) -> Float[Tensor, " b"]:
    """Compute Σ_m w_m n_m of each input, n_m a norm ‖g_m‖ or a power of it."""
    return (weights * norms).sum(-1)


@dataclass(frozen=True)
class GradientScore(Method):
    """Σ_m w_m ‖g_m‖, a weighted sum of the norms of gradients g_m along m directions of the logits.

    A subclass sets `direction`, and computes the weights in `weights`.

    Attributes:
        layers: λ of `+layers(λ)`; None leaves the modifier out. (Unrelated to `layers=` of
            `qualms.score`, which sets the granularity of a layer.)
        smooth: the input noise of `+smooth(σ, N)`; None leaves the modifier out.
        direction: the set of directions that gradients are taken along, such as `classes`:
            ∇θ log p_c for every class.
        power: the power of the norms: 1, or 2 for Σ_m w_m ‖g_m‖².

    Example:
        ```python
        from dataclasses import dataclass

        import torch
        import qualms


        @dataclass(frozen=True)
        class Surest(qualms.methods.GradientScore):  # ‖∇ log p(predicted class)‖
            name = "surest"
            paper = "none"
            cost = "2, and C backward"
            direction = "classes"

            def weights(self, probs):
                return (probs == probs.amax(-1, keepdim=True)).to(probs)


        print(qualms.score(torch.nn.Linear(4, 3), torch.randn(5, 4), Surest(layers=0.3)))
        ```
    """

    layers: float | None = None
    smooth: Smoothing | None = None

    needs = (GRADIENTS,)
    rules: ClassVar = {"layers": FINITE_OR_NONE, "smooth": SMOOTHING}
    direction: ClassVar[str]
    power: ClassVar[int] = 1

    @abstractmethod
    def weights(self, probs: Float[Tensor, "b c"]) -> Float[Tensor, "b m"]:
        """Compute the weight w_m of each gradient from the probabilities p of the classes."""

    def weights_at(self, logits: Float[Tensor, "b c"]) -> Float[Tensor, "b m"]:
        """Compute the weights w_m from the logits, in double precision."""
        return self.weights(logits.double().softmax(-1))

    def score(self, context: BatchContext) -> Float[Tensor, " b"]:
        """Compute one number for each input."""
        return self.estimate(context).values

    def estimate(self, context: BatchContext) -> Estimate:
        """Compute the scores, with standard errors if they are estimated from random tangents or from
        a subset of the classes.

        Scores that share these tangents or classes are computed together, at the first call for
        any of them.
        """
        if not self.is_estimate(context):
            return _measure(self, context)
        estimates: dict[GradientScore, Estimate] = context.once("gradient estimates", dict)
        if self not in estimates:
            is_sketch = context.model_context.settings.sketch is not None
            compute = _sketch if is_sketch else _sample_classes
            estimates.update(compute(self, context))
        return estimates[self]

    def is_estimate(self, context: BatchContext) -> bool:
        """Whether scores are estimated, from random tangents or from a subset of the classes."""
        return context.model_context.settings.sketch is not None or self.uses_class_sampling(
            context
        )

    def uses_class_sampling(self, context: BatchContext) -> bool:
        """Whether the score is estimated from a subset of the classes, as there are many."""
        settings = context.model_context.settings
        return self.direction == "classes" and uses_class_sampling(settings, context.num_classes)

    def layer_sums(self, context: BatchContext) -> tuple[list[str], Float[Tensor, "b l"]]:
        """Compute Σ_c w_c ‖g_cl‖ⁿ of each layer l, or estimate it from a subset of the classes.

        g_cl is the part of the gradient g_c that belongs to layer l, and n is `power`.

        Returns:
            The names of the layers, and their sums.
        """
        if self.uses_class_sampling(context):
            request = context.request(Directions(("classes",)), self.smooth)
            cache = context.model_context.cache
            return layer_sums_by_few_classes(request, self, cache, context.head_weight)
        table, norms = _norms(self, context)
        weights = self.weights_at(table.logits)
        return table.layers, torch.einsum("bc,bcl->bl", weights, norms**self.power)

    def note(self, context: BatchContext) -> str | None:
        """Return a sentence if scores are estimated from a subset of the classes; else None."""
        if not self.uses_class_sampling(context):
            return None
        tolerance = context.model_context.settings.tolerance or 0.0
        late = ", skipping early layers with a negligible contribution" if self.layers else ""
        return (
            f"{self.spec} is estimated from some of the {context.num_classes} classes{late}; "
            f"the standard error is at most {100 * tolerance:g} % of each score. "
            "Use engine='exact' for all classes and layers."
        )

    @property
    def spec(self) -> str:
        """The name with its modifiers, as in `regrad+layers(λ)+smooth(σ,N)`; if σ is per channel,
        only the first.
        """
        spec = self.name
        if self.layers is not None:
            spec += f"+layers({self.layers:g})"
        if self.smooth is not None:
            sigma = self.smooth.sigma
            first = sigma[0] if isinstance(sigma, tuple) else sigma
            spec += f"+smooth({first:g},{self.smooth.draws})"
        return spec

    def in_units(self, scale: Scale) -> "GradientScore":
        """Return the score with σ of its smoothing converted to the units of the model's input.

        Args:
            scale: converts a level in pixels to these units.
        """
        if self.smooth is None:
            return self
        sigma = convert_noise(self.smooth.sigma, scale)
        return replace(self, smooth=replace(self.smooth, sigma=sigma))

    def quick(self) -> "GradientScore":
        """Return the same score with two draws of smoothing at most."""
        if self.smooth is None:
            return self
        return replace(
            self,
            smooth=replace(self.smooth, draws=min(self.smooth.draws, FEW)),
        )


@dataclass(frozen=True)
class GradientPass:
    """One gradient computation for a batch, and the gradient scores that share it.

    Attributes:
        methods: the scores that share the pass.
        smooth: the input noise that they have in common.
        lam: the smallest λ among the scores, by which early layers are weighted; None if a score
            weights all layers equally, so that no layer may be skipped.
    """

    methods: tuple[GradientScore, ...]
    smooth: Smoothing | None
    lam: float | None

    @classmethod
    def of_scorer(cls, context: BatchContext, smooth: Smoothing | None) -> "GradientPass":
        """Create the pass of all gradient scores of the scorer with this smoothing.

        Args:
            context: the batch; its `model_context` holds the gradient scores.
            smooth: the smoothing; None for the scores without one.
        """
        methods = tuple(m for m in context.model_context.gradient_methods if m.smooth == smooth)
        lambdas = [m.layers for m in methods if m.layers is not None]
        has_lambdas = bool(lambdas) and len(lambdas) == len(methods)
        return cls(methods, smooth, min(lambdas) if has_lambdas else None)

    @classmethod
    def for_method(cls, method: GradientScore, context: BatchContext) -> "GradientPass":
        """Create the pass shared by the scorer's methods, or a separate pass for a method that is not
        one of them. A separate pass skips no layers.
        """
        if method in context.model_context.gradient_methods:
            return cls.of_scorer(context, method.smooth)
        return cls((method,), method.smooth, None)

    @property
    def directions(self) -> Directions:
        """The sets of directions of all scores, each once."""
        return Directions(tuple(dict.fromkeys(m.direction for m in self.methods)))

    def columns(self, method: GradientScore, context: BatchContext) -> slice:
        """Find where the directions of one score are on the axis m of the pass's norms."""
        return self.directions.columns(method.direction, context.num_classes)


def _norms(
    method: GradientScore,
    context: BatchContext,
) -> tuple[LayerTable, Float[Tensor, "b m l"]]:
    """Compute the norm table of a score's pass, and select the columns of the score.

    Returns:
        The table for all scores of the pass, and the norms along this score's directions.
    """
    shared = GradientPass.for_method(method, context)
    table = context.norm_table(shared.directions, shared.smooth, shared.lam)
    return table, table.values[:, shared.columns(method, context)].double()


def _measure(method: GradientScore, context: BatchContext) -> Estimate:
    """Compute the score from exact norms; its error is the share that skipped layers may add.

    With n = `method.power`, a share s of a norm is about n·s of its n-th power.
    """
    table, layer_norms = _norms(method, context)
    norms = total_norms(layer_norms, method.layers, context.model_context.settings.norm)
    # The table's logits, not the context's: the engine runs inputs alone if they influence each
    # other, and its logits then differ.
    weights = method.weights_at(table.logits)
    values = weighted_sum(norms**method.power, weights)
    return Estimate(values, method.power * table.left_out * values.abs())


def _sketch(method: GradientScore, context: BatchContext) -> dict[GradientScore, Estimate]:
    """Estimate all scores that share one sketch, a block of inputs at a time.

    The errors of the scores are linear in those of the norms.

    Args:
        method: the requested score; those with the same smoothing and λ are computed with it.
        context: the batch.

    Returns:
        The estimates of all of these scores.
    """
    shared = GradientPass.for_method(method, context)
    methods = dict.fromkeys(m for m in shared.methods if m.layers == method.layers)
    parts: dict[GradientScore, list[Estimate]] = {m: [] for m in methods}
    request = context.request(shared.directions, method.smooth)
    request, left_out = _skip_early_layers(request, method.layers, context)
    cache = context.model_context.cache
    for projections, logits in project_gradients(request, method.layers, cache):
        norms = projections.estimate_norms()
        for m in methods:
            columns = shared.columns(m, context)
            selected = Projections(projections.values[:, :, columns], projections.distribution)
            parts[m].append(_sketched_sum(m, selected, norms[:, columns], logits))
    estimates: dict[GradientScore, Estimate] = {}
    for m, blocks in parts.items():
        values = torch.cat([block.values for block in blocks])
        errors = torch.cat([block.errors for block in blocks if block.errors is not None])
        estimates[m] = Estimate(values, torch.hypot(errors, m.power * left_out * values))
    return estimates


def _sketched_sum(
    method: GradientScore,
    projections: Projections,
    norms: Float[Tensor, "b m"],
    logits: Float[Tensor, "b c"],
) -> Estimate:
    """Estimate Σ_m w_m ‖g_m‖ⁿ from projections on random tangents.

    Args:
        method: the score.
        projections: the projections of the score's gradients on the tangents.
        norms: the norms ‖g_m‖ estimated from the projections.
        logits: the logits of the inputs.
    """
    weights = method.weights_at(logits)
    # `weighted_error` takes the derivative of the sum with respect to each norm: w, or 2 w ‖g‖.
    if method.power == 2:
        values = weighted_sum(projections.estimate_squared_norms(), weights)
        return Estimate(values, projections.weighted_error(norms, 2 * weights * norms))
    return Estimate(
        weighted_sum(norms, weights),
        projections.weighted_error(norms, weights),
    )


def _skip_early_layers(
    request: GradientRequest,
    lam: float | None,
    context: BatchContext,
) -> tuple[GradientRequest, float]:
    """Restrict a request to the late layers, if the tolerance allows skipping the early ones.

    Args:
        request: the request for all layers.
        lam: λ of the scores; None if layers are weighted equally.
        context: the batch.

    Returns:
        The request for the late layers, and the largest share of a score that the skipped early
        layers contribute; the given request and 0 if no layer can be skipped.
    """
    late = find_layer_cut(request, lam, context.model_context.cache)
    while late is not None and late.num_early:
        # Checks a sample now and then. If its early layers count too much, fewer are skipped.
        if late.confirm_blindly(request):
            return late.narrow(request), late.share
    return request, 0.0


def _sample_classes(method: GradientScore, context: BatchContext) -> dict[GradientScore, Estimate]:
    """Estimate all scores that are sums over the same classes, from a subset of the classes.

    Args:
        method: the requested score; those with the same smoothing and direction are computed with
            it.
        context: the batch.

    Returns:
        The estimates of all of these scores.
    """
    shared = GradientPass.for_method(method, context)
    methods = dict.fromkeys(m for m in shared.methods if m.direction == method.direction)
    return class_sums(context, list(methods), shared.lam).estimate(context.logits)


def class_sums(
    context: BatchContext,
    methods: Sequence[GradientScore],
    lam: float | None,
) -> ClassSums:
    """Set up the estimation of sums over many classes from a subset of the classes.

    Args:
        context: the batch.
        methods: scores with the same smoothing.
        lam: the smallest λ of the pass that the scores share.
    """
    request = context.request(Directions(("classes",)), methods[0].smooth)
    cache = context.model_context.cache
    return ClassSums(
        request,
        methods,
        cache,
        context.head_weight,
        lam,
        context.known_logits,
    )
