"""The parameters as leaves of our own, and where a forward pass uses them."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

# The parameters, and the graph that leads back to them.


@dataclass
class Weights:
    """The selected parameters as leaves of our own, and all others as constants.

    Args:
        names: from the id of a leaf to the name of its parameter.
        stand_in: from the id of a parameter to what replaces it in a traced pass: a leaf if it is
            selected, else a detached view.
        leaves: by the parameter's name.
    """

    names: dict[int, str]
    stand_in: dict[int, Tensor]
    leaves: dict[str, Tensor]

    @classmethod
    def of(
        cls, selected: dict[str, Tensor], every: Iterable[Tensor], channels_last: bool = False
    ) -> "Weights":
        """Make a leaf for each selected parameter, and a constant for each of the others.

        Args:
            selected: parameters that gradients are wanted for, by name.
            every: all parameters of the model.
            channels_last: copy kernels to that memory format once, so that not every convolution
                does.
        """

        def detach(p: Tensor) -> Tensor:
            plain = p.detach()
            if p.is_inference():
                plain = plain.clone()
            if channels_last and p.ndim == 4:
                return plain.contiguous(memory_format=torch.channels_last)
            return plain

        stand_in = {id(p): detach(p) for p in every}
        leaves = {name: stand_in[id(p)].requires_grad_() for name, p in selected.items()}
        names = {id(leaf): name for name, leaf in leaves.items()}
        return cls(names, stand_in, leaves)

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return next(iter(self.leaves.values())).device


def slice_of(t: Tensor, weights: Weights) -> tuple[str, int] | None:
    """The parameter's name and e, if a tensor is nothing but W[e] of a parameter; else None."""
    node: Any = t.grad_fn
    if type(node).__name__ != "SelectBackward0" or node._saved_dim != 0:
        return None
    source = node.next_functions[0][0]
    name = weights.names.get(id(getattr(source, "variable", None)))
    if name is None:
        return None
    index = int(node._saved_index)
    if index >= 2**63:  # torch shows 64 bits without a sign: -1 is the largest number
        index -= 2**64
    return name, index % len(weights.leaves[name])


def roots(t: Tensor, weights: Weights) -> set[str]:
    """The names of the parameters that a tensor was computed from."""
    if id(t) in weights.names:
        return {weights.names[id(t)]}
    found: set[str] = set()
    for node in nodes_behind([t.grad_fn]):
        leaf = id(getattr(node, "variable", None))
        if leaf in weights.names:
            found.add(weights.names[leaf])
    return found


def nodes_behind(nodes: list[Any]) -> set[Any]:
    """All nodes of the graph that a gradient would reach from these, including themselves."""
    seen: set[Any] = set()
    nodes = list(nodes)
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes.extend(n for n, _ in node.next_functions)
    return seen


@dataclass
class Reach:
    """Nodes of the graph that may be reached only through the result of their operation.

    A rule knows the cotangent of its operation's result. Whatever leads from the logits to the
    operation's parameters another way (a gradient that the forward pass takes itself, an autograd
    function) is not in that cotangent.

    Args:
        inside: from a node to the node of the result of the operation that made it.
    """

    inside: dict[Any, Any] = field(default_factory=dict)

    def enclose(self, result: Any, before: Iterable[Any]) -> None:
        """Add the nodes of an operation: those between its result and what was there before."""
        outside, nodes = set(before), [result]
        while nodes:
            node = nodes.pop()
            if node is not None and node not in outside and node not in self.inside:
                self.inside[node] = result
                nodes.extend(n for n, _ in node.next_functions)

    def bypasses_result(self, node: Any, follower: Any) -> bool:
        """Whether the step from node to follower enters an operation other than by its result."""
        result = self.inside.get(follower)
        if result is None or follower is result:
            return False
        return self.inside.get(node) is not result


# Where a pass uses the parameters, and in which order.


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
            results = zip(one.results, two.results, strict=False)
            pairs = [_compact(a, b) for a, b in results]
            one.results = [a for a, _ in pairs]
            two.results = [b for _, b in pairs]
        return self


def _by_key(uses: Iterable[ParamUse]) -> _ByKey:
    return {(use.key, use.occurrence): use for use in uses}


def _compact(one: Tensor, two: Tensor) -> tuple[Tensor, Tensor]:
    """A tensor on one row and on two without graphs, and without values if one row has one entry.

    The values tell the order of several entries of a row.
    """
    grown = [a for a, b in zip(one.shape, two.shape, strict=False) if a != b]
    if all(size == 1 for size in grown):
        return torch.empty(one.shape, device="meta"), torch.empty(two.shape, device="meta")
    return one.detach(), two.detach()


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
