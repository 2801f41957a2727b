"""Where parameters and input come together in a forward pass."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class OpKey:
    """What an operation is known by in another pass: its name and parameters. The same may happen
    several times.
    """

    name: str
    parameters: frozenset[str]


@dataclass
class ParamUse:
    """An operation that brought parameters and input together: where, its tensor arguments and
    tensor results.
    """

    place: OpKey
    time: int  # how often the same happened before, in this pass
    arguments: list[Tensor]
    results: list[Tensor] = field(default_factory=list)
    tracked: frozenset[int] = frozenset()  # places of arguments that come from parameters alone

    @property
    def name(self) -> str:
        """Of the operation."""
        return self.place.name


def largest_result(param_uses: Iterable[ParamUse]) -> int:
    """Bytes of the largest result among them."""
    return max(
        (t.numel() * t.element_size() for meeting in param_uses for t in meeting.results), default=0
    )


@dataclass(frozen=True)
class TracePair:
    """The same forward pass on one row and on two: comparing them tells which axis counts the rows.

    `scattered` are the places where none does, because the values of the input decide what stands
    where.
    """

    one: list[ParamUse]
    two: list[ParamUse]
    scattered: set[OpKey] = field(default_factory=set)

    def of(self, meeting: ParamUse) -> tuple[ParamUse, ParamUse] | None:
        """The same meeting in the two passes, if it takes place in both."""
        found = [of_pass.get((meeting.place, meeting.time)) for of_pass in self._by_place]
        one, two = found
        return None if one is None or two is None else (one, two)

    @cached_property
    def _by_place(
        self,
    ) -> tuple[dict[tuple[OpKey, int], ParamUse], dict[tuple[OpKey, int], ParamUse]]:
        one, two = ({(m.place, m.time): m for m in of_pass} for of_pass in (self.one, self.two))
        return one, two

    def light(self) -> "TracePair":
        """The same without the graphs, and without values where shapes tell all: what may be kept."""
        first, second = self._by_place
        for place, one in first.items():
            two = second.get(place, one)
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
