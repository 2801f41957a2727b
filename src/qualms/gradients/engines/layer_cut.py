"""Leaves early layers out of Σ_l a_l ‖g_l‖, within a stated tolerance, so backward passes stop early.

The weights a_l = exp(λ(l - L)) fade toward the input, but norms may grow there, so the share of the
early layers is measured, not assumed. The first sample, by plain autograd along a few directions,
shows how many early layers add less than a quarter of the tolerance; from then on only gradients of
the late layers are computed. Of every 16 further samples the most unusual one, judged by the norms of
its late layers, is measured in all layers as well, and so is every sample more unusual than any
measured before. If the early layers of such a sample add more than the tolerance, fewer layers are
left out from then on, and its batch runs again. That is evidence, not proof: a sample that is unusual
in its early layers alone can slip through.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from qualms.gradients.batch import take_samples
from qualms.gradients.directions import DIRECTIONS, of_class
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

MARGIN = 4  # safety factor: the first sample's early layers may add a quarter of the tolerance
CHECK_EVERY = 16  # one of so many samples is measured in all layers
# Log of a factor of 2: a norm within it of the first sample's norm is nothing unusual.
MIN_DISTANCE = math.log(2)
TINY = torch.finfo(torch.double).tiny


class LayerCutEngine:
    """Leaves out early layers; their gradients are reported with norm zero.

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
        """Decide which early layers are left out; a `Fallback` if there are none."""
        cut = None
        if not request.gram:
            cut = find_layer_cut(request, request.smallest_lambda, self.cache)
        if cut is None or not cut.num_early:
            return Fallback("no layer can be left out", is_slow=False)
        return cut

    def run(self, plan: "LayerCut", request: GradientRequest) -> ClassNorms:
        """Compute the norms of the late layers; again with more layers if a spot check fails."""
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
    return cache.once(key, partial(LayerCut.of, request, lam))


@dataclass
class LayerCut:
    """How many early layers of a model are left out, and the evidence so far that this is safe.

    Args:
        lam: the smallest λ among the scores, whose weights fade slowest.
        tolerance: the largest share of a score that may be left out.
        layers: the parameter names of each layer, in order of use.
        num_early: the number of early layers left out.
        share: the largest observed share that the early layers contribute.
        typical: log ‖g_l‖ of the first sample's late layers, with which others are compared.
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
        """The names of the parameters of the late layers."""
        late = self.layers[self.num_early :]
        return frozenset(name for layer in late for name in layer)

    @classmethod
    def of(cls, request: GradientRequest, lam: float) -> "LayerCut | None":
        """Decide by the first sample of a request, whose gradients are measured in all layers.

        Args:
            request: the samples; `settings.tolerance` is the tolerance.
            lam: the smallest λ among the scores.

        Returns:
            The layer cut; None if no layer can be left out, or the order of layers is not fixed.
        """
        first = ModelInput(take_samples(request.batch, slice(0, 1)))
        order = use_order(request.model, first, request.selected)
        norms = _sample_norms(request, 0) if order.fixed else {}
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
        """Add zeros for the early layers to the norms of the late layers."""
        zeros = torch.zeros_like(next(iter(late_norms.values.values())))
        values: dict[str, Tensor] = {}
        for layer in self.layers[: self.num_early]:
            values |= dict.fromkeys(layer, zeros)
        values |= late_norms.values
        return replace(late_norms, values=values, left_out=self.share, num_left_out=self.num_early)

    def confirm(self, request: GradientRequest, late_norms: ClassNorms) -> bool:
        """Check by the most unusual sample, where a check is due, that early layers add little.

        Args:
            request: the samples.
            late_norms: the norms of the samples' late layers.

        Returns:
            Whether the norms may be used. If not, fewer layers are left out from now on, and the
            request has to run again.
        """
        norms = _per_layer(late_norms.values, self.layers[self.num_early :], request.settings.norm)
        profile = norms.amax(1).clamp_min(TINY).log()  # [b, l]
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
        """Check one sample in 16, where no norms of layers are known (sketches); see `confirm`."""
        self.unchecked += request.num_samples
        return self.unchecked < CHECK_EVERY or self._spot_check(request, request.num_samples - 1)

    def _spot_check(self, request: GradientRequest, sample: int) -> bool:
        """Measure one sample in all layers; if early layers exceed the tolerance, leave out fewer.

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
    """Norms of one sample's gradients along m directions, for each parameter that it uses.

    The directions are the predicted class, the sum of all classes with random signs, and every
    direction of the request that is not a class.

    Args:
        request: the samples, norm and directions.
        i: the index of the sample in the batch.
    """
    row = ModelInput(take_samples(request.batch, slice(i, i + 1)))
    norm = request.settings.norm

    def directions(logits: Float[Tensor, "1 c"]) -> Float[Tensor, "m 1 c"]:
        return _measured_directions(logits[:, None], request.directions.names)

    def reduce(gradient: Tensor) -> Float[Tensor, ""]:
        return norm_of(at_least_float32(gradient)[None], norm).double().squeeze()

    _, norms_of = sample_gradients(request.model, row, request.selected, directions, reduce)
    return {name: norms[None] for name, norms in norms_of.items()}


def _measured_directions(
    z: Float[Tensor, "1 1 c"],
    names: tuple[str, ...],
) -> Tensor:
    """The directions [m, 1, c] along which one sample is measured."""
    p = z.double().softmax(-1)
    generator = torch.Generator().manual_seed(0)
    signs = (torch.randint(0, 2, p.shape[-1:], generator=generator) * 2 - 1).to(p)
    parts = [of_class(z, z[:, 0].argmax(-1)), (signs - p * signs.sum())[None]]  # Σ_c ±(e_c - p)
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
    """For each l, the share of Σ_l a_l ‖g_l‖ of one sample that layers 1 to l contribute.

    Args:
        norms: the norms of the sample's gradients, by the parameters that it uses.
        layers: the parameter names of each layer, in order of use.
        lam: λ in a_l = exp(λ(l - L)).
        norm: which norm the gradients have, `l2` or `l1`.
    """
    layer_norms = _per_layer(norms, layers, norm)[0]
    cumulative = (layer_norms * layer_weights(len(layers), lam).to(layer_norms)).cumsum(-1)
    return cumulative / cumulative[:, -1:].clamp_min(TINY)


def _count_small(shares: Float[Tensor, "m l"], max_share: float) -> int:
    """How many early layers together add at most `max_share`, along every direction."""
    return int((shares <= max_share).all(0).long().cumprod(0).sum())


def _per_layer(
    norms: dict[str, Tensor],
    layers: list[list[str]],
    norm: str,
) -> Float[Tensor, "b m l"]:
    """Combine norms of parameters into norms of layers; a parameter that is missing counts as zero."""
    zeros = torch.zeros_like(next(iter(norms.values())))
    columns: list[Tensor] = []
    for names in layers:
        columns.append(combine_parameters((norms.get(name, zeros) for name in names), norm))
    return torch.stack(columns, dim=-1)
