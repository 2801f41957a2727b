"""Random tangents on the weights: a random number for each entry of each parameter.

A tangent s is a direction in the space of the parameters. It depends only on the seed, its index and
the names of the parameters, so a tangent that was dropped can be drawn again. The weights a_l of the
layers are factors of the tangent: s_l = a_l ξ_l for layer l, where ξ is the noise.
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
from qualms.gradients.sketching.projections import Distribution
from qualms.random import generator

# Makes the draws of tangents independent of other draws with the same seed.
TANGENT_STREAM = 1_000_000_007
# Distance between the seeds of consecutive tangents: 2⁶⁴ / golden ratio, an odd number, so that
# seeds modulo 2⁶⁴ do not repeat.
SEED_STEP = 0x9E3779B97F4A7C15
# A sum of at least so many numbers with random signs is close enough to normal.
MIN_SIGNS = 4096

# A dict from each parameter's name to the tangent's entries for it, in the parameter's shape.
Tangent = dict[str, Tensor]
# The names of a layer's parameters, and the layer's weight a_l.
WeightedLayer = tuple[Sequence[str], float]


@dataclass(frozen=True)
class TangentDistribution:
    """The distribution of random tangents, from which a tangent is drawn by its index.

    For normal projections, large parameters get random signs ±a_l and small ones normal numbers,
    times a_l. For Cauchy projections all parameters get normal numbers times a_l, which are divided
    by one more normal number for each layer. For L1 norms every entry is an independent Cauchy
    number times a_l instead.

    Attributes:
        parameters: the parameters that tangents are drawn for, by name.
        layers: the names of each layer's parameters, with the layer's weight a_l.
        projection_distribution: the distribution of a gradient's projection on a tangent.
        is_l1: whether the projections estimate L1 norms.
        seed: the seed of the draws.
    """

    parameters: dict[str, Tensor]
    layers: Sequence[WeightedLayer]
    projection_distribution: Distribution
    is_l1: bool
    seed: int

    @property
    def nbytes(self) -> int:
        """Bytes of one tangent."""
        return sum(p.nbytes for p in self.parameters.values())

    def draw(self, index: int, out: Tangent | None = None) -> Tangent:
        """Draw one tangent; the same index always gives the same tangent.

        Args:
            index: the index of the tangent, from 0.
            out: contiguous tensors that the tangent is written to, by the parameter's name; new
                ones by default.
        """
        tangent: Tangent = {}
        for names, weight in self.layers:
            scale = weight
            # A normal number divided by another one is Cauchy. One divisor for the layer makes its
            # projection Cauchy with scale ‖g_l‖; for L1, `_fill` draws Cauchy numbers instead.
            if self.projection_distribution == "cauchy" and not self.is_l1:
                # No parameter has this name, so the number is independent of all entries.
                noise = _generator(self.seed, f"{min(names)} in common", index)
                divisor = torch.randn((), generator=noise, dtype=torch.double)
                scale = weight / float(divisor)
            for name in names:
                entries = self._allocate(name) if out is None else out[name]
                self._fill(entries, scale, _generator(self.seed, name, index))
                tangent[name] = entries.detach()
        return tangent

    def _fill(self, entries: Tensor, scale: float, noise: torch.Generator) -> None:
        """Write random numbers times `scale` into the entries of one parameter.

        Args:
            entries: the entries of the tangent; overwritten.
            scale: the number that the entries are multiplied by.
            noise: the generator of the random numbers.
        """
        if self.is_l1:
            cauchy = torch.empty(entries.shape, dtype=torch.double)
            entries.copy_(scale * cauchy.cauchy_(generator=noise))
        elif self.projection_distribution == "normal" and entries.numel() >= MIN_SIGNS:
            # A sum of many entries with random signs is nearly normal, and signs are drawn faster.
            write_signs(entries, scale, noise)
        else:
            normal = torch.randn(entries.shape, generator=noise)
            entries.copy_(normal.mul_(scale))

    def _allocate(self, name: str) -> Tensor:
        """Allocate a tensor for a tangent's entries for one parameter, as `write_signs` needs it."""
        return torch.empty_like(self.parameters[name], memory_format=torch.contiguous_format)


