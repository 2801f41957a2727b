"""Random tangents on the weights.

A tangent is the same whenever it is drawn: the seed, its number and the names of the parameters
decide it. The weights a_l of the layers are folded into it, s_l = a_l ξ_l for layer l.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from qualms.gradients.layers import group_by_layer, layer_weights
from qualms.gradients.plan_cache import PlanCache
from qualms.gradients.request import GradientRequest
from qualms.gradients.settings import Sketch
from qualms.gradients.sketching.projections import Law
from qualms.random import generator

TANGENT_STREAM = 1_000_000_007  # sets the draws of tangents apart from those of samples
GOLDEN = 0x9E3779B97F4A7C15  # odd, and sets the generators of consecutive tangents far apart
MIN_SIGNS = 4096  # entries of a parameter whose sum with random signs is as good as normal

Tangent = dict[str, Tensor]  # by the parameter's name
WeightedLayer = tuple[Sequence[str], float]  # the names of its parameters, and its weight a_l


@dataclass(frozen=True)
class TangentDistribution:
    """How tangents are drawn.

    Large parameters get random signs ±a_l under the normal law, small ones normal numbers. Under
    the Cauchy law all of a layer's normal numbers are divided by one more, common to the layer; for
    L1 norms every entry is Cauchy of its own.

    Attributes:
        like: the parameters.
        layers: their layers, with weights.
        law: of the projections.
        l1: whether they estimate L1 norms.
        seed: decides the draws.
    """

    like: dict[str, Tensor]
    layers: Sequence[WeightedLayer]
    law: Law
    l1: bool
    seed: int

    @property
    def nbytes(self) -> int:
        """The size of one tangent."""
        return sum(p.nbytes for p in self.like.values())

    def draw(self, number: int, out: Tangent | None = None) -> Tangent:
        """Draw one tangent.

        Args:
            number: which one.
            out: where it is written, by name; new tensors by default.
        """
        drawn: Tangent = {}
        for names, weight in self.layers:
            scale = weight
            if self.law == "cauchy":
                noise = _generator(self.seed, f"{min(names)} in common", number)
                common = torch.randn((), generator=noise, dtype=torch.double)
                scale = weight / float(common)
            for name in names:
                place = self._new(name) if out is None else out[name]
                noise = _generator(self.seed, name, number)
                if self.l1:
                    entries = torch.empty(place.shape, dtype=torch.double)
                    place.copy_(weight * entries.cauchy_(generator=noise))
                elif self.law == "normal" and place.numel() >= MIN_SIGNS:
                    write_signs(place, scale, noise)
                else:
                    normal = torch.randn(place.shape, generator=noise)
                    place.copy_(normal.mul_(scale))
                drawn[name] = place.detach()
        return drawn

    def _new(self, name: str) -> Tensor:
        return torch.empty_like(self.like[name], memory_format=torch.contiguous_format)


@dataclass
class Tangents:
    """Random tangents that are drawn when they are asked for.

    Attributes:
        distribution: how they are drawn.
        room: bytes that may be kept, either as single tangents or as a stack of several.
    """

    distribution: TangentDistribution
    room: int = 0
    _single: dict[int, Tangent] = field(default_factory=dict)
    _stack: Tangent = field(default_factory=dict)  # [k, …], where several are put side by side
    stack_range: tuple[int, int] = (0, 0)  # the numbers of those in the stack

    @property
    def law(self) -> Law:
        """The distribution of projections on them."""
        return self.distribution.law

    @property
    def like(self) -> dict[str, Tensor]:
        """The parameters that they are tangents on."""
        return self.distribution.like

    @property
    def nbytes(self) -> int:
        """Bytes of what is kept."""
        tangents = (self._stack, *self._single.values())
        return sum(_nbytes(tangent) for tangent in tangents)

    @property
    def stack_size(self) -> int:
        """How many fit into `room`."""
        return self.room // max(1, self.distribution.nbytes)

    def __getitem__(self, number: int) -> Tangent:
        if number in self._single:
            return self._single[number]
        drawn = self.distribution.draw(number)
        if self.nbytes + _nbytes(drawn) <= self.room:
            self._single[number] = drawn
        return drawn

    def stack(self, start: int, stop: int) -> Tangent:
        """Tangents number `start` to `stop - 1`, [k, …] for each parameter.

        They are valid until the next ones are asked for. Others are drawn anew: writing signs into
        memory at hand takes no longer than copying what was kept.
        """
        if not self._stack:
            self._single.clear()
            for name, p in self.like.items():
                self._stack[name] = p.new_empty(self.stack_size, *p.shape).detach()
        if self.stack_range != (start, stop):
            self.stack_range = 0, 0  # none, if a draw fails
            for number in range(start, stop):
                places = {name: s[number - start] for name, s in self._stack.items()}
                self.distribution.draw(number, places)
            self.stack_range = start, stop
        return {name: s[: stop - start] for name, s in self._stack.items()}


def _nbytes(tangent: Tangent) -> int:
    return sum(s.nbytes for s in tangent.values())


def tangents_of_layers(
    request: GradientRequest,
    layers: Sequence[WeightedLayer],
    *,
    add_norms: bool = False,
    room: int = 0,
) -> Tangents:
    """Tangents on some layers.

    Args:
        request: its settings say which norm is estimated, and the seed.
        layers: the names of their parameters, and their weights a_l.
        add_norms: whether a projection's scale is Σ_l a_l ‖g_l‖, not (Σ_l a_l² ‖g_l‖²)^½.
        room: bytes of tangents that may be kept.
    """
    l1 = request.settings.norm == "l1"
    law: Law = "cauchy" if l1 or add_norms else "normal"
    like: dict[str, Tensor] = {}
    for names, _ in layers:
        for name in names:
            like[name] = request.selected[name]
    seed = request.settings.seed
    return Tangents(TangentDistribution(like, layers, law, l1, seed), room)


def tangents_of_model(
    request: GradientRequest,
    counted: list[str],
    lam: float | None,
    cache: PlanCache,
) -> Tangents:
    """Tangents on the whole model, made once for each λ.

    Args:
        request: its settings say how layers are combined.
        counted: the parameters that count, in the model's order.
        lam: layer l is weighted by exp(λ(l - L)); None for no weights.
        cache: where the tangents are kept, with at most a quarter of the budget for all of them.
    """

    def make() -> Tangents:
        settings = request.settings
        groups = group_by_layer(request.model, counted, settings.granularity)
        weights = layer_weights(len(groups), lam or 0.0).tolist()
        layers = list(zip(groups.values(), weights, strict=True))
        sketch = settings.sketch or Sketch()
        add_norms = sketch.combine == "sum" and lam is not None
        others = [found for found in cache.found.values() if isinstance(found, Tangents)]
        room = request.budget // 4 - sum(other.nbytes for other in others)
        room = max(0, room)
        return tangents_of_layers(request, layers, add_norms=add_norms, room=room)

    return cache.once(("tangents", lam, tuple(counted)), make)


def write_signs(place: Tensor, scale: float, noise: torch.Generator) -> None:
    """Write ±scale into every entry of a contiguous tensor, eight at a time by a random byte.

    Normal numbers take ten times longer. For signs s, too, E (s·g)² = ‖g‖², with a variance of
    2 (‖g‖⁴ - Σ g_i⁴): no more than normal numbers give.

    Args:
        place: the tensor.
        scale: the size of its entries.
        noise: where the signs come from.
    """
    num_words = -(-place.numel() // 64)
    words = torch.empty(num_words, dtype=torch.int64)
    words.random_(-(2**63), None, generator=noise)
    octets = words.view(torch.uint8)
    bits = torch.arange(256)[:, None] >> torch.arange(8) & 1
    signs_of_octet = (bits * 2 - 1).to(place).mul_(scale)
    index = octets.int().to(place.device)
    flat = place.view(-1)
    whole = place.numel() // 8
    end = 8 * whole
    torch.index_select(signs_of_octet, 0, index[:whole], out=flat[:end].view(-1, 8))
    if end < len(flat):
        flat[end:] = signs_of_octet[index[whole], : len(flat) - end]


def _generator(seed: int, name: str, number: int) -> torch.Generator:
    """The generator of one parameter's part of one tangent."""
    state = _first_state(seed, name) + number * GOLDEN
    return torch.Generator().manual_seed(state % 2**64)


@lru_cache(maxsize=2**14)
def _first_state(seed: int, name: str) -> int:
    """Where the tangents of one parameter begin.

    Kept, since mixing a name's letters takes longer than a small draw.
    """
    return generator(seed, TANGENT_STREAM, *name.encode()).initial_seed()
