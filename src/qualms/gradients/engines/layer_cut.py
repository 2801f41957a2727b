"""Leaves early layers out of Σ_l a_l ‖g_l‖, within a stated tolerance, so backward passes stop early.

A score is Σ_l a_l ‖g_l‖ over layers l = 1..L, with g_l the gradient of layer l. The weights
a_l = exp(λ(l - L)) fade toward the input, but norms may grow there, so the share of the early
layers is measured, not assumed. The first sample, by plain autograd along a few directions,
shows how many early layers add less than a quarter of the tolerance; from then on only gradients of
the late layers are computed. Of every 16 further samples the most unusual one, judged by the norms
of its late layers, is measured in all layers as well, and so is every sample more unusual than any
measured before. If the early layers of such a sample add more than the tolerance, fewer layers are
left out from then on, and its batch runs again. That is evidence, not proof: a sample that is
unusual in its early layers alone can slip through.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from qualms.gradients.batch import take_samples
from qualms.gradients.directions import DIRECTIONS, direction_of_class
from qualms.gradients.engines.base import ClassNorms, combine_parameters
from qualms.gradients.fallback import Fallback
from qualms.gradients.layers import group_by_layer, layer_weights
from qualms.gradients.measure import norm_of
from qualms.gradients.model_input import ModelInput
from qualms.gradients.plan_cache import PlanCache
from qualms.gradients.precision import at_least_float32
from qualms.gradients.request import GradientRequest
from qualms.gradients.single_sample import sample_gradients
from qualms.gradients.tracing.traced_forward import use_order

# The early layers of the first sample may add at most the tolerance divided by this factor.
SAFETY_FACTOR = 4
# Out of so many samples, one is measured in all layers.
CHECK_EVERY = 16
# A norm of at most twice, and at least half, the typical norm is nothing unusual.
MIN_DISTANCE = math.log(2)
# Keeps logarithms and quotients finite.
TINY = torch.finfo(torch.double).tiny


class LayerCutEngine:
    """Leaves out early layers whose share of a score is small; reports norm zero for them.

    Args:
        cache: the cached plans and measurements of the model.
        run_inner: runs the engine that computes the gradients of the late layers.
    """

    def __init__(
        self,
        cache: PlanCache,
        run_inner: Callable[[GradientRequest], ClassNorms],
    ) -> None:
        self.cache, self.run_inner = cache, run_inner

    def plan(self, request: GradientRequest) -> "LayerCut | Fallback":
        """Decide which early layers are left out; return a `Fallback` if none can be left out.

        Requests for inner products (`gram`) always need all layers.
        """
        cut = None
        if not request.gram:
            cut = find_layer_cut(request, self.cache)
        # A cached cut has 0 early layers if a later batch showed that none may be left out.
        if cut is None or cut.num_early == 0:
            return Fallback("no layer can be left out", is_slow=False)
        return cut

    def run(self, plan: "LayerCut", request: GradientRequest) -> ClassNorms:
        """Compute the norms of the late layers; if a spot check fails, repeat with more layers.

        Args:
            plan: how many early layers to leave out; a failed check lowers the number in place.
            request: the samples, and which of their gradients to compute.

        Returns:
            The norms of all layers, with zeros for the layers left out.
        """
        # This loop ends, as every failed check lowers `num_early`.
        while plan.num_early > 0:
            late_norms = self.run_inner(plan.narrow(request))
            if plan.confirm(request, late_norms):
                return plan.with_zeros(late_norms)
        return self.run_inner(request)


def find_layer_cut(request: GradientRequest, cache: PlanCache) -> "LayerCut | None":
    """Decide which early layers can be left out within the tolerance; cached per input shape.

    Args:
        request: the samples; `settings.tolerance` is the tolerance, and `smallest_lambda` the
            smallest λ among the scores, each Σ_l a_l ‖g_l‖ with weights a_l = exp(λ(l - L)) over
            layers l = 1..L.
        cache: the cached plans and measurements of the model.

    Returns:
        The layer cut; None if all layers have to be computed.
    """
    settings, lam = request.settings, request.smallest_lambda
    # Without a tolerance all layers count; without λ > 0 the weights do not fade toward the input.
    if not settings.tolerance or not lam or lam < 0:
        return None
    names = tuple(request.selected)
    key = ("layer cut", request.shapes, names, settings.granularity, settings.norm, lam)
    return cache.get_or_compute(key, partial(LayerCut.of, request, lam))


@dataclass
class LayerCut:
    """How many early layers of a model are left out, and the evidence so far that this is safe.

    A score is Σ_l a_l ‖g_l‖ over layers l = 1..L, with weights a_l = exp(λ(l - L)).

    Args:
        lam: the smallest λ among the scores, whose weights fade slowest toward the input.
        tolerance: the largest share of a score that may be left out.
        layers: the parameter names of each layer, in order of use.
        num_early: the number of early layers left out; the layers after them are the late layers.
        share: the largest observed share of a score that the early layers contribute.
        typical: log ‖g_l‖ of each late layer l (the largest ‖g_l‖ along any direction) for one
            sample, the first since the cut was made or changed. None before that sample.
        largest_distance: the largest difference of any log ‖g_l‖ from `typical` among the samples
            that were measured in all layers.
        unchecked: the number of samples since the last spot check.
    """

    lam: float
    tolerance: float
    layers: list[list[str]]
    num_early: int
    share: float
    typical: Float[Tensor, " l"] | None = None
    largest_distance: float = MIN_DISTANCE
    unchecked: int = 0

    @property
    def late_names(self) -> frozenset[str]:
        """The names of the parameters of the late layers, which are not left out."""
        late_layers = self.layers[self.num_early :]
        return frozenset(name for layer in late_layers for name in layer)

    @classmethod
    def of(cls, request: GradientRequest, lam: float) -> "LayerCut | None":
        """Measure the first sample of a request in all layers, and leave out small early layers.

        They may add at most a quarter (1 / `SAFETY_FACTOR`) of the tolerance to its score, so that
        other samples probably stay within the tolerance.

        Args:
            request: the samples; `settings.tolerance` is the tolerance.
            lam: the smallest λ among the scores.

        Returns:
            The layer cut; None if no layer can be left out, or the order of layers is not fixed.
        """
        first_sample = ModelInput(take_samples(request.batch, slice(0, 1)))
        order = use_order(request.model, first_sample, request.selected)
        if not order.fixed:
            return None
        norms = _measure_all_layers(request, index=0)
        # The sample uses none of the selected parameters.
        if not norms:
            return None
        # The parameters that the sample uses, in order of first use.
        names = order.relevant(norms, request.selected)
        names_by_layer = group_by_layer(request.model, names, request.settings.granularity)
        layers = list(names_by_layer.values())
        shares = _cumulative_shares(norms, layers, lam, request.settings.norm)
        tolerance = request.settings.tolerance or 0.0
        num_early = _count_small_layers(shares, tolerance / SAFETY_FACTOR)
        if num_early == 0:
            return None
        share = float(shares[:, num_early - 1].max())
        return cls(lam, tolerance, layers, num_early, share)

    def narrow(self, request: GradientRequest) -> GradientRequest:
        """Restrict a request to the parameters of the late layers.

        Backward passes then stop at the first late layer.
        """
        # `params` may be a function that says of a name whether the parameter is wanted.
        settings = replace(request.settings, params=self.late_names.__contains__)
        return replace(request, settings=settings)

    def with_zeros(self, late_norms: ClassNorms) -> ClassNorms:
        """Add zeros for the early layers to the norms of the late layers; record what was left out.

        Args:
            late_norms: the norms of the late layers, by the parameter's name.

        Returns:
            New norms with all parameters, early layers first, `left_out` and `num_left_out` set.
        """
        any_norms = next(iter(late_norms.values.values()))
        zeros = torch.zeros_like(any_norms)
        values: dict[str, Tensor] = {}
        for layer in self.layers[: self.num_early]:
            values |= dict.fromkeys(layer, zeros)
        values |= late_norms.values
        return replace(late_norms, values=values, left_out=self.share, num_left_out=self.num_early)

    def confirm(self, request: GradientRequest, late_norms: ClassNorms) -> bool:
        """If a check is due, measure the most unusual sample in all layers, by `_spot_check`.

        A sample is unusual if a norm of its late layers is far from that of a typical sample. A
        check is due after every `CHECK_EVERY` samples, or if a sample is more unusual than all that
        were measured in all layers before. Updates this cut's evidence in place.

        Args:
            request: the samples.
            late_norms: the norms of the samples' late layers, by the parameter's name.

        Returns:
            Whether the norms may be used. If not, fewer layers are left out from now on, and the
            request has to run again.
        """
        late_layers = self.layers[self.num_early :]
        norms = _combine_into_layers(late_norms.values, late_layers, request.settings.norm)
        # log ‖g_l‖ of each sample and late layer, [b, l], with the largest ‖g_l‖ of any direction.
        log_norms = norms.amax(1).clamp_min(TINY).log()
        if self.typical is None:
            self.typical = log_norms[0]
        distances = (log_norms - self.typical).abs().amax(-1)  # [b]
        most_unusual = int(distances.argmax())
        distance = float(distances[most_unusual])
        self.unchecked += request.num_samples
        if self.unchecked < CHECK_EVERY and distance <= self.largest_distance:
            return True
        self.largest_distance = max(self.largest_distance, distance)
        return self._spot_check(request, most_unusual)

    def confirm_blindly(self, request: GradientRequest) -> bool:
        """After every `CHECK_EVERY` samples, measure the last one in all layers, by `_spot_check`.

        For sketches, which have no norms of layers to find an unusual sample by.

        Args:
            request: the samples.

        Returns:
            Whether the cut still holds. If not, fewer layers are left out from now on, and the
            request has to run again.
        """
        self.unchecked += request.num_samples
        if self.unchecked < CHECK_EVERY:
            return True
        return self._spot_check(request, request.num_samples - 1)

    def _spot_check(self, request: GradientRequest, index: int) -> bool:
        """Measure one sample in all layers; if early layers exceed the tolerance, leave out fewer.

        Args:
            request: the samples.
            index: the index of the sample to measure.

        Returns:
            Whether the early layers add at most the tolerance to the sample's score.
        """
        self.unchecked = 0
        norms = _measure_all_layers(request, index)
        # The sample uses none of the selected parameters.
        if not norms:
            return True
        shares = _cumulative_shares(norms, self.layers, self.lam, request.settings.norm)
        early_share = float(shares[:, self.num_early - 1].max())
        if early_share <= self.tolerance:
            self.share = max(self.share, early_share)
            return True
        self.num_early = _count_small_layers(shares, self.tolerance / SAFETY_FACTOR)
        self.share = 0.0
        if self.num_early > 0:
            self.share = float(shares[:, self.num_early - 1].max())
        # The late layers are others now, so the next sample becomes the typical one.
        self.typical = None
        return False


def _measure_all_layers(
    request: GradientRequest,
    index: int,
) -> dict[str, Float[Tensor, "1 m"]]:
    """Compute the norms of one sample's gradients in all layers, by plain autograd.

    The m directions are those of `_spot_check_directions`. The sample runs without perturbed copies.

    Args:
        request: the samples, norm and directions.
        index: the index of the sample in the batch.

    Returns:
        The norms by the names of the parameters that the sample uses; empty if it uses none.
    """
    row = ModelInput(take_samples(request.batch, slice(index, index + 1)))
    kind = request.settings.norm

    def directions_at(logits: Float[Tensor, "1 c"]) -> Float[Tensor, "m 1 c"]:
        """Build the directions to differentiate along, at the sample's logits."""
        by_sample = logits[:, None]  # [samples, rows, classes]
        return _spot_check_directions(by_sample, request.directions.names)

    def reduce_to_norm(gradient: Tensor) -> Float[Tensor, ""]:
        """Replace a gradient by its norm, so that gradients are not held in memory."""
        # `norm_of` takes a batch of gradients; this is a batch of one.
        return norm_of(at_least_float32(gradient)[None], kind).double().squeeze()

    _, norms_by_name = sample_gradients(
        request.model, row, request.selected, directions_at, reduce_to_norm
    )
    return {name: norms[None] for name, norms in norms_by_name.items()}


