"""Leaves early layers out of Σ_l a_l ‖g_l‖, within a stated tolerance, so backward passes stop early.

The weights a_l = exp(λ(l - L)) fade toward the input, but norms may grow there, so the share of the
early layers is measured, not assumed. The first sample, by plain autograd along a few directions,
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

# Safety factor: the first sample's early layers may add a quarter of the tolerance.
MARGIN = 4
CHECK_EVERY = 16  # one of so many samples is measured in all layers
# Log of a factor of 2: a norm within it of the first sample's norm is nothing unusual.
MIN_DISTANCE = math.log(2)
TINY = torch.finfo(torch.double).tiny


class LayerCutEngine:
    """Leaves out early layers whose share of a score is small; reports norm zero for them.

    Args:
        cache: the plans of the model.
        run_inner: runs the engine that computes the gradients of the late layers.
    """

    def __init__(
        self,
        cache: PlanCache,
        run_inner: Callable[[GradientRequest], ClassNorms],
    ) -> None:
        self.cache, self.run_inner = cache, run_inner

    def plan(self, request: GradientRequest) -> "LayerCut | Fallback":
        """Decide which early layers are left out; a `Fallback` if none can be.

        Inner products (`gram`) always need all layers.
        """
        cut = None
        if not request.gram:
            cut = find_layer_cut(request, request.smallest_lambda, self.cache)
        if cut is None or not cut.num_early:
            return Fallback("no layer can be left out", is_slow=False)
        return cut

    def run(self, plan: "LayerCut", request: GradientRequest) -> ClassNorms:
        """Compute the norms of the late layers; again with more layers if a spot check fails.

        Args:
            plan: the layer cut; a failed check changes it in place.
            request: what to compute.

        Returns:
            The norms of all layers, zero for the layers left out.
        """
        while plan.num_early:
            late_norms = self.run_inner(plan.narrow(request))
            if plan.confirm(request, late_norms):
                return plan.with_zeros(late_norms)
        return self.run_inner(request)


def find_layer_cut(
    request: GradientRequest,
    lam: float | None,
    cache: PlanCache,
) -> "LayerCut | None":
    """Decide which early layers can be left out within the tolerance; cached per input shape.

    Args:
        request: the samples; `settings.tolerance` is the tolerance.
        lam: the smallest λ among the scores; None if a score weights all layers equally.
        cache: the plans of the model.

    Returns:
        The layer cut; None if all layers have to be computed.
    """
    settings = request.settings
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
        num_early: the number of early layers left out.
        share: the largest observed share of a score that the early layers contribute.
        typical: log ‖g_l‖ of each late layer for one sample, the largest along any direction; the
            first sample that came since the cut was made or changed.
        largest_distance: the largest difference of log ‖g_l‖ from `typical` among the samples that
            were measured in all layers.
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
    def names(self) -> frozenset[str]:
        """The names of the parameters of the late layers, which are not left out."""
        late = self.layers[self.num_early :]
        return frozenset(name for layer in late for name in layer)

    @classmethod
    def of(cls, request: GradientRequest, lam: float) -> "LayerCut | None":
        """Decide by the first sample of a request, whose gradients are measured in all layers.

        Its early layers may add at most a quarter (1 / `MARGIN`) of the tolerance.

        Args:
            request: the samples; `settings.tolerance` is the tolerance.
            lam: the smallest λ among the scores.

        Returns:
            The layer cut; None if no layer can be left out, or the order of layers is not fixed.
        """
        first = ModelInput(take_samples(request.batch, slice(0, 1)))
        order = use_order(request.model, first, request.selected)
        norms = _sample_norms(request, 0) if order.fixed else {}
        # No fixed order, or the sample uses none of the selected parameters.
        if not norms:
            return None
        relevant = order.relevant(norms, request.selected)
        groups = group_by_layer(request.model, relevant, request.settings.granularity)
        layers = list(groups.values())
        shares = _early_shares(norms, layers, lam, request.settings.norm)
        tolerance = request.settings.tolerance or 0.0
        num_early = _count_small(shares, tolerance / MARGIN)
        if num_early == 0:
            return None
        return cls(lam, tolerance, layers, num_early, float(shares[:, num_early - 1].max()))

    def narrow(self, request: GradientRequest) -> GradientRequest:
        """Restrict a request to the parameters of the late layers; early layers then need no graph."""
        settings = replace(request.settings, params=self.names.__contains__)
        return replace(request, settings=settings)

    def with_zeros(self, late_norms: ClassNorms) -> ClassNorms:
        """Add zeros for the early layers to the norms of the late layers; record what was left out.

        Args:
            late_norms: the norms of the late layers, by the parameter's name.

        Returns:
            New norms with all parameters, early layers first, `left_out` and `num_left_out` set.
        """
        zeros = torch.zeros_like(next(iter(late_norms.values.values())))
        values: dict[str, Tensor] = {}
        for layer in self.layers[: self.num_early]:
            values |= dict.fromkeys(layer, zeros)
        values |= late_norms.values
        return replace(late_norms, values=values, left_out=self.share, num_left_out=self.num_early)

    def confirm(self, request: GradientRequest, late_norms: ClassNorms) -> bool:
        """If a check is due, measure the most unusual sample in all layers (`_spot_check`).

        A check is due after every `CHECK_EVERY` samples, or if a sample is more unusual than all
        that were measured in all layers before. Changes the counts of this cut in place.

        Args:
            request: the samples.
            late_norms: the norms of the samples' late layers, by the parameter's name.

        Returns:
            Whether the norms may be used. If not, fewer layers are left out from now on, and the
            request has to run again.
        """
        norms = _per_layer(late_norms.values, self.layers[self.num_early :], request.settings.norm)
        # [b, l]: the largest over the directions.
        profile = norms.amax(1).clamp_min(TINY).log()
        if self.typical is None:
            self.typical = profile[0]
        distances = (profile - self.typical).abs().amax(-1)
        farthest = int(distances.argmax())
        distance = float(distances[farthest])
        self.unchecked += request.num_samples
        if self.unchecked < CHECK_EVERY and distance <= self.largest_distance:
            return True
        self.largest_distance = max(self.largest_distance, distance)
        return self._spot_check(request, farthest)

    def confirm_blindly(self, request: GradientRequest) -> bool:
        """Like `confirm`, for sketches, which have no norms of layers to find unusual samples by.

        Measures the last sample of the request in all layers, once in `CHECK_EVERY` samples.
        """
        self.unchecked += request.num_samples
        return self.unchecked < CHECK_EVERY or self._spot_check(request, request.num_samples - 1)

    def _spot_check(self, request: GradientRequest, sample: int) -> bool:
        """Measure one sample in all layers; if early layers exceed the tolerance, leave out fewer.

        Args:
            request: the samples.
            sample: the index of the sample to measure.

        Returns:
            Whether the early layers add at most the tolerance.
        """
        self.unchecked = 0
        norms = _sample_norms(request, sample)
        if not norms:  # the sample uses none of the selected parameters
            return True
        shares = _early_shares(norms, self.layers, self.lam, request.settings.norm)
        added = float(shares[:, self.num_early - 1].max())
        if added <= self.tolerance:
            self.share = max(self.share, added)
            return True
        self.num_early = _count_small(shares, self.tolerance / MARGIN)
        self.share = float(shares[:, self.num_early - 1].max()) if self.num_early else 0.0
        self.typical = None
        return False


def _sample_norms(
    request: GradientRequest,
    i: int,
) -> dict[str, Float[Tensor, "1 m"]]:
    """Measure one sample's gradients in all layers by plain autograd: a norm per direction.

    The m directions are the predicted class, the sum of all classes with random signs, and the
    request's directions that are not classes. The sample runs without perturbed copies.

    Args:
        request: the samples, norm and directions.
        i: the index of the sample in the batch.

    Returns:
        The norms by the names of the parameters that the sample uses; empty if it uses none.
    """
    row = ModelInput(take_samples(request.batch, slice(i, i + 1)))
    norm = request.settings.norm

    def directions(logits: Float[Tensor, "1 c"]) -> Float[Tensor, "m 1 c"]:
        """The directions to differentiate along, at the sample's logits."""
        return _measured_directions(logits[:, None], request.directions.names)

    def reduce(gradient: Tensor) -> Float[Tensor, ""]:
        """Replace a gradient by its norm, so that gradients are not held in memory."""
        return norm_of(at_least_float32(gradient)[None], norm).double().squeeze()

    _, norms_of = sample_gradients(request.model, row, request.selected, directions, reduce)
    return {name: norms[None] for name, norms in norms_of.items()}


