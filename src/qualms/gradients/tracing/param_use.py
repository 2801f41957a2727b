"""Leaf tensors that replace the parameters in traced passes, and where a pass uses them."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

# The leaves, and the graph that leads back to them.


@dataclass
class Weights:
    """Tensors that replace the parameters in traced passes: leaves, or constants if not selected.

    Args:
        names: from the id of a leaf to the name of its parameter.
        stand_in: from the id of a parameter to the tensor that replaces it: a leaf if the parameter
            is selected, else a detached view.
        leaves: from the name of a selected parameter to its leaf.
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
            selected: parameters whose gradients are computed, by name.
            every: all parameters of the model.
            channels_last: whether to copy convolution kernels to that memory format here, once,
                instead of in every convolution.
        """

        def detach(p: Tensor) -> Tensor:
            """Detach a parameter; copy it if it is an inference tensor or changes its format."""
            constant = p.detach()
            if p.is_inference():
                constant = constant.clone()
            if channels_last and p.ndim == 4:
                return constant.contiguous(memory_format=torch.channels_last)
            return constant

        stand_in = {id(p): detach(p) for p in every}
        leaves = {name: stand_in[id(p)].requires_grad_() for name, p in selected.items()}
        names = {id(leaf): name for name, leaf in leaves.items()}
        return cls(names, stand_in, leaves)

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return next(iter(self.leaves.values())).device


def slice_of(t: Tensor, weights: Weights) -> tuple[str, int] | None:
    """Return W's name and e if a tensor is the slice W[e] of a selected parameter W, else None.

    Args:
        t: a tensor computed from parameters alone.
        weights: the leaves that replace the parameters.
    """
    # For W[e], autograd's node of `select`; its parent is the leaf W.
    node: Any = t.grad_fn
    if type(node).__name__ != "SelectBackward0" or node._saved_dim != 0:
        return None
    source = node.next_functions[0][0]
    name = weights.names.get(id(getattr(source, "variable", None)))
    if name is None:
        return None
    index = int(node._saved_index)
    # Torch stores the index as unsigned 64 bits: -1 is 2⁶⁴ - 1.
    if index >= 2**63:
        index -= 2**64
    return name, index % len(weights.leaves[name])


def roots(t: Tensor, weights: Weights) -> set[str]:
    """Return the names of the selected parameters that a tensor was computed from."""
    if id(t) in weights.names:
        return {weights.names[id(t)]}
    names: set[str] = set()
    for node in nodes_behind([t.grad_fn]):
        leaf_id = id(getattr(node, "variable", None))
        if leaf_id in weights.names:
            names.add(weights.names[leaf_id])
    return names


def nodes_behind(nodes: list[Any]) -> set[Any]:
    """Collect all autograd nodes that a backward pass from `nodes` visits, including `nodes`."""
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
    """Autograd nodes that a backward pass may enter only through the result of their operation.

    A rule computes a parameter's gradient from the cotangent of its operation's result. If the
    logits also depend on the inside of the operation in another way (by a gradient that the forward
    pass takes, or an autograd function), that part is missing in the cotangent.

    Args:
        inside: from each node inside an operation to the node of that operation's result.
    """

    inside: dict[Any, Any] = field(default_factory=dict)

    def enclose(self, result: Any, before: Iterable[Any]) -> None:
        """Add the nodes of one operation.

        Args:
            result: the node of the operation's result.
            before: the nodes of the operation's arguments, at which the search ends.
        """
        outside, nodes = set(before), [result]
        while nodes:
            node = nodes.pop()
            if node is not None and node not in outside and node not in self.inside:
                self.inside[node] = result
                nodes.extend(n for n, _ in node.next_functions)

    def bypasses_result(self, node: Any, follower: Any) -> bool:
        """Whether a backward pass that goes from `node` to `follower` bypasses a result.

        It does if `follower` is inside an operation and is not its result, and `node` is outside.
        """
        result = self.inside.get(follower)
        if result is None or follower is result:
            return False
        return self.inside.get(node) is not result


# Where a forward pass uses the parameters, and in which order.


@dataclass(frozen=True)
class OpKey:
    """Identifies an operation across forward passes, by its name and its parameters' names.

    The same key may occur several times in a pass.
    """

    name: str
    parameters: frozenset[str]


@dataclass
class ParamUse:
    """An operation that takes both parameters and something that depends on the input.

    Args:
        key: identifies the operation in another pass.
        occurrence: how often the same key occurred before, in this pass.
        arguments: all tensors among the operation's arguments.
        results: all tensors among the operation's results.
        param_places: indices of the `arguments` that were computed from parameters alone.
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
        """Return the index of `t` among the arguments."""
        return next(i for i, argument in enumerate(self.arguments) if argument is t)


