"""What the gradient scores share: Σ_m w_m ‖g_m‖, or Σ_m w_m ‖g_m‖², over gradients g_m along some
directions.

With `+layers(λ)` ‖g‖ becomes Σ_l exp(λ(l - L)) ‖g_l‖, in which deeper layers count more. With
`+smooth(σ, N)` each g is averaged over perturbed inputs before any norm is taken (Wang & Ji, CVPR
2024, sections 4.2 and 4.3).

All gradient scores of a scorer with the same smoothing share one `GradientPass`. Norms are computed
(`_compute_exactly`), or estimated from random tangents (`_estimate_by_sketch`) or from a subset of
the classes (`_estimate_from_classes`).
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
from qualms.gradients.plan_cache import PlanCache
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

LAMBDA = 0.3  # the λ of `+layers` without a number


def _require_smoothing(value: Any) -> Smoothing | None:
    """Return a `Smoothing` or None unchanged; raise a ValueError for any other value.

    This is the `convert` function of the rule for the parameter `smooth`.
    """
    if value is not None and not isinstance(value, Smoothing):
        raise ValueError
    return value


SMOOTHING = Rule("a qualms.Smoothing, or None", _require_smoothing)


def weighted_sum(
    norms: Float[Tensor, "b m"],
    weights: Float[Tensor, "b m"],
) -> Float[Tensor, " b"]:
    """Compute Σ_m w_m n_m of each input.

    Args:
        norms: n_m, the norms of m gradients of each input, or powers of them.
        weights: w_m, their weights.
    """
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
        """Compute the weight w_m of each of the m gradients from the probabilities of the classes."""

    def weights_at(self, logits: Float[Tensor, "b c"]) -> Float[Tensor, "b m"]:
        """Compute the weight w_m of each of the m gradients from the logits, in double precision."""
        return self.weights(logits.double().softmax(-1))

    def score(self, context: BatchContext) -> Float[Tensor, " b"]:
        """Compute one number for each input."""
        return self.estimate(context).values

    def estimate(self, context: BatchContext) -> Estimate:
        """Compute the scores, with their standard errors.

        If they are estimated from random tangents or from a subset of the classes, all scores that
        share these tangents or classes are computed at the first call for any of them.
        """
        if not self.is_estimate(context):
            return _compute_exactly(self, context)
        # An empty dict at the first call for this batch.
        estimates: dict[GradientScore, Estimate] = context.get_or_compute(
            "gradient estimates", dict
        )
        if self not in estimates:
            if context.model_context.settings.sketch is not None:
                estimates.update(_estimate_by_sketch(self, context))
            else:
                estimates.update(_estimate_from_classes(self, context))
        return estimates[self]

    def is_estimate(self, context: BatchContext) -> bool:
        """Whether scores are estimated, from random tangents or from a subset of the classes."""
        uses_sketch = context.model_context.settings.sketch is not None
        return uses_sketch or self.uses_class_sampling(context)

    def uses_class_sampling(self, context: BatchContext) -> bool:
        """Whether scores are estimated from a subset of the classes, as the model has many."""
        settings = context.model_context.settings
        return self.direction == "classes" and uses_class_sampling(settings, context.num_classes)

    def layer_sums(self, context: BatchContext) -> tuple[list[str], Float[Tensor, "b l"]]:
        """Compute Σ_c w_c ‖g_cl‖ⁿ of each layer l, or estimate it from a subset of the classes c.

        g_cl is the part of the gradient of class c that belongs to layer l, w_c the weight of the
        class in the score, and n is `power`.

        Returns:
            The names of the layers, and their sums.
        """
        if self.uses_class_sampling(context):
            request = context.create_request(Directions(("classes",)), self.smooth)
            cache = context.model_context.cache
            return layer_sums_by_few_classes(request, self, cache, context.head_weight)
        table, layer_norms = _layer_norms(self, context)
        weights = self.weights_at(table.logits)
        return table.layers, torch.einsum("bc,bcl->bl", weights, layer_norms**self.power)

    def note(self, context: BatchContext) -> str | None:
        """Return a sentence if scores are estimated from a subset of the classes; else None."""
        if not self.uses_class_sampling(context):
            return None
        tolerance = context.model_context.settings.tolerance or 0.0
        skipping = ", skipping early layers with a negligible contribution" if self.layers else ""
        return (
            f"{self.spec} is estimated from some of the {context.num_classes} classes{skipping}; "
            f"the standard error is at most {100 * tolerance:g} % of each score. "
            "Use engine='exact' for all classes and layers."
        )

    @property
    def spec(self) -> str:
        """The name with its modifiers, as in `regrad+layers(λ)+smooth(σ,N)`.

        If σ has a value for each channel, only the first is named.
        """
        spec = self.name
        if self.layers is not None:
            spec += f"+layers({self.layers:g})"
        if self.smooth is not None:
            sigma = self.smooth.sigma
            first_sigma = sigma[0] if isinstance(sigma, tuple) else sigma
            spec += f"+smooth({first_sigma:g},{self.smooth.draws})"
        return spec

    def in_units(self, scale: Scale) -> "GradientScore":
        """Return the score with σ of its smoothing converted to the units of the model's input.

        Args:
            scale: converts a noise level in pixels to these units.
        """
        if self.smooth is None:
            return self
        sigma = convert_noise(self.smooth.sigma, scale)
        return replace(self, smooth=replace(self.smooth, sigma=sigma))

    def quick(self) -> "GradientScore":
        """Return the same score with at most two noisy copies of each input in its smoothing."""
        if self.smooth is None:
            return self
        draws = min(self.smooth.draws, FEW)
        return replace(self, smooth=replace(self.smooth, draws=draws))


@dataclass(frozen=True)
class GradientPass:
    """One gradient computation for a batch, and the gradient scores that share it.

    Attributes:
        methods: the scores that share the pass.
        smooth: the input noise that they have in common.
        lam: the smallest λ among the scores, which decides how many early layers may be skipped;
            None if a score weights all layers equally, so that no layer may be skipped.
    """

    methods: tuple[GradientScore, ...]
    smooth: Smoothing | None
    lam: float | None

    @classmethod
    def of_scorer(
        cls,
        context: BatchContext,
        smooth: Smoothing | None,
    ) -> "GradientPass":
        """Create the pass that is shared by all gradient scores of the scorer with this smoothing.

        Args:
            context: the batch; its `model_context` holds the gradient scores.
            smooth: the smoothing; None for the scores without one.
        """
        methods = tuple(m for m in context.model_context.gradient_methods if m.smooth == smooth)
        lambdas = [m.layers for m in methods if m.layers is not None]
        all_have_lambda = len(lambdas) == len(methods)
        # `default` is for an empty list, if no score has this smoothing.
        return cls(methods, smooth, min(lambdas, default=None) if all_have_lambda else None)

    @classmethod
    def for_method(
        cls,
        method: GradientScore,
        context: BatchContext,
    ) -> "GradientPass":
        """Return the pass that computes a score.

        The scorer's own methods share their pass. Any other method gets a pass of its own, without
        a λ, so it skips no layers.
        """
        if method in context.model_context.gradient_methods:
            return cls.of_scorer(context, method.smooth)
        return cls((method,), method.smooth, None)

    @property
    def directions(self) -> Directions:
        """The sets of directions of all scores, without duplicates."""
        return Directions(tuple(dict.fromkeys(m.direction for m in self.methods)))

    def columns(self, method: GradientScore, context: BatchContext) -> slice:
        """Return the indices of one score's directions among all directions of the pass."""
        return self.directions.indices_of(method.direction, context.num_classes)


