"""Where parameters and input come together in a forward pass."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class Meeting:
    """An operation that brought parameters and input together: its name, tensor arguments and tensor results."""

    name: str
    arguments: list[Tensor]
    results: list[Tensor] = field(default_factory=list)


def largest_result(meetings: Iterable[Meeting]) -> int:
    """Bytes of the largest result among them."""
    return max((t.numel() * t.element_size() for meeting in meetings for t in meeting.results), default=0)


@dataclass(frozen=True)
class TwinPasses:
    """The same forward pass on one row and on two: comparing them tells which axis counts the rows."""

    one: list[Meeting]
    two: list[Meeting]
