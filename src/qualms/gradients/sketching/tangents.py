"""Random tangents on the weights: a random number for each entry of each parameter.

A tangent depends only on the seed, its number and the names of the parameters, so a tangent that
was dropped can be drawn again. The weights a_l of the layers are factors of the tangent: s_l = a_l
ξ_l for layer l, where ξ is the noise.
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

# So that draws for tangents and draws for samples are independent.
TANGENT_STREAM = 1_000_000_007
# Odd; distance between the seeds of consecutive tangents.
GOLDEN = 0x9E3779B97F4A7C15
# Entries from which on a sum with random signs is close enough to normal.
MIN_SIGNS = 4096

Tangent = dict[str, Tensor]  # by the parameter's name
# The names of its parameters, and its weight a_l.
WeightedLayer = tuple[Sequence[str], float]


@dataclass(frozen=True)
class TangentDistribution:
    """The distribution of tangents, from which a tangent is drawn by its number.

    Under the normal law, large parameters get random signs ±a_l and small ones normal numbers.
    Under the Cauchy law all parameters get normal numbers, which are divided by one more normal
    number for each layer; for L1 norms every entry is an independent Cauchy number instead.

    Attributes:
        parameters: the parameters that tangents are drawn for, by name.
        layers: the names of each layer's parameters, with the layer's weight a_l.
        law: distribution of a gradient's projection on a tangent.
        l1: whether the projections estimate L1 norms.
        seed: seed of the draws.
    """

    parameters: dict[str, Tensor]
    layers: Sequence[WeightedLayer]
    law: Law
    l1: bool
    seed: int

    @property
    def nbytes(self) -> int:
        """Bytes of one tangent."""
        return sum(p.nbytes for p in self.parameters.values())

    def draw(self, number: int, out: Tangent | None = None) -> Tangent:
        """Draw one tangent; the same number always gives the same tangent.

        Args:
            number: number of the tangent, from 0.
            out: contiguous tensors that the tangent is written to, by the parameter's name; new
                ones by default.
        """
        drawn: Tangent = {}
        for names, weight in self.layers:
            scale = weight
            # One more normal number for the whole layer.
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
        """Allocate a contiguous tensor for a parameter's part of a tangent."""
        return torch.empty_like(self.parameters[name], memory_format=torch.contiguous_format)


