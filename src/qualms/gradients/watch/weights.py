"""The parameters of a model as the recorder knows them, and the way back to them through a graph."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class Weights:
    """The parameters that count, as leaves of our own, and the others as constants."""

    names: dict[int, str]  # id of a leaf -> name of the parameter
    stand_in: dict[int, Tensor]  # id of a parameter -> our leaf (selected) or a detached view (not selected)
    leaves: dict[str, Tensor]

    @classmethod
    def of(cls, selected: dict[str, Tensor], every: Iterable[Tensor], channels_last: bool = False) -> "Weights":
        """With `channels_last`, kernels are copied to that format once, not by every convolution anew."""

        def plain(p: Tensor) -> Tensor:
            p = p.detach().clone() if p.is_inference() else p.detach()
            return p.contiguous(memory_format=torch.channels_last) if channels_last and p.ndim == 4 else p

        stand_in = {id(p): plain(p) for p in every}
        leaves = {name: stand_in[id(p)].requires_grad_() for name, p in selected.items()}
        return cls({id(leaf): name for name, leaf in leaves.items()}, stand_in, leaves)

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next(iter(self.leaves.values())).device


def roots(t: Tensor, weights: Weights) -> set[str]:
    """The parameters that a tracked tensor was computed from."""
    if id(t) in weights.names:
        return {weights.names[id(t)]}
    return {weights.names[leaf] for leaf in leaves_behind([t.grad_fn]) if leaf in weights.names}


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
