"""The parameters as leaves of our own, and the way back to them through the graph."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


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
    return {weights.names[leaf] for leaf in leaves_behind([t.grad_fn]) if leaf in weights.names}


def leaves_behind(nodes: list[Any]) -> set[int]:
    """The ids of all leaves that a gradient would reach from these nodes of the graph."""
    return {id(node.variable) for node in nodes_behind(nodes) if hasattr(node, "variable")}


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
