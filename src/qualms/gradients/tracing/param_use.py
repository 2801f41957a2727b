"""The parameters of a model as the recorder knows them, and the way back to them through a graph."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Weights:
    """The parameters that count, as leaves of our own, and the others as constants."""

    names: dict[int, str]  # id of a leaf -> name of the parameter
    stand_in: dict[
        int, Tensor
    ]  # id of a parameter -> our leaf (selected) or a detached view (not selected)
    leaves: dict[str, Tensor]

    @classmethod
    def of(
        cls, selected: dict[str, Tensor], every: Iterable[Tensor], channels_last: bool = False
    ) -> "Weights":
        """With `channels_last`, kernels are copied to that format once, not by every convolution
        anew.
        """

        def plain(p: Tensor) -> Tensor:
            p = p.detach().clone() if p.is_inference() else p.detach()
            return (
                p.contiguous(memory_format=torch.channels_last)
                if channels_last and p.ndim == 4
                else p
            )

        stand_in = {id(p): plain(p) for p in every}
        leaves = {name: stand_in[id(p)].requires_grad_() for name, p in selected.items()}
        return cls({id(leaf): name for name, leaf in leaves.items()}, stand_in, leaves)

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next(iter(self.leaves.values())).device


def slice_of(t: Tensor, weights: Weights) -> tuple[str, int] | None:
    """The parameter's name and e, if a tracked tensor is nothing but W[e]."""
    node: Any = t.grad_fn
    if type(node).__name__ != "SelectBackward0" or node._saved_dim != 0:
        return None
    name = weights.names.get(id(getattr(node.next_functions[0][0], "variable", None)))
    if name is None:
        return None
    index = int(node._saved_index)  # of 64 bits without a sign: -1 is the largest number
    return name, (index - 2**64 if index >= 2**63 else index) % len(weights.leaves[name])


def roots(t: Tensor, weights: Weights) -> set[str]:
    """The parameters that a tracked tensor was computed from."""
    if id(t) in weights.names:
        return {weights.names[id(t)]}
    return {weights.names[leaf] for leaf in leaves_behind([t.grad_fn]) if leaf in weights.names}


@dataclass(frozen=True)
class UseOrder:
    """Parameters in the order in which a forward pass first used them; `fixed` if every pass uses
    that order.
    """

    names: list[str]
    fixed: bool

    def counted(self, used: Collection[str], selected: Iterable[str]) -> list[str]:
        """The parameters whose layers count, in an order that belongs to the model, not to the
        inputs at hand.

        In order of first use, without those that the logits do not depend on. If the path through
        the model depends on the input, both would vary from batch to batch: then all count, in the
        order in which the model has them.
        """
        if not self.fixed:
            return list(selected)
        order = [name for name in self.names if name in used]
        return order + [name for name in selected if name in used and name not in order]


@dataclass
class Reach:
    """Nodes of the graph that may be reached only by the result of the operation that made them.

    A rule knows the cotangent of its operation's result. Whatever leads from the logits to the
    operation's parameters another way (a gradient that the forward pass takes itself, an autograd
    function) is not in that cotangent.
    """

    inside: dict[Any, Any] = field(
        default_factory=dict
    )  # node -> the node of the operation's result

    def enclose(self, result: Any, before: Iterable[Any]) -> None:
        """Take in the nodes that an operation added to the graph, between its result and what was
        there before.
        """
        outside, nodes = set(before), [result]
        while nodes:
            node = nodes.pop()
            if node is not None and node not in outside and node not in self.inside:
                self.inside[node] = result
                nodes.extend(n for n, _ in node.next_functions)

    def entered_aside(self, node: Any, follower: Any) -> bool:
        """Whether a step from node to follower leads into an operation other than by its result."""
        result = self.inside.get(follower)
        return result is not None and follower is not result and self.inside.get(node) is not result


def leaves_behind(nodes: list[Any]) -> set[int]:
    """The ids of all leaves that a gradient would reach from these nodes of the graph."""
    return {id(node.variable) for node in nodes_behind(nodes) if hasattr(node, "variable")}


def nodes_behind(nodes: list[Any]) -> set[Any]:
    """All nodes of the graph that a gradient would reach from these, with themselves."""
    seen: set[Any] = set()
    nodes = list(nodes)
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes.extend(n for n, _ in node.next_functions)
    return seen