def _measured_directions(
    z: Float[Tensor, "1 1 c"],
    names: tuple[str, ...],
) -> Tensor:
    """Build the directions [m, 1, c] along which one sample is measured in all layers.

    Args:
        z: the logits of the sample.
        names: the names of the request's sets of directions. Sets of classes are replaced by the
            predicted class and the sum of all classes with random signs.
    """
    p = z.double().softmax(-1)
    generator = torch.Generator().manual_seed(0)
    signs = (torch.randint(0, 2, p.shape[-1:], generator=generator) * 2 - 1).to(p)
    # The second direction is Σ_c ±(e_c - p).
    parts = [direction_of_class(z, z[:, 0].argmax(-1)), (signs - p * signs.sum())[None]]
    for name in names:
        if name in DIRECTIONS and name != "classes":
            parts.append(DIRECTIONS[name](z))
    return torch.cat(parts)[:, :, 0]


def _early_shares(
    norms: dict[str, Float[Tensor, "1 m"]],
    layers: list[list[str]],
    lam: float,
    norm: str,
) -> Float[Tensor, "m l"]:
    """Compute the share of Σ_l a_l ‖g_l‖ that layers 1 to l contribute, for each l; one sample.

    Args:
        norms: the norms of the sample's gradients, by the parameters that it uses.
        layers: the parameter names of each layer, in order of use.
        lam: λ in a_l = exp(λ(l - L)).
        norm: which norm was taken of the gradients, `l2` or `l1`.

    Returns:
        The shares along each of m directions; the last layer's share is 1.
    """
    layer_norms = _per_layer(norms, layers, norm)[0]
    cumulative = (layer_norms * layer_weights(len(layers), lam).to(layer_norms)).cumsum(-1)
    return cumulative / cumulative[:, -1:].clamp_min(TINY)


def _count_small(shares: Float[Tensor, "m l"], max_share: float) -> int:
    """How many early layers together add at most `max_share`, along every direction.

    Args:
        shares: the shares from `_early_shares`: entry l is the share of layers 1 to l together.
        max_share: the largest share that the early layers may add.
    """
    return int((shares <= max_share).all(0).long().cumprod(0).sum())


def _per_layer(
    norms: dict[str, Tensor],
    layers: list[list[str]],
    norm: str,
) -> Float[Tensor, "b m l"]:
    """Combine norms of parameters into norms of layers; a parameter that is missing counts as zero.

    Args:
        norms: norms [b, m] by the parameter's name.
        layers: the parameter names of each layer.
        norm: which norm they are, `l2` or `l1`.
    """
    zeros = torch.zeros_like(next(iter(norms.values())))
    columns: list[Tensor] = []
    for names in layers:
        columns.append(combine_parameters((norms.get(name, zeros) for name in names), norm))
    return torch.stack(columns, dim=-1)
