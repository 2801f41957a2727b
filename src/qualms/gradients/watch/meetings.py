"""Where parameters and input come together in a forward pass."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor


@dataclass(frozen=True)
class Place:
    """What an operation is known by in another pass: its name and parameters. The same may happen several times."""

    name: str
    parameters: frozenset[str]


@dataclass
class Meeting:
    """An operation that brought parameters and input together: where, its tensor arguments and tensor results."""

    place: Place
    time: int  # how often the same happened before, in this pass
    arguments: list[Tensor]
    results: list[Tensor] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Of the operation."""
        return self.place.name


def largest_result(meetings: Iterable[Meeting]) -> int:
    """Bytes of the largest result among them."""
    return max((t.numel() * t.element_size() for meeting in meetings for t in meeting.results), default=0)


@dataclass(frozen=True)
class TwinPasses:
    """The same forward pass on one row and on two: comparing them tells which axis counts the rows.

    `scattered` are the places where none does, because the values of the input decide what stands where.
    """

    one: list[Meeting]
    two: list[Meeting]
    scattered: set[Place] = field(default_factory=set)

    def of(self, meeting: Meeting) -> tuple[Meeting, Meeting] | None:
        """The same meeting in the two passes, if it takes place in both."""
        found = [of_pass.get((meeting.place, meeting.time)) for of_pass in self._by_place]
        one, two = found
        return None if one is None or two is None else (one, two)

    @cached_property
    def _by_place(self) -> tuple[dict[tuple[Place, int], Meeting], dict[tuple[Place, int], Meeting]]:
        one, two = ({(m.place, m.time): m for m in of_pass} for of_pass in (self.one, self.two))
        return one, two
