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
    """The tensors that replace the model's parameters in traced passes.

    A selected parameter, whose gradient is computed, is replaced by a leaf of the autograd graph,
    any other parameter by a constant.

    Args:
        names: a dict from the id of a leaf to the name of its parameter.
        stand_in: a dict from the id of a parameter to the tensor that replaces it.
        leaves: a dict from the name of a selected parameter to its leaf.
    """

    names: dict[int, str]
    stand_in: dict[int, Tensor]
    leaves: dict[str, Tensor]

    @classmethod
    def of(
        cls,
        selected: dict[str, Tensor],
        parameters: Iterable[Tensor],
        channels_last: bool = False,
    ) -> "Weights":
        """Make a leaf for each selected parameter, and a constant for each of the others.

        Args:
            selected: parameters whose gradients are computed, by name.
            parameters: all parameters of the model.
            channels_last: whether to copy convolution kernels to that memory format here, once,
                instead of in every convolution.
        """

        def detach(p: Tensor) -> Tensor:
            """Detach a parameter; copy it if it is an inference tensor or changes its format."""
            constant = p.detach()
            # Autograd does not record operations on inference tensors.
            if p.is_inference():
                constant = constant.clone()
            if channels_last and p.ndim == 4:
                return constant.contiguous(memory_format=torch.channels_last)
            return constant

        stand_in = {id(p): detach(p) for p in parameters}
        leaves = {name: stand_in[id(p)].requires_grad_() for name, p in selected.items()}
        names = {id(leaf): name for name, leaf in leaves.items()}
        return cls(names, stand_in, leaves)

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return next(iter(self.leaves.values())).device


def slice_of(t: Tensor, weights: Weights) -> tuple[str, int] | None:
    """Return the name of W and the index e if a tensor is the slice W[e] of a selected parameter W.

    Args:
        t: a tensor computed from parameters alone.
        weights: the leaves that replace the parameters.

    Returns:
        (name, e), with e ≥ 0; None if the tensor is something else.
    """
    # For W[e], autograd's node of `select`; its parent is the node of the leaf W.
    node: Any = t.grad_fn
    if type(node).__name__ != "SelectBackward0" or node._saved_dim != 0:
        return None
    parent = node.next_functions[0][0]
    name = weights.names.get(id(getattr(parent, "variable", None)))
    if name is None:
        return None
    index = int(node._saved_index)
    # Torch stores the index as unsigned 64 bits: -1 is 2⁶⁴ - 1.
    if index >= 2**63:
        index -= 2**64
    return name, index % len(weights.leaves[name])


def roots(t: Tensor, weights: Weights) -> set[str]:
    """Return the names of the selected parameters that a tensor was computed from.

    Args:
        t: a leaf, or a tensor with an autograd graph.
        weights: the leaves that replace the parameters.
    """
    if id(t) in weights.names:
        return {weights.names[id(t)]}
    names: set[str] = set()
    for node in nodes_behind([t.grad_fn]):
        # Only the nodes of leaves have a `variable`.
        leaf_id = id(getattr(node, "variable", None))
        if leaf_id in weights.names:
            names.add(weights.names[leaf_id])
    return names


def nodes_behind(nodes: list[Any]) -> set[Any]:
    """Collect all autograd nodes that a backward pass from `nodes` visits, including `nodes`."""
    visited: set[Any] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        # None is where an argument needs no gradient.
        if node is not None and node not in visited:
            visited.add(node)
            pending.extend(parent for parent, _ in node.next_functions)
    return visited


@dataclass
class InnerNodes:
    """Autograd nodes that a backward pass may enter only through the result of their operation.

    A rule computes a parameter's gradient from the cotangent of its operation's result. If the
    logits also depend on the inside of the operation in another way (by a gradient that the forward
    pass takes, or an autograd function), the cotangent misses that part.

    Args:
        result_of: a dict from each node inside an operation to the node of the operation's result.
    """

    result_of: dict[Any, Any] = field(default_factory=dict)

    def add_operation(self, result: Any, arguments: Iterable[Any]) -> None:
        """Record which nodes are inside an operation: its result's, back to its arguments.

        Args:
            result: the node of the operation's result.
            arguments: the nodes of the operation's arguments, which are not inside.
        """
        outside = set(arguments)
        pending = [result]
        while pending:
            node = pending.pop()
            if node is not None and node not in outside and node not in self.result_of:
                self.result_of[node] = result
                pending.extend(parent for parent, _ in node.next_functions)

    def bypasses_result(self, node: Any, next_node: Any) -> bool:
        """Whether a step of a backward pass enters an operation elsewhere than at its result.

        It does if `node` is outside the operation, and `next_node` inside, but not the result.

        Args:
            node: the node that the backward pass comes from.
            next_node: the node that it goes to.
        """
        result = self.result_of.get(next_node)
        if result is None or next_node is result:
            return False
        return self.result_of.get(node) is not result


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
        occurrence: number of earlier operations with the same key in this pass.
        arguments: all tensors among the operation's arguments.
        results: all tensors among the operation's results.
        param_indices: indices of the `arguments` that were computed from parameters alone.
    """

    key: OpKey
    occurrence: int
    arguments: list[Tensor]
    results: list[Tensor] = field(default_factory=list)
    param_indices: set[int] = field(default_factory=set)

    @property
    def name(self) -> str:
        """The operation's name."""
        return self.key.name

    def index_of(self, t: Tensor) -> int:
        """Return the index of the tensor `t`, by identity, among the operation's arguments."""
        return next(i for i, argument in enumerate(self.arguments) if argument is t)