@dataclass
class Tangents:
    """Random tangents, drawn when they are needed and kept within a limit of memory.

    Attributes:
        distribution: distribution that tangents are drawn from.
        room: bytes of tangents that may be kept, either as single tangents or as a stack.
        stack_range: the first number in the stack, and the last one plus 1.
    """

    distribution: TangentDistribution
    room: int = 0
    _single: dict[int, Tangent] = field(default_factory=dict)  # kept tangents, by their number
    # K tangents, [k, …] for each parameter.
    _stack: Tangent = field(default_factory=dict)
    stack_range: tuple[int, int] = (0, 0)

    @property
    def law(self) -> Law:
        """Distribution of a gradient's projection on a tangent."""
        return self.distribution.law

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The parameters that tangents are drawn for, by name."""
        return self.distribution.parameters

    @property
    def nbytes(self) -> int:
        """Bytes of the tangents that are kept."""
        tangents = (self._stack, *self._single.values())
        return sum(_nbytes(tangent) for tangent in tangents)

    @property
    def stack_size(self) -> int:
        """Number of tangents that fit into `room`."""
        return self.room // max(1, self.distribution.nbytes)

    def __getitem__(self, number: int) -> Tangent:
        """Return the tangent of this number: a kept one, or a new draw, kept if `room` allows."""
        if number in self._single:
            return self._single[number]
        drawn = self.distribution.draw(number)
        if self.nbytes + _nbytes(drawn) <= self.room:
            self._single[number] = drawn
        return drawn

    def stack(self, start: int, stop: int) -> Tangent:
        """Return the tangents `start` to `stop - 1` as a stack, [k, …] for each parameter.

        At most `stack_size` tangents at once.
        The stack is overwritten by the next call for other numbers, which draws them: writing signs
        into allocated memory takes no longer than copying kept tangents would.
        """
        if not self._stack:
            self._single.clear()  # the stack takes their room
            for name, p in self.parameters.items():
                self._stack[name] = p.new_empty(self.stack_size, *p.shape).detach()
        if self.stack_range != (start, stop):
            self.stack_range = 0, 0  # stays so if a draw fails
            for number in range(start, stop):
                places = {name: s[number - start] for name, s in self._stack.items()}
                self.distribution.draw(number, places)
            self.stack_range = start, stop
        return {name: s[: stop - start] for name, s in self._stack.items()}


def _nbytes(tangent: Tangent) -> int:
    """Count the bytes of a tangent."""
    return sum(s.nbytes for s in tangent.values())


def tangents_of_layers(
    request: GradientRequest,
    layers: Sequence[WeightedLayer],
    *,
    add_norms: bool = False,
    room: int = 0,
) -> Tangents:
    """Set up tangents on the given layers; none is drawn yet.

    Args:
        request: the request; its settings have the norm to estimate and the seed.
        layers: the names of each layer's parameters, with the layer's weight a_l.
        add_norms: whether the projections estimate Σ_l a_l ‖g_l‖ instead of (Σ_l a_l² ‖g_l‖²)^½.
        room: bytes of tangents that may be kept.
    """
    l1 = request.settings.norm == "l1"
    law: Law = "cauchy" if l1 or add_norms else "normal"
    parameters: dict[str, Tensor] = {}
    for names, _ in layers:
        for name in names:
            parameters[name] = request.selected[name]
    seed = request.settings.seed
    return Tangents(TangentDistribution(parameters, layers, law, l1, seed), room)


def tangents_of_model(
    request: GradientRequest,
    counted: list[str],
    lam: float | None,
    cache: PlanCache,
) -> Tangents:
    """Set up tangents on the whole model, once for each λ; later calls return the same object.

    Args:
        request: the request; its settings say how layers are combined.
        counted: names of the parameters that count, in the model's order.
        lam: λ of the layer weights exp(λ(l - L)), where L is the last layer; None for no weights.
        cache: cache that the tangents are kept in; all tangents in it take at most a quarter of the
            memory budget.
    """

    def make() -> Tangents:
        """Set up the tangents, with what the cached ones leave of the memory as their room."""
        settings = request.settings
        groups = group_by_layer(request.model, counted, settings.granularity)
        weights = layer_weights(len(groups), lam or 0.0).tolist()
        layers = list(zip(groups.values(), weights, strict=True))
        sketch = settings.sketch or Sketch()
        add_norms = sketch.combine == "sum" and lam is not None
        others = [entry for entry in cache.entries.values() if isinstance(entry, Tangents)]
        room = request.budget // 4 - sum(other.nbytes for other in others)
        room = max(0, room)
        return tangents_of_layers(request, layers, add_norms=add_norms, room=room)

    return cache.get_or_compute(("tangents", lam, tuple(counted)), make)


def write_signs(place: Tensor, scale: float, noise: torch.Generator) -> None:
    """Write ±scale into every entry of a contiguous tensor, eight entries for each random byte.

    Normal numbers take ten times longer. Random signs s have E (s·g)² = ‖g‖² as well, with a
    variance of 2 (‖g‖⁴ - Σ g_i⁴), which is no larger than that of normal numbers.

    Args:
        place: tensor to overwrite.
        scale: absolute value of the entries.
        noise: generator of the random bytes.
    """
    # A word of 64 bits has 64 signs; rounded up.
    num_words = -(-place.numel() // 64)
    words = torch.empty(num_words, dtype=torch.int64)
    words.random_(-(2**63), None, generator=noise)
    octets = words.view(torch.uint8)
    bits = torch.arange(256)[:, None] >> torch.arange(8) & 1  # of each byte, [256, 8]
    # Row i has the eight entries ±scale that byte i stands for: [256, 8].
    signs_of_octet = (bits * 2 - 1).to(place).mul_(scale)
    index = octets.int().to(place.device)
    flat = place.view(-1)
    whole = place.numel() // 8
    end = 8 * whole
    # One byte for each eight entries; the last entries, fewer than eight, get a byte of their own.
    torch.index_select(signs_of_octet, 0, index[:whole], out=flat[:end].view(-1, 8))
    if end < len(flat):
        flat[end:] = signs_of_octet[index[whole], : len(flat) - end]


def _generator(seed: int, name: str, number: int) -> torch.Generator:
    """Create the generator for one parameter's part of the tangent with this number."""
    state = _first_state(seed, name) + number * GOLDEN
    return torch.Generator().manual_seed(state % 2**64)


@lru_cache(maxsize=2**14)
def _first_state(seed: int, name: str) -> int:
    """Return the seed for a parameter's part of tangent number 0, from which the others follow.

    Cached, since hashing a name takes longer than a small draw.
    """
    return generator(seed, TANGENT_STREAM, *name.encode()).initial_seed()
