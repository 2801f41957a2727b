"""Matrices kept in one parameter, such as those of all experts: their gradients stand side by side
in the parameter's.

Each matrix W[e] has a piece of its own. Together they are one `Outer` with a group for each, so
that the parameter's gradient, zero but for the experts that were asked, need not be written out for
its norm.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from qualms.gradients.tracing.factors import GradFactor, Outer
from qualms.gradients.tracing.param_use import Weights, slice_of


def joined(pieces: Sequence[GradFactor], weights: Weights) -> list[GradFactor]:
    """The same pieces, those of different matrices of one parameter put together."""
    found: dict[str, dict[int, GradFactor]] = {}
    others: list[GradFactor] = []
    for piece in pieces:
        place = slice_of(piece.target, weights)
        of_parameter = None if place is None else found.setdefault(place[0], {})
        if place is None or of_parameter is None or place[1] in of_parameter or not _plain(piece):
            others.append(piece)
        else:
            of_parameter[place[1]] = piece
    return others + [
        _together(weights.leaves[name], slices) for name, slices in found.items() if slices
    ]


def _plain(piece: GradFactor) -> bool:
    return (
        isinstance(piece.gradient, Outer) and piece.gradient.sizes[3] == 1 and len(piece.edges) == 1
    )


def _together(target: Tensor, slices: dict[int, GradFactor]) -> GradFactor:
    numbers, pieces = list(slices), list(slices.values())
    outers = [piece.gradient for piece in pieces if isinstance(piece.gradient, Outer)]
    edges = tuple(piece.edges[0] for piece in pieces)
    return GradFactor(target, edges, Slices.of(outers, numbers, target))


@dataclass
class Slices(Outer):
    """The gradients of slices W[e] of one parameter, which stand side by side: a cotangent and a
    group for each.
    """

    outers: Sequence[Outer] = ()

    @classmethod
    def of(cls, outers: Sequence[Outer], numbers: list[int], target: Tensor) -> "Slices":
        """From the gradients of target[number]."""

        def arrange(grad: Float[Tensor, "b g o f"]) -> Tensor:
            whole = grad.new_zeros(len(grad), *target.shape)
            whole[:, numbers] = torch.stack(
                [outer.arrange(grad[:, [g]]) for g, outer in enumerate(outers)], dim=1
            )
            return whole

        def activations() -> Tensor:
            return side_by_side([outer.fixed for outer in outers])

        first, most = outers[0], max(outer.sizes[0] for outer in outers)
        _, o, f, _ = first.sizes
        return cls(
            first.grad_outputs,
            activations,
            arrange,
            first.inputs,
            (most, o, f, len(outers)),
            outers=outers,
        )

    def delta(self, cotangents: list[Tensor | None]) -> Float[Tensor, "bg t o"]:
        """The factor δ that a cotangent gives; zero for a matrix that it does not reach."""
        known = {g: self.outers[g].delta([d]) for g, d in enumerate(cotangents) if d is not None}
        some = next(iter(known.values()))
        none = some.new_zeros(len(some), 0, some.shape[2])
        return self._positions(
            side_by_side([known.get(g, none) for g in range(len(self.outers))], self.sizes[0])
        )


def side_by_side(
    factors: Sequence[Float[Tensor, "b _ f"]], most: int = 0
) -> Float[Tensor, "b t g f"]:
    """One group for each, with zeros at positions that it does not have."""
    t = max(most, *(factor.shape[1] for factor in factors))
    return torch.stack([F.pad(factor, (0, 0, 0, t - factor.shape[1])) for factor in factors], dim=2)
