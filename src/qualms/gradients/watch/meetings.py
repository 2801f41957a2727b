"""Where parameters and input come together in a forward pass."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Meeting:
    """An operation that brought parameters and input together: its name, tensor arguments and tensor results."""

    name: str
    arguments: list[Tensor]
    results: list[Tensor] = field(default_factory=list)
    tracked: frozenset[int] = frozenset()  # places of arguments that come from parameters alone


def largest_result(meetings: Iterable[Meeting]) -> int:
    """Bytes of the largest result among them."""
    return max((t.numel() * t.element_size() for meeting in meetings for t in meeting.results), default=0)


@dataclass(frozen=True)
class TwinPasses:
    """The same forward pass on one row and on two: comparing them tells which axis counts the rows."""

    one: list[Meeting]
    two: list[Meeting]

    def light(self) -> "TwinPasses":
        """The same without the graphs, and without values where shapes tell all: what may be kept."""
        for one, two in zip(self.one, self.two, strict=False):
            for i, (a, b) in enumerate(zip(one.arguments, two.arguments, strict=False)):
                if i not in one.tracked:
                    one.arguments[i], two.arguments[i] = _light(a, b)
            pairs = [_light(a, b) for a, b in zip(one.results, two.results, strict=False)]
            one.results, two.results = [a for a, _ in pairs], [b for _, b in pairs]
        return self


def _light(one: Tensor, two: Tensor) -> tuple[Tensor, Tensor]:
    grown = [a for a, b in zip(one.shape, two.shape, strict=False) if a != b]
    if all(size == 1 for size in grown):  # values tell the order of several entries of a row
        return torch.empty(one.shape, device="meta"), torch.empty(two.shape, device="meta")
    return one.detach(), two.detach()