@dataclass
class Tangents:
    """Random tangents, drawn when they are needed and kept within a limit of memory.

    They are kept either as single tangents or as a stack of consecutive tangents.

    Attributes:
        distribution: the distribution that tangents are drawn from.
        room: the bytes of tangents that may be kept.
        stack_range: the index of the first tangent in the stack, and that of the last one plus 1;
            (0, 0) if the stack holds none.
    """

    distribution: TangentDistribution
    room: int = 0
    # The single tangents that are kept, by their index.
    _single: dict[int, Tangent] = field(default_factory=dict)
    # For each parameter's name a tensor [stack_size, …], which is filled again for other tangents.
    _stack: Tangent = field(default_factory=dict)
    stack_range: tuple[int, int] = (0, 0)

    @property
    def projection_distribution(self) -> Distribution:
        """The distribution of a gradient's projection on a tangent."""
        return self.distribution.projection_distribution

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
        """The number of tangents that fit into `room` bytes."""
        return self.room // max(1, self.distribution.nbytes)

    def __getitem__(self, index: int) -> Tangent:
        """Return the tangent with this index, drawn if it is not kept, and kept if `room` allows."""
        if index in self._single:
            return self._single[index]
        tangent = self.distribution.draw(index)
        if self.nbytes + _nbytes(tangent) <= self.room:
            self._single[index] = tangent
        return tangent

    def stack(self, start: int, stop: int) -> Tangent:
        """Return the k = `stop - start` tangents from index `start` on, [k, …] for each parameter.

        At most `stack_size` tangents. A call for other indices draws them into the memory of the
        last result: writing random signs takes no longer than copying kept tangents would.

        Args:
            start: the index of the first tangent.
            stop: the index of the last tangent plus 1.
        """
        if not self._stack:
            # The stack takes the memory of single tangents.
            self._single.clear()
            for name, p in self.parameters.items():
                self._stack[name] = p.new_empty(self.stack_size, *p.shape).detach()
        if self.stack_range != (start, stop):
            # If a draw fails, the contents count as unknown.
            self.stack_range = 0, 0
            for index in range(start, stop):
                out = {name: s[index - start] for name, s in self._stack.items()}
                self.distribution.draw(index, out)
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
    """Set up random tangents on the parameters of the given layers; none is drawn yet.

    Args:
        request: the request; its settings have the norm to estimate and the seed.
        layers: the names of each layer's parameters, with the layer's weight a_l.
        add_norms: whether the projections estimate Σ_l a_l ‖g_l‖ instead of (Σ_l a_l² ‖g_l‖²)^½,
            with g_l the gradient of layer l.
        room: bytes of tangents that may be kept.
    """
    is_l1 = request.settings.norm == "l1"
    # Scales of Cauchy numbers add up: to Σ|g|, or to the sum of the layers' norms.
    distribution: Distribution = "cauchy" if is_l1 or add_norms else "normal"
    parameters: dict[str, Tensor] = {}
    for names, _ in layers:
        for name in names:
            parameters[name] = request.selected[name]
    return Tangents(
        TangentDistribution(
            parameters,
            layers,
            projection_distribution=distribution,
            is_l1=is_l1,
            seed=request.settings.seed,
        ),
        room,
    )


def tangents_of_model(
    request: GradientRequest,
    counted: list[str],
    lam: float | None,
    cache: PlanCache,
) -> Tangents:
    """Set up random tangents on the whole model, once for each λ; later calls return the same object.

    Args:
        request: the request; its settings say how layers are combined.
        counted: the names of the parameters of all layers that count in a score, layer by layer
            from the input on.
        lam: λ of the layer weights exp(λ(l - L)), where L is the last layer; None for no weights.
        cache: the cache of the model, in which the tangents are kept; all tangents in it take at
            most a quarter of the memory budget.
    """

    def make() -> Tangents:
        """Set up tangents that may take what cached tangents leave of a quarter of the budget."""
        settings = request.settings
        layers = group_by_layer(request.model, counted, settings.granularity)
        weights = layer_weights(len(layers), lam or 0.0).tolist()
        weighted_layers = list(zip(layers.values(), weights, strict=True))
        sketch = settings.sketch or Sketch()
        # Without λ there is one norm, that of the whole gradient: nothing to add.
        add_norms = sketch.combine == "sum" and lam is not None
        cached = [entry for entry in cache.entries.values() if isinstance(entry, Tangents)]
        cached_bytes = sum(tangents.nbytes for tangents in cached)
        room = max(0, request.budget // 4 - cached_bytes)
        return tangents_of_layers(request, weighted_layers, add_norms=add_norms, room=room)

    return cache.get_or_compute(("tangents", lam, tuple(counted)), make)


def write_signs(entries: Tensor, scale: float, noise: torch.Generator) -> None:
    """Write ±scale into every entry of a contiguous tensor, eight entries for each random byte.

    Normal numbers take ten times longer. Random signs s have E (s·g)² = ‖g‖² as well, with a
    variance of 2 (‖g‖⁴ - Σ g_i⁴), which is no larger than that of normal numbers.

    Args:
        entries: the tensor to overwrite.
        scale: the absolute value of the entries.
        noise: the generator of the random bytes.
    """
    num_words = -(-entries.numel() // 64)  # a word has 64 bits, one for each sign; rounded up
    words = torch.empty(num_words, dtype=torch.int64)
    # From the smallest int64 to the largest: all 64 bits are random.
    words.random_(-(2**63), None, generator=noise)
    random_bytes = words.view(torch.uint8).int().to(entries.device)
    # Row i has the bits of byte i, [256, 8]; then the eight entries ±scale that they stand for.
    bits_of_byte = torch.arange(256)[:, None] >> torch.arange(8) & 1
    signs_of_byte = (bits_of_byte * 2 - 1).to(entries).mul_(scale)
    flat = entries.view(-1)
    num_bytes = len(flat) // 8
    end = 8 * num_bytes
    out = flat[:end].view(-1, 8)
    torch.index_select(signs_of_byte, 0, random_bytes[:num_bytes], out=out)
    # The last entries, fewer than eight, get a byte of their own.
    if end < len(flat):
        flat[end:] = signs_of_byte[random_bytes[num_bytes], : len(flat) - end]


def _generator(seed: int, name: str, index: int) -> torch.Generator:
    """Create the generator of the random numbers for one parameter in the tangent with this index.

    Args:
        seed: the seed of all tangents.
        name: the name of the parameter.
        index: the index of the tangent.
    """
    tangent_seed = _first_seed(seed, name) + index * SEED_STEP
    return torch.Generator().manual_seed(tangent_seed % 2**64)


@lru_cache(maxsize=2**14)
def _first_seed(seed: int, name: str) -> int:
    """Derive the seed of a parameter's entries in the first tangent from the seed of all tangents.

    Cached, since hashing a name takes longer than a small draw.
    """
    return generator(seed, TANGENT_STREAM, *name.encode()).initial_seed()