def _layer_norms(
    method: GradientScore,
    context: BatchContext,
) -> tuple[LayerTable, Float[Tensor, "b m l"]]:
    """Compute the gradient norms of every layer l along the m directions of one score.

    Returns:
        The table of norms for all scores that share the pass, and the norms of this score.
    """
    shared_pass = GradientPass.for_method(method, context)
    table = context.measure_norms(shared_pass.directions, shared_pass.smooth, shared_pass.lam)
    return table, table.values[:, shared_pass.columns(method, context)].double()


def _compute_exactly(
    method: GradientScore,
    context: BatchContext,
) -> Estimate:
    """Compute the score from exact norms; its error is the share that skipped layers may add.

    If skipped layers hold a share s of a norm, they hold about n·s of its n-th power
    (n = `method.power`).
    """
    table, layer_norms = _layer_norms(method, context)
    norms = total_norms(layer_norms, method.layers, context.model_context.settings.norm)
    # The table's logits, not the context's: the engine runs inputs alone if they influence each
    # other, and its logits then differ.
    weights = method.weights_at(table.logits)
    values = weighted_sum(norms**method.power, weights)
    return Estimate(values, method.power * table.left_out * values.abs())


def _estimate_by_sketch(
    method: GradientScore,
    context: BatchContext,
) -> dict[GradientScore, Estimate]:
    """Estimate scores from projections of gradients on random tangents, a block of inputs at a time.

    Args:
        method: the requested score; those with the same smoothing and λ are computed with it, from
            the same tangents.
        context: the batch.

    Returns:
        The estimates of all of these scores.
    """
    shared_pass = GradientPass.for_method(method, context)
    # A dict, to drop duplicates but keep the order.
    methods = dict.fromkeys(m for m in shared_pass.methods if m.layers == method.layers)
    block_estimates: dict[GradientScore, list[Estimate]] = {m: [] for m in methods}
    cache = context.model_context.cache
    request = context.create_request(shared_pass.directions, method.smooth, method.layers)
    request, skipped_share = _skip_early_layers(request, cache)
    for projections, logits in project_gradients(request, method.layers, cache):
        norms = projections.estimate_norms()
        for m in methods:
            columns = shared_pass.columns(m, context)
            selected = replace(projections, values=projections.values[:, :, columns])
            block_estimates[m].append(
                _estimate_from_projections(m, selected, norms[:, columns], logits)
            )
    estimates: dict[GradientScore, Estimate] = {}
    for m, blocks in block_estimates.items():
        values = torch.cat([block.values for block in blocks])
        errors = torch.cat([block.errors for block in blocks if block.errors is not None])
        # A share s of a norm is about n·s of its n-th power.
        skipped_values = m.power * skipped_share * values
        estimates[m] = Estimate(values, torch.hypot(errors, skipped_values))
    return estimates


