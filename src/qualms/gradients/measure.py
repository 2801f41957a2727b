"""From cotangents and pieces to one number for each input, direction and parameter."""

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.graph import GradientEdge

from qualms.gradients.directions import Cotangents
from qualms.gradients.isolation import interrupts
from qualms.gradients.precision import at_least_float32, inner_products, sum_of_squares
from qualms.gradients.tracing.factors import GradFactor
from qualms.gradients.tracing.outer_product import Outer
from qualms.gradients.tracing.weights import Weights, roots

Kind = Literal["l2", "l1", "gram"]
AtEdges = Sequence[Tensor | None]  # the cotangents of one direction, at every edge
Places = dict[GradientEdge, int]  # of an edge among the cotangents


@torch.no_grad()
def measure(
    logits: Float[Tensor, "rows c"],
    cotangents: Cotangents | Float[Tensor, "m rows c"],
    pieces: Sequence[GradFactor],
    weights: Weights,
    inputs: int,
    kind: Kind,
) -> dict[str, Float[Tensor, "b m *m"]]:
    """For each parameter ‖g‖ [b, m] (l2), Σ|g| [b, m] (l1) or the inner products ⟨g_m, g_n⟩ [b, m,
    m] (gram).

    In double precision, in which small numbers are not zero. A plain tensor of cotangents is taken
    as it is, for those that must not be brought to one size. Parameters that the logits do not
    depend on are left out.
    """
    if not pieces:
        return {}
    if isinstance(cotangents, Tensor):
        given, as_they_are = (
            cotangents,
            torch.ones(len(cotangents), inputs, dtype=torch.double, device=logits.device),
        )
        cotangents = Cotangents(len(cotangents), lambda: [(given, as_they_are)])
    edges, places = unique_edges(pieces)
    alone, shared = group_by_parameter(pieces, weights)
    table: Tensor | None = (
        None  # [m, parameter, b], in place: small results between large ones break memory up
    )
    names: list[str] = []
    kept: list[AtEdges] = []
    sizes: list[Tensor] = []
    number = 0
    for block, size in cotangents.blocks():
        start = number
        for cotangent in block.to(logits.dtype):
            interrupts.deliver()
            at: AtEdges = torch.autograd.grad(
                logits, edges, cotangent, retain_graph=True, allow_unused=True
            )
            if kind == "gram":
                kept.append(at)
                continue
            values: dict[str, Tensor] = {}
            for name, piece in alone.items():
                deltas = cotangents_at(piece, at, places)
                if deltas is not None:
                    values[name] = _measured(piece, deltas, kind, cotangents.number)
            for name, gradient in sum_shared_gradients(shared, at, places, weights, inputs).items():
                values[name] = size_of(gradient, kind)
            if table is None:
                names = list(values)
                table = logits.new_empty(cotangents.number, len(names), inputs, dtype=torch.double)
            if names:
                table[number] = torch.stack([values[name].double() for name in names])
            number += 1
        if table is not None:
            done = table[start:number]
            if kind == "l2":
                done.sqrt_()
            done *= size[:, None, :]
        if kind == "gram":
            sizes.append(size)
    if table is not None:
        return {name: table[:, i].T for i, name in enumerate(names)}
    size = torch.cat(sizes).T
    units = size[:, :, None] * size[:, None, :]
    return {
        n: v * units
        for n, v in _inner_products(alone, shared, kept, places, weights, inputs).items()
    }


def unique_edges(pieces: Sequence[GradFactor]) -> tuple[list[GradientEdge], Places]:
    """Weight and bias share their operation's cotangent: ask for each once."""
    places: Places = {}
    for piece in pieces:
        for edge in piece.edges:
            places.setdefault(edge, len(places))
    return list(places), places


def group_by_parameter(
    pieces: Sequence[GradFactor], weights: Weights
) -> tuple[dict[str, GradFactor], dict[str, list[GradFactor]]]:
    """Parameters that one piece tells all about, and those whose gradient is a sum of pieces or
    lies behind others.
    """
    uses: dict[str, list[GradFactor]] = {}
    for piece in pieces:
        for name in roots(piece.target, weights):
            uses.setdefault(name, []).append(piece)
    alone = {n: p[0] for n, p in uses.items() if len(p) == 1 and id(p[0].target) in weights.names}
    return alone, {n: p for n, p in uses.items() if n not in alone}


def cotangents_at(piece: GradFactor, at: AtEdges, places: Places) -> list[Tensor | None] | None:
    """The cotangents of a piece, or None if the logits do not depend on it."""
    deltas = [at[places[edge]] for edge in piece.edges]
    return None if all(d is None for d in deltas) else deltas


