"""What the gradient scores share: Σ_m w_m ‖g_m‖, or Σ_m w_m ‖g_m‖², over gradients g_m along some
directions.

With `+layers(λ)` ‖g‖ becomes Σ_l exp(λ(l - L)) ‖g_l‖, in which deeper layers count more. With
`+smooth(σ, N)` each g is averaged over perturbed inputs before any norm is taken (Wang & Ji, CVPR
2024, sections 4.2 and 4.3).

All gradient scores of a scorer with the same smoothing share one `GradientPass`. Norms are measured
(`_measure`), or estimated from random tangents (`_sketch`) or from some of many classes
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
from qualms.methods.method import FEW, GRADIENTS, Estimate, Method, Scale, convert_noise
from qualms.parameters import FINITE_OR_NONE, Rule

LAMBDA = 0.3


def _as_smoothing(value: Any) -> Smoothing | None:
    if value is not None and not isinstance(value, Smoothing):
        raise ValueError
    return value


SMOOTHING = Rule("a qualms.Smoothing, or None", _as_smoothing)


def weighted_sum(norms: Float[Tensor, "b m"], weights: Float[Tensor, "b m"]) -> Float[Tensor, " b"]:
    """Σ_m w_m ‖g_m‖."""
    return (weights * norms).sum(-1)


@dataclass(frozen=True)
class GradientScore(Method):
    """Σ_m w_m ‖g_m‖ over the gradients along its directions.

    Attributes:
        layers: λ of `+layers(λ)`; None leaves the modifier out. (`layers=` of `qualms.score` is
            another thing: what a layer is.)
        smooth: the perturbations of `+smooth(σ, N)`; None leaves the modifier out.
        direction: along which gradients are taken, such as `classes`: ∇θ log p_c for every class.
        power: of the norms: 1, or 2 for Σ_m w_m ‖g_m‖².

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
        """w_m of each gradient, from the probabilities."""

    def weights_at(self, logits: Float[Tensor, "b c"]) -> Float[Tensor, "b m"]:
        """w_m from the logits, in double precision."""
        return self.weights(logits.double().softmax(-1))

    def score(self, context: BatchContext) -> Float[Tensor, " b"]:
        """Compute one number for each input."""
        return self.estimate(context).values

    def estimate(self, context: BatchContext) -> Estimate:
        """Compute the scores, with the standard errors of a sketch or of some of many classes.

        Scores that share their tangents or classes are computed together, when the first of them is
        asked for.
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
        """Whether scores come from random tangents, or from some of many classes."""
        return context.model_context.settings.sketch is not None or self.uses_class_sampling(
            context
        )

    def uses_class_sampling(self, context: BatchContext) -> bool:
        """Whether some of many classes stand for all of them."""
        settings = context.model_context.settings
        return self.direction == "classes" and uses_class_sampling(settings, context.num_classes)

    def layer_sums(self, context: BatchContext) -> tuple[list[str], Float[Tensor, "b l"]]:
        """Σ_c w_c ‖g_cl‖ⁿ of each layer l, over all classes or from some of many.

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
        """Say if scores are estimated from some of the classes, and how well."""
        if not self.uses_class_sampling(context):
            return None
        tolerance = context.model_context.settings.tolerance or 0.0
        late = ", skipping early layers with a negligible contribution" if self.layers else ""
        return (
            f"{self.spec} is estimated from some of the {context.num_classes} classes{late}; the standard error is "
            f"at most {100 * tolerance:g} % of each score. Use engine='exact' for all classes and layers."
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
        """Convert σ of smoothing to the units of the model's input."""
        if self.smooth is None:
            return self
        sigma = convert_noise(self.smooth.sigma, scale)
        return replace(self, smooth=replace(self.smooth, sigma=sigma))

    def quick(self) -> "GradientScore":
        """The same score with two draws of smoothing at most."""
        if self.smooth is None:
            return self
        return replace(self, smooth=replace(self.smooth, draws=min(self.smooth.draws, FEW)))


@dataclass(frozen=True)
class GradientPass:
    """One pass over a batch, and the gradient scores that it serves.

    Attributes:
        methods: the scores.
        smooth: their perturbations.
        lam: the smallest λ by which any of them weights early layers; None if one weights layers
            equally, so that none can be left out.
    """

    methods: tuple[GradientScore, ...]
    smooth: Smoothing | None
    lam: float | None

    @classmethod
    def of_scorer(cls, context: BatchContext, smooth: Smoothing | None) -> "GradientPass":
        """The pass of all gradient scores of the scorer with this smoothing."""
        own = tuple(m for m in context.model_context.gradient_methods if m.smooth == smooth)
        lambdas = [m.layers for m in own if m.layers is not None]
        has_lambdas = bool(lambdas) and len(lambdas) == len(own)
        return cls(own, smooth, min(lambdas) if has_lambdas else None)

    @classmethod
    def serving(cls, method: GradientScore, context: BatchContext) -> "GradientPass":
        """The pass that serves a score; one that is not of the scorer has a pass of its own."""
        if method in context.model_context.gradient_methods:
            return cls.of_scorer(context, method.smooth)
        return cls((method,), method.smooth, None)

    @property
    def directions(self) -> Directions:
        """The sets of directions of all scores, each once."""
        return Directions(tuple(dict.fromkeys(m.direction for m in self.methods)))

    def columns(self, method: GradientScore, context: BatchContext) -> slice:
        """Which directions of the pass are those of one score."""
        return self.directions.columns(method.direction, context.num_classes)


def _norms(
    method: GradientScore,
    context: BatchContext,
) -> tuple[LayerTable, Float[Tensor, "b m l"]]:
    """The table of the pass that serves a score, and the norms along the score's directions."""
    shared = GradientPass.serving(method, context)
    table = context.norm_table(shared.directions, shared.smooth, shared.lam)
    return table, table.values[:, shared.columns(method, context)].double()


def _measure(method: GradientScore, context: BatchContext) -> Estimate:
    """The score from measured norms; its error is what layers that were left out may add."""
    table, layer_norms = _norms(method, context)
    norms = total_norms(layer_norms, method.layers, context.model_context.settings.norm)
    # p of the rows as the engine ran them: alone, if inputs influence each other.
    weights = method.weights_at(table.logits)
    values = weighted_sum(norms**method.power, weights)
    return Estimate(values, method.power * table.left_out * values.abs())


def _sketch(method: GradientScore, context: BatchContext) -> dict[GradientScore, Estimate]:
    """All scores of one sketch, a block of inputs at a time.

    Their errors are linear in those of the norms.

    Args:
        method: the score that is asked for; scores with the same smoothing and λ come with it.
        context: the batch.
    """
    shared = GradientPass.serving(method, context)
    methods = dict.fromkeys(m for m in shared.methods if m.layers == method.layers)
    parts: dict[GradientScore, list[Estimate]] = {m: [] for m in methods}
    request = context.request(shared.directions, method.smooth)
    request, left_out = _skip_early_layers(request, method.layers, context)
    cache = context.model_context.cache
    for projections, logits in project_gradients(request, method.layers, cache):
        norms = projections.scale
        for m in methods:
            columns = shared.columns(m, context)
            own = Projections(projections.values[:, :, columns], projections.law)
            parts[m].append(_sketched_sum(m, own, norms[:, columns], logits))
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
    """Σ_m w_m ‖g_m‖ⁿ from projections on random tangents.

    Args:
        method: the score.
        projections: of its gradients.
        norms: estimated from them.
        logits: of the inputs.
    """
    weights = method.weights_at(logits)
    if method.power == 2:
        values = weighted_sum(projections.square, weights)
        return Estimate(values, projections.weighted_error(norms, 2 * weights * norms))
    return Estimate(weighted_sum(norms, weights), projections.weighted_error(norms, weights))


def _skip_early_layers(
    request: GradientRequest,
    lam: float | None,
    context: BatchContext,
) -> tuple[GradientRequest, float]:
    """Leave out the early layers that a tolerance allows to skip.

    Args:
        request: for all layers.
        lam: λ of the scores.
        context: the batch.

    Returns:
        The request for the layers that are left, and the largest share that the others add.
    """
    late = find_layer_cut(request, lam, context.model_context.cache)
    while late is not None and late.num_early:
        if late.confirm_blindly(request):
            return late.narrow(request), late.share
    return request, 0.0


def _sample_classes(method: GradientScore, context: BatchContext) -> dict[GradientScore, Estimate]:
    """All scores that are sums over the same classes, from some of them.

    Args:
        method: the score that is asked for; those with the same smoothing and direction come with
            it.
        context: the batch.
    """
    shared = GradientPass.serving(method, context)
    methods = dict.fromkeys(m for m in shared.methods if m.direction == method.direction)
    return class_sums(context, list(methods), shared.lam).estimate(context.logits)


def class_sums(
    context: BatchContext,
    methods: Sequence[GradientScore],
    lam: float | None,
) -> ClassSums:
    """Sums over many classes, to be estimated from some of them.

    Args:
        context: the batch.
        methods: the scores, with the same smoothing.
        lam: the smallest λ of the pass that serves them.
    """
    request = context.request(Directions(("classes",)), methods[0].smooth)
    cache = context.model_context.cache
    return ClassSums(request, methods, cache, context.head_weight, lam, context.known_logits)