def _estimate_from_projections(
    method: GradientScore,
    projections: Projections,
    norms: Float[Tensor, "b m"],
    logits: Float[Tensor, "b c"],
) -> Estimate:
    """Estimate Σ_m w_m ‖g_m‖ⁿ, n = `method.power`, from projections of g_m on random tangents.

    Args:
        method: the score, which gives the weights w_m.
        projections: the projections of the score's gradients g_m on the tangents.
        norms: the norms ‖g_m‖ estimated from the projections.
        logits: the logits of the inputs.
    """
    weights = method.weights_at(logits)
    # The error of the sum is, to first order, that of the norms times the derivative of the sum
    # with respect to each norm: w_m if n = 1, and 2 w_m ‖g_m‖ if n = 2.
    if method.power == 2:
        values = weighted_sum(projections.estimate_squared_norms(), weights)
        derivatives = 2 * weights * norms
    else:
        values = weighted_sum(norms, weights)
        derivatives = weights
    return Estimate(values, projections.weighted_error(norms, derivatives))


def _skip_early_layers(
    request: GradientRequest,
    cache: PlanCache,
) -> tuple[GradientRequest, float]:
    """Restrict a request to the late layers, if the tolerance allows skipping the early ones.

    Args:
        request: the request for gradients of all layers.
        cache: the plans of the model, which keep what is skipped.

    Returns:
        The request for the late layers, and the largest share of a score that the skipped early
        layers contribute; the given request and 0 if no layer can be skipped.
    """
    cut = find_layer_cut(request, cache)
    while cut is not None and cut.num_early:
        # Now and then, `confirm_blindly` measures all layers of an input. If its early layers count
        # too much, it changes the cut to skip fewer layers and returns False: try again.
        if cut.confirm_blindly(request):
            return cut.narrow(request), cut.share
    return request, 0.0


def _estimate_from_classes(
    method: GradientScore,
    context: BatchContext,
) -> dict[GradientScore, Estimate]:
    """Estimate scores that are sums over all classes from a subset of the classes.

    Args:
        method: the requested score; those with the same smoothing and direction are computed with
            it, from the same classes.
        context: the batch.

    Returns:
        The estimates of all of these scores.
    """
    shared_pass = GradientPass.for_method(method, context)
    # A dict, to drop duplicates but keep the order.
    methods = dict.fromkeys(m for m in shared_pass.methods if m.direction == method.direction)
    return create_class_sums(context, list(methods), shared_pass.lam).estimate(context.logits)


def create_class_sums(
    context: BatchContext,
    methods: Sequence[GradientScore],
    lam: float | None,
) -> ClassSums:
    """Create the estimator of sums over many classes from a subset of the classes.

    Args:
        context: the batch.
        methods: gradient scores that are sums over all classes, with the same smoothing.
        lam: the smallest λ of the pass that the scores share; None if one of them weights all
            layers equally.
    """
    # All methods have the smoothing of the first one.
    request = context.create_request(Directions(("classes",)), methods[0].smooth, lam)
    return ClassSums(
        request=request,
        methods=methods,
        cache=context.model_context.cache,
        head=context.head_weight,
    )