def _measured(
    piece: GradFactor, deltas: list[Tensor | None], kind: Kind, cotangents: int
) -> Float[Tensor, " b"]:
    if kind == "l2" and isinstance(piece.gradient, Outer):
        return piece.gradient.squared_norm(deltas, cotangents)
    if isinstance(piece.gradient, Outer) and piece.gradient.sizes[0] == 1:
        return piece.gradient.l1_norm(deltas)
    return size_of(piece.gradient.write(deltas), kind)


def size_of(gradient: Float[Tensor, "b ..."], kind: Kind) -> Float[Tensor, " b"]:
    """Σ|g| (l1) or Σg² of each input's gradient, without a copy of it."""
    flat = _flat(gradient)
    return torch.linalg.vector_norm(flat, 1, dim=1) if kind == "l1" else sum_of_squares(flat)


def norm_of(gradient: Float[Tensor, "b ..."], kind: Kind) -> Float[Tensor, " b"]:
    """Σ|g| (l1) or ‖g‖ of each input's gradient."""
    size = size_of(gradient, kind)
    return size if kind == "l1" else size.sqrt()


@torch.no_grad()
def full_gradients(
    logits: Float[Tensor, "rows c"],
    cotangent: Float[Tensor, "rows c"],
    pieces: Sequence[GradFactor],
    weights: Weights,
) -> dict[str, Float[Tensor, "1 ..."]]:
    """The whole gradient of every parameter along one direction, for the rows of one input."""
    edges, places = unique_edges(pieces)
    alone, shared = group_by_parameter(pieces, weights)
    interrupts.deliver()
    at: AtEdges = torch.autograd.grad(
        logits, edges, cotangent, retain_graph=True, allow_unused=True
    )
    deltas = {name: cotangents_at(piece, at, places) for name, piece in alone.items()}
    own = {name: alone[name].gradient.write(d) for name, d in deltas.items() if d is not None}
    return own | sum_shared_gradients(shared, at, places, weights, 1)


def sum_shared_gradients(
    shared: dict[str, list[GradFactor]], at: AtEdges, places: Places, weights: Weights, inputs: int
) -> dict[str, Float[Tensor, "b ..."]]:
    """The whole gradient of each parameter that is used more than once or behind other operations."""
    total: dict[str, Tensor] = {}

    def add(name: str, gradient: Tensor, of: int | slice = slice(None)) -> None:
        if name not in total:
            total[name] = at_least_float32(weights.leaves[name]).new_zeros(
                inputs, *weights.leaves[name].shape
            )
        total[name][of] += gradient

    for piece in {id(p): p for group in shared.values() for p in group}.values():
        deltas = cotangents_at(piece, at, places)
        if deltas is None:
            continue
        gradient = piece.gradient.write(deltas)
        name = weights.names.get(id(piece.target))
        if name is not None:
            add(name, gradient)
            continue
        names = sorted(roots(piece.target, weights))
        leaves = [weights.leaves[n] for n in names]
        for i, g in enumerate(gradient.to(piece.target.dtype)):
            pulled = torch.autograd.grad(
                piece.target, leaves, g, retain_graph=True, allow_unused=True
            )
            for n, back in zip(names, pulled, strict=True):
                if back is not None and n in shared:
                    add(n, back, i)
    return total


def _inner_products(
    alone: dict[str, GradFactor],
    shared: dict[str, list[GradFactor]],
    kept: list[AtEdges],
    places: Places,
    weights: Weights,
    inputs: int,
) -> dict[str, Float[Tensor, "b m m"]]:
    values: dict[str, Tensor] = {}
    for name, piece in alone.items():
        known = [d for d in (cotangents_at(piece, at, places) for at in kept) if d is not None]
        if not known:
            continue
        if isinstance(piece.gradient, Outer):
            values[name] = piece.gradient.inner_products_along(known)
        else:
            values[name] = _products([piece.gradient.write(d) for d in known])
    whole = [sum_shared_gradients(shared, at, places, weights, inputs) for at in kept]
    return values | {name: _products([w[name] for w in whole]) for name in whole[0]}


def _products(gradients: list[Tensor]) -> Float[Tensor, "b m m"]:
    """Inner products ⟨g_m, g_n⟩ of each input's gradients, given one tensor [b, …] for each
    direction.
    """
    return inner_products(torch.stack([_flat(gradient) for gradient in gradients], dim=1))


def _flat(gradient: Float[Tensor, "b ..."]) -> Float[Tensor, "b p"]:
    return gradient.reshape(gradient.shape[0], -1)
