"""Where a forward pass uses its parameters, and in which order."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class OpKey:
    """What identifies an operation in another pass: its name and parameters.

    The same key may occur several times in a pass.
    """

    name: str
    parameters: frozenset[str]


@dataclass
class ParamUse:
    """An operation that takes both parameters and something that depends on the input.

    Args:
        key: identifies it in another pass.
        occurrence: how often the same key occurred before, in this pass.
        arguments: all tensors among the operation's arguments.
        results: all tensors among its results.
        param_places: which of the arguments come from parameters alone.
    """

    key: OpKey
    occurrence: int
    arguments: list[Tensor]
    results: list[Tensor] = field(default_factory=list)
    param_places: set[int] = field(default_factory=set)

    @property
    def name(self) -> str:
        """The operation's name."""
        return self.key.name

    def place_of(self, t: Tensor) -> int:
        """Which argument `t` is."""
        return next(i for i, argument in enumerate(self.arguments) if argument is t)


def largest_result(param_uses: Iterable[ParamUse]) -> int:
    """Bytes of the largest result among them; 0 if there is none."""
    largest = 0
    for use in param_uses:
        for t in use.results:
            largest = max(largest, t.numel() * t.element_size())
    return largest


_ByKey = dict[tuple[OpKey, int], ParamUse]


@dataclass(frozen=True)
class TracePair:
    """The same forward pass traced on one row and on two: comparing them shows the batch axis.

    Args:
        one: uses of parameters on a single row.
        two: those on two rows.
        unbatched: operations in whose results no axis counts the rows, because the values of the
            input decide what goes where; added to while batches are traced.
    """

    one: list[ParamUse]
    two: list[ParamUse]
    unbatched: set[OpKey] = field(default_factory=set)

    def find(self, use: ParamUse) -> tuple[ParamUse, ParamUse] | None:
        """The same use in the two traces, or None if it is not in both."""
        key = (use.key, use.occurrence)
        one, two = self._one_by_key.get(key), self._two_by_key.get(key)
        if one is None or two is None:
            return None
        return one, two

    @cached_property
    def _one_by_key(self) -> _ByKey:
        return _by_key(self.one)

    @cached_property
    def _two_by_key(self) -> _ByKey:
        return _by_key(self.two)

    def compact(self) -> "TracePair":
        """Drop the graphs, and the values where shapes tell all: what remains may be kept."""
        for key, one in self._one_by_key.items():
            two = self._two_by_key.get(key, one)
            for i, (a, b) in enumerate(zip(one.arguments, two.arguments, strict=False)):
                if i not in one.param_places:
                    one.arguments[i], two.arguments[i] = _compact(a, b)
            results = list(zip(one.results, two.results, strict=False))
            one.results, two.results = [], []
            for a, b in results:
                a, b = _compact(a, b)
                one.results.append(a)
                two.results.append(b)
        return self


def _by_key(uses: Iterable[ParamUse]) -> _ByKey:
    return {(use.key, use.occurrence): use for use in uses}


def _compact(one: Tensor, two: Tensor) -> tuple[Tensor, Tensor]:
    grown = [a for a, b in zip(one.shape, two.shape, strict=False) if a != b]
    if all(size == 1 for size in grown):
        return torch.empty(one.shape, device="meta"), torch.empty(two.shape, device="meta")
    return one.detach(), two.detach()  # values tell the order of several entries of a row


@dataclass(frozen=True)
class UseOrder:
    """The order in which a forward pass first uses the parameters.

    Args:
        names: of the parameters, in that order.
        fixed: whether every pass uses that order, whatever its input.
    """

    names: list[str]
    fixed: bool

    def relevant(self, used: Collection[str], selected: Iterable[str]) -> list[str]:
        """The parameters whose layers count, in an order that does not depend on the inputs.

        In order of first use, without those that the logits do not depend on. If the path through
        the model depends on the input, both would vary from batch to batch: then all count, in the
        order in which the model has them.

        Args:
            used: names of parameters that the logits depend on.
            selected: names of all parameters that may count, in the model's order.
        """
        if not self.fixed:
            return list(selected)
        order = [name for name in self.names if name in used]
        rest = [name for name in selected if name in used and name not in order]
        return order + rest