def largest_result(param_uses: Iterable[ParamUse]) -> int:
    """Return the number of bytes of the operations' largest result; 0 if there is none."""
    largest = 0
    for use in param_uses:
        for t in use.results:
            largest = max(largest, t.numel() * t.element_size())
    return largest


# Uses of parameters, by their `key` and `occurrence`.
_UsesByKey = dict[tuple[OpKey, int], ParamUse]


@dataclass(frozen=True)
class TracePair:
    """The same forward pass traced on one row and on two: comparing them shows the batch axis.

    Args:
        one: uses of parameters in the pass on a single row.
        two: uses of parameters in the pass on two rows.
        unbatched: operations whose results have no batch axis, because the values of the input
            decide where an entry goes; the recorder adds to it while it traces batches.
    """

    one: list[ParamUse]
    two: list[ParamUse]
    unbatched: set[OpKey] = field(default_factory=set)

    def find(self, use: ParamUse) -> tuple[ParamUse, ParamUse] | None:
        """Find a use of parameters from another pass in the traces on one row and on two.

        Args:
            use: the use, whose key and occurrence are looked up.

        Returns:
            The use in the pass on one row, and that in the pass on two; None if a pass lacks it.
        """
        key = (use.key, use.occurrence)
        one, two = self._uses_on_one_row.get(key), self._uses_on_two_rows.get(key)
        if one is None or two is None:
            return None
        return one, two

    @cached_property
    def _uses_on_one_row(self) -> _UsesByKey:
        """The uses in the pass on a single row, by key and occurrence."""
        return _index_by_key(self.one)

    @cached_property
    def _uses_on_two_rows(self) -> _UsesByKey:
        """The uses in the pass on two rows, by key and occurrence."""
        return _index_by_key(self.two)

    def compact(self) -> "TracePair":
        """Free graphs and values that `infer_layout` does not need, in place, and return self.

        Arguments computed from parameters alone keep their values and graphs.
        """
        for key, one in self._uses_on_one_row.items():
            # A use that the pass on two rows lacks is never looked up: all of it may be freed.
            two = self._uses_on_two_rows.get(key, one)
            for i, tensors in enumerate(zip(one.arguments, two.arguments, strict=False)):
                if i not in one.param_indices:
                    one.arguments[i], two.arguments[i] = _compact_tensors(*tensors)
            result_pairs = zip(one.results, two.results, strict=False)
            compact_pairs = [_compact_tensors(*tensors) for tensors in result_pairs]
            one.results = [on_one for on_one, _ in compact_pairs]
            two.results = [on_two for _, on_two in compact_pairs]
        return self


def _index_by_key(uses: Iterable[ParamUse]) -> _UsesByKey:
    """Make a dict from the key and occurrence of each use of parameters to the use."""
    return {(use.key, use.occurrence): use for use in uses}


def _compact_tensors(one: Tensor, two: Tensor) -> tuple[Tensor, Tensor]:
    """Detach a tensor's two versions, and drop their values where the shapes alone show the layout.

    The values are kept if a row has several entries on the batch axis, because they show the order
    of the entries.

    Args:
        one: the tensor when the model runs on one row.
        two: the tensor when the model runs on two rows.

    Returns:
        The two versions, detached; tensors without memory, on the meta device, if values are
        dropped.
    """
    # The sizes on one row of the axes that are longer on two rows: of the batch axis.
    entries_per_row = [a for a, b in zip(one.shape, two.shape, strict=False) if a != b]
    if all(size == 1 for size in entries_per_row):
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
        """List the parameters whose layers a score combines, in the same order for every batch.

        These are the parameters that the logits depend on, in order of first use; any that were
        not traced come last. If `fixed` is False, use and order vary from batch to batch: then
        these are all selected parameters, in the model's order.

        Args:
            used: names of parameters that the logits depend on.
            selected: names of all selected parameters, in the model's order.

        Returns:
            Names of parameters.
        """
        if not self.fixed:
            return list(selected)
        traced = [name for name in self.names if name in used]
        untraced = [name for name in selected if name in used and name not in traced]
        return traced + untraced
