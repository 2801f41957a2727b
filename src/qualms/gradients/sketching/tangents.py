"""Random tangents on the weights, each the same whenever it is drawn: the seed, its number and
names decide it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from qualms.gradients.sketching.push import Tangent
from qualms.gradients.sketching.stable import Law
from qualms.random import generator

TANGENT_STREAM = 1_000_000_007  # sets the draws of tangents apart from those of inputs
GOLDEN = (
    0x9E3779B97F4A7C15  # an odd number that sets the generators of consecutive tangents far apart
)
MANY = 4096  # entries of a parameter whose sum with random signs is as good as normal
Layer = tuple[Sequence[str], float]  # its parameters and its weight a_l


@dataclass
class Tangents:
    """k random tangents, drawn when they are asked for; as many as fit into `room` bytes are kept,
    or held at once.
    """

    draw: Callable[..., Tangent]  # of a number, and of where to write
    law: Law
    like: dict[str, Tensor]
    room: int = 0
    kept: dict[int, Tangent] = field(default_factory=dict)
    stack: Tangent = field(default_factory=dict)  # where several are put side by side
    stands: tuple[int, int] = (0, 0)  # which ones are there

    @property
    def size(self) -> int:
        """Bytes of what is kept."""
        return sum(
            s.nbytes for tangent in (self.stack, *self.kept.values()) for s in tangent.values()
        )

    @property
    def at_once(self) -> int:
        """How many fit into `room`."""
        return self.room // max(1, sum(p.nbytes for p in self.like.values()))

    def __getitem__(self, j: int) -> Tangent:
        if j in self.kept:
            return self.kept[j]
        drawn = self.draw(j)
        if self.size + sum(s.nbytes for s in drawn.values()) <= self.room:
            self.kept[j] = drawn
        return drawn

    def stacked(self, start: int, stop: int) -> Tangent:
        """Tangents from number `start` to before `stop`, [k, …] for each parameter, until the next
        ones are asked for.

        Others are drawn anew: writing signs into memory at hand takes no longer than copying what
        was kept.
        """
        if not self.stack:
            self.kept.clear()
            self.stack = {
                name: p.new_empty(self.at_once, *p.shape).detach() for name, p in self.like.items()
            }
        if self.stands != (start, stop):
            self.stands = 0, 0  # none, if a draw fails
            for j in range(start, stop):
                self.draw(j, {name: s[j - start] for name, s in self.stack.items()})
            self.stands = start, stop
        return {name: s[: stop - start] for name, s in self.stack.items()}


def tangent(
    like: dict[str, Tensor],
    layers: Sequence[Layer],
    law: Law,
    l1: bool,
    seed: int,
    j: int,
    out: Tangent | None = None,
) -> Tangent:
    """Tangent number j: s_l for each layer, given by its parameters and its weight a_l; written to
    `out` if given.
    """
    drawn: Tangent = {}
    for names, weight in layers:
        scale = weight
        if law == "cauchy":
            common = _noise(seed, f"{min(names)} in common", j)
            scale = weight / float(torch.randn((), generator=common, dtype=torch.double))
        for name in names:
            noise, shape = _noise(seed, name, j), like[name].shape
            place = (
                torch.empty_like(like[name], memory_format=torch.contiguous_format)
                if out is None
                else out[name]
            )
            if l1:
                place.copy_(
                    weight * torch.empty(shape, dtype=torch.double).cauchy_(generator=noise)
                )
            elif law == "normal" and place.numel() >= MANY:
                write_signs(place, scale, noise)
            else:
                place.copy_(torch.randn(shape, generator=noise).mul_(scale))
            drawn[name] = place.detach()
    return drawn


def write_signs(place: Tensor, scale: float, noise: torch.Generator) -> None:
    """±scale for every entry of a contiguous tensor, eight at a time by a random byte.

    Normal numbers take ten times longer. For signs s, too, E (s·g)² = ‖g‖², with a variance of 2
    (‖g‖⁴ - Σ g_i⁴): no more than normal numbers give.
    """
    words = -(-place.numel() // 64)
    octets = (
        torch.empty(words, dtype=torch.int64)
        .random_(-(2**63), None, generator=noise)
        .view(torch.uint8)
    )
    table = ((torch.arange(256)[:, None] >> torch.arange(8) & 1) * 2 - 1).to(place).mul_(scale)
    index, flat = octets.int().to(place.device), place.view(-1)
    whole = place.numel() // 8
    torch.index_select(table, 0, index[:whole], out=flat[: 8 * whole].view(-1, 8))
    if 8 * whole < len(flat):
        flat[8 * whole :] = table[index[whole], : len(flat) - 8 * whole]


def _noise(seed: int, name: str, j: int) -> torch.Generator:
    """The generator of one parameter's part of tangent j."""
    return torch.Generator().manual_seed((_first_state(seed, name) + j * GOLDEN) % 2**64)


@lru_cache(maxsize=2**14)
def _first_state(seed: int, name: str) -> int:
    """Where the tangents of one parameter begin; kept, since mixing a name's letters takes longer
    than a small draw.
    """
    return generator(seed, TANGENT_STREAM, *name.encode()).initial_seed()