def largest_result(param_uses: Iterable[ParamUse]) -> int:
    """Return the bytes of the largest result of any of the operations; 0 if there is none."""
    largest = 0
    for use in param_uses:
        for t in use.results:
            largest = max(largest, t.numel() * t.element_size())
    return largest


_ByKey = dict[tuple[OpKey, int], ParamUse]  # by the use's key and occurrence


@dataclass(frozen=True)
class TracePair:
    """The same forward pass traced on one row and on two: comparing them shows the batch axis.

    Args:
        one: uses of parameters in the pass on a single row.
        two: uses of parameters in the pass on two rows.
        unbatched: operations in whose results no axis counts the rows, because the values of the
            input decide where an entry goes; filled while batches are traced.
    """

    one: list[ParamUse]
    two: list[ParamUse]
    unbatched: set[OpKey] = field(default_factory=set)

    def find(self, use: ParamUse) -> tuple[ParamUse, ParamUse] | None:
        """Find the same use in the traces on one row and on two; None if one of them lacks it."""
        key = (use.key, use.occurrence)
        one, two = self._one_by_key.get(key), self._two_by_key.get(key)
        if one is None or two is None:
            return None
        return one, two

    @cached_property
    def _one_by_key(self) -> _ByKey:
        """The uses in the pass on a single row, by key and occurrence."""
        return _by_key(self.one)

    @cached_property
    def _two_by_key(self) -> _ByKey:
        """The uses in the pass on two rows, by key and occurrence."""
        return _by_key(self.two)

    def compact(self) -> "TracePair":
        """Free the graphs in place, and the values that `infer_layout` does not need; return self.

        Arguments computed from parameters alone keep their values and graphs.
        """
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
    """Index uses by their key and occurrence."""
    return {(use.key, use.occurrence): use for use in uses}


def _compact(one: Tensor, two: Tensor) -> tuple[Tensor, Tensor]:
    """Detach a tensor's two versions, and drop their values where the shapes alone show the layout.

    Values are kept if a row has several entries on that axis, because they show the entries' order.

    Args:
        one: the tensor when the model runs on one row.
        two: the tensor when the model runs on two rows.
    """
    grown = [a for a, b in zip(one.shape, two.shape, strict=False) if a != b]
    if all(size == 1 for size in grown):
        return torch.empty(one.shape, device="meta"), torch.empty(two.shape, device="meta")
    return one.detach(), two.detach()


@dataclass(frozen=True)
class UseOrder:
    """The order in which a forward pass first uses the parameters.

    Args:
        names: names of the parameters, in that order.
        fixed: whether every pass has the same order, whatever the input.
    """

    names: list[str]
    fixed: bool

    def relevant(self, used: Collection[str], selected: Iterable[str]) -> list[str]:
        """List the parameters whose layers count, in an order that does not depend on the inputs.

        These are the parameters that the logits depend on, in order of first use; any that were
        not traced come last. If the path through the model depends on the input, use and order vary
        from batch to batch: then all selected parameters count, in the model's order.

        Args:
            used: names of parameters that the logits depend on.
            selected: names of all parameters that may count, in the model's order.
        """
        if not self.fixed:
            return list(selected)
        traced = [name for name in self.names if name in used]
        untraced = [name for name in selected if name in used and name not in traced]
        return traced + untraced