def _spot_check_directions(
    z: Float[Tensor, "1 1 c"],
    names: tuple[str, ...],
) -> Float[Tensor, "m 1 c"]:
    """Build the directions along which one sample is measured in all layers.

    These are e_c - p for the predicted class c; Σ_c ±(e_c - p), one direction that involves all
    classes, with random signs that are always the same; and the request's directions that are not
    classes.

    Args:
        z: the logits of the sample, [samples, rows, classes].
        names: the names of the request's sets of directions.
    """
    p = z.double().softmax(-1)
    generator = torch.Generator().manual_seed(0)
    signs = (torch.randint(0, 2, p.shape[-1:], generator=generator) * 2 - 1).to(p)
    predicted_class = direction_of_class(z, z[:, 0].argmax(-1))
    # Σ_c s_c (e_c - p) = s - p Σ_c s_c, with s the signs.
    signed_sum = (signs - p * signs.sum())[None]
    directions = [predicted_class, signed_sum]  # each [k, 1, 1, c]
    for name in names:
        if name in DIRECTIONS and name != "classes":
            directions.append(DIRECTIONS[name](z))
    # Without the axis of rows: the sample has a single one.
    return torch.cat(directions)[:, :, 0]


def _cumulative_shares(
    norms: dict[str, Float[Tensor, "1 m"]],
    layers: list[list[str]],
    lam: float,
    norm: str,
) -> Float[Tensor, "m l"]:
    """Compute which share layers 1 to l together contribute to a sample's score, for each l.

    The score is Σ_l a_l ‖g_l‖ over layers l = 1..L, with weights a_l = exp(λ(l - L)).

    Args:
        norms: the norms of the sample's gradients along m directions, by the names of the
            parameters that it uses.
        layers: the parameter names of each layer, in order of use.
        lam: λ.
        norm: which norm was taken of the gradients, `l2` or `l1`.

    Returns:
        The shares along each direction; the last layer's entry is 1.
    """
    # [m, l] of the only sample.
    (layer_norms,) = _combine_into_layers(norms, layers, norm)
    weights = layer_weights(len(layers), lam).to(layer_norms)
    cumulative = (layer_norms * weights).cumsum(-1)
    return cumulative / cumulative[:, -1:].clamp_min(TINY)


def _count_small_layers(shares: Float[Tensor, "m l"], max_share: float) -> int:
    """How many early layers together contribute at most `max_share`, along every direction.

    Args:
        shares: the shares from `_cumulative_shares`: entry l is that of layers 1 to l together.
        max_share: the largest share that the early layers may contribute.
    """
    is_small = (shares <= max_share).all(0)
    # `cumprod` is 1 up to the first layer that is not small, then 0.
    return int(is_small.long().cumprod(0).sum())


def _combine_into_layers(
    norms: dict[str, Tensor],
    layers: list[list[str]],
    norm: str,
) -> Float[Tensor, "b m l"]:
    """Combine norms of parameters into norms of layers; a parameter that is missing counts as zero.

    Args:
        norms: the norms [b, m] of b samples along m directions, by the parameter's name.
        layers: the parameter names of each layer.
        norm: which norm they are, `l2` or `l1`.
    """
    any_norms = next(iter(norms.values()))
    zeros = torch.zeros_like(any_norms)
    layer_norms: list[Tensor] = []
    for names in layers:
        parameter_norms = [norms.get(name, zeros) for name in names]
        layer_norms.append(combine_parameters(parameter_norms, norm))
    return torch.stack(layer_norms, dim=-1)
