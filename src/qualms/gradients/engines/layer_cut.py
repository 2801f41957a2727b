"""Where backward passes may stop: Σ_l a_l ‖g_l‖ without its first terms, within a stated tolerance.

The weights a_l = exp(λ(l - L)) fade toward the input, but norms may grow there, so what the first
layers add is measured, not assumed. One sample, by plain autograd along a few directions, shows how
many of the first layers add less than a quarter of the tolerance; gradients of the others are all
that is computed from then on. Of every 16 further samples the one that is most unlike those measured
so far, by the norms of its late layers, is measured in the same way, and so is every sample that is
more unlike them than any before. If the early layers of one add more than the tolerance, fewer
layers are left out from then on, and its batch runs again. That is evidence, not proof: a sample
whose early layers alone are out of the ordinary can slip through.
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

MARGIN = 4  # between what one sample shows and what others may do
CHECK_EVERY = 16  # samples, of which one is measured in full
# A norm that differs from the first sample's by less than this factor is nothing unusual.
MIN_DISTANCE = math.log(2)
TINY = torch.finfo(torch.double).tiny


class LayerCutEngine:
    """Leaves out early layers, whose gradients then have norm zero.

    Args:
        cache: of the model.
        run_inner: runs the engine that computes the gradients of the other layers.
    """

    def __init__(
        self,
        cache: PlanCache,
        run_inner: Callable[[GradientRequest], ClassNorms],
    ) -> None:
        self.cache, self.run_inner = cache, run_inner

    def plan(self, request: GradientRequest) -> "LayerCut | Fallback":
        """The layers that are left out; a `Fallback` if there are none."""
        cut = None
        if not request.gram:
            cut = find_layer_cut(request, request.smallest_lambda, self.cache)
        if cut is None or not cut.num_early:
            return Fallback("no layer can be left out", is_slow=False)
        return cut

    def run(self, plan: "LayerCut", request: GradientRequest) -> ClassNorms:
        """The norms of the late layers, once these samples confirm that the others add little."""
        while plan.num_early:
            found = self.run_inner(plan.narrow(request))
            if plan.confirm(request, found):
                return plan.with_zeros(found)
        return self.run_inner(request)


def find_layer_cut(
    request: GradientRequest,
    lam: float | None,
    cache: PlanCache,
) -> "LayerCut | None":
    """The layers that a tolerance leaves to be computed, found once for samples of one kind.

    Args:
        request: its settings hold the tolerance.
        lam: the smallest λ by which the scores weight early layers down; None if one does not.
        cache: of the model.

    Returns:
        The cut; None if all layers have to be computed.
    """
    settings = request.settings
    if not settings.tolerance or not lam or lam < 0:
        return None
    names = tuple(request.selected)
    key = ("layer cut", request.shapes, names, settings.granularity, settings.norm, lam)
    return cache.once(key, partial(LayerCut.of, request, lam))


@dataclass
class LayerCut:
    """The layers of one model whose gradients are computed, and what is known of the others.

    Args:
        lam: λ of the score that weights its layers down least.
        tolerance: the share of a score that may be left out.
        layers: the parameters of each layer, in order of use.
        num_early: how many of the first layers are left out.
        share: the largest share that they were seen to add.
        typical: log ‖g_l‖ of the first sample, late layers alone.
        largest_distance: how much the norms of a sample that was measured differed from these.
        unchecked: samples since the last one that was measured.
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
        """The late parameters."""
        late = self.layers[self.num_early :]
        return frozenset(name for layer in late for name in layer)

    @classmethod
    def of(cls, request: GradientRequest, lam: float) -> "LayerCut | None":
        """Measure the first sample of a request.

        Returns:
            The cut; None if no layer can be left out, or the order of layers is not fixed.
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
        """The same request for the late parameters alone: the others run without a graph."""
        settings = replace(request.settings, params=self.names.__contains__)
        return replace(request, settings=settings)

    def with_zeros(self, found: ClassNorms) -> ClassNorms:
        """The norms of the late layers, and zeros for those that are left out."""
        zeros = torch.zeros_like(next(iter(found.values.values())))
        values: dict[str, Tensor] = {}
        for layer in self.layers[: self.num_early]:
            values |= dict.fromkeys(layer, zeros)
        values |= found.values
        return replace(found, values=values, left_out=self.share, num_left_out=self.num_early)

    def confirm(self, request: GradientRequest, found: ClassNorms) -> bool:
        """Whether samples may do without the early layers, as far as the most unusual one shows.

        If not, fewer layers are left out from now on, and the request has to run again.

        Args:
            request: the samples.
            found: the norms of their late layers.
        """
        norms = _per_layer(found.values, self.layers[self.num_early :], request.settings.norm)
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
        """The same where no norms of layers are known, as of a sketch: by one sample in 16."""
        self.unchecked += request.num_samples
        return self.unchecked < CHECK_EVERY or self._spot_check(request, request.num_samples - 1)

    def _spot_check(self, request: GradientRequest, sample: int) -> bool:
        """Whether the early layers of one sample add at most the tolerance, by plain autograd."""
        self.unchecked = 0
        norms = _sample_norms(request, sample)
        if not norms:  # the sample uses no parameter that counts
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
    """Norms of the gradients of one sample, by the parameters that it uses.

    Along the predicted class, all classes with random signs, and every direction of the request
    that is not a class.
    """
    row = ModelInput(take_samples(request.batch, slice(i, i + 1)))
    norm = request.settings.norm

    def directions(logits: Float[Tensor, "1 c"]) -> Float[Tensor, "m 1 c"]:
        return _measured_directions(logits[:, None], request.directions.names)

    def reduce(gradient: Tensor) -> Float[Tensor, ""]:
        return norm_of(at_least_float32(gradient)[None], norm).double().squeeze()

    _, found = sample_gradients(request.model, row, request.selected, directions, reduce)
    return {name: norms[None] for name, norms in found.items()}


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
    """The share that the layers up to each one add to Σ_l a_l ‖g_l‖ of one sample.

    Args:
        norms: of its gradients, by the parameters that it uses.
        layers: the parameters of each layer, in order of use.
        lam: λ.
        norm: of the gradients.
    """
    of_layers = _per_layer(norms, layers, norm)[0]
    added = (of_layers * layer_weights(len(layers), lam).to(of_layers)).cumsum(-1)
    return added / added[:, -1:].clamp_min(TINY)


def _count_small(shares: Float[Tensor, "m l"], most: float) -> int:
    """How many of the first layers together add at most this share, along every direction."""
    return int((shares <= most).all(0).long().cumprod(0).sum())


def _per_layer(
    norms: dict[str, Tensor],
    layers: list[list[str]],
    norm: str,
) -> Float[Tensor, "b m l"]:
    """Norms of layers from those of parameters; zero for one that no sample here uses."""
    zeros = torch.zeros_like(next(iter(norms.values())))
    columns: list[Tensor] = []
    for names in layers:
        columns.append(combine_parameters((norms.get(name, zeros) for name in names), norm))
    return torch.stack(columns, dim=-1)
