"""Norms and inner products of each sample's gradients, from cotangents and gradient factors.

A direction v in logit space has the gradient Jᵀv, with J the Jacobian of the logits. It is found in
two steps: `Pullback` pulls v back to every operation that uses a parameter, and the gradient factor
of the operation turns the cotangent there into the parameter's gradient, or its norm.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.graph import GradientEdge

from qualms.gradients.directions import Cotangents
from qualms.gradients.fallback import error_note
from qualms.gradients.isolation import interrupts
from qualms.gradients.precision import at_least_float32, inner_products, sum_of_squares
from qualms.gradients.settings import Kind
from qualms.gradients.tracing.factors import GradFactor
from qualms.gradients.tracing.outer_product import Outer
from qualms.gradients.tracing.param_use import Weights, roots

# One direction's cotangents at all edges of a `Pullback`, None where the logits do not depend on it.
EdgeCotangents = Sequence[Tensor | None]


@torch.no_grad()
def measure(
    pullback: "Pullback",
    cotangents: Cotangents | Float[Tensor, "m rows c"],
    kind: Kind,
) -> dict[str, Float[Tensor, "b m *m"]]:
    """Measure each sample's gradients along several directions, parameter by parameter.

    Args:
        pullback: the pullback of a traced forward pass.
        cotangents: the directions v. Entries of a plain tensor are not scaled to a size near 1.
        kind: ‖g‖ (`l2`), Σ|g| (`l1`) or the inner products ⟨g_m, g_n⟩ (`gram`).

    Returns:
        For each parameter that the logits depend on, a tensor [b, m], or [b, m, m] for `gram`; in
        float64, in which squares of small numbers do not underflow.
    """
    if not pullback.factors:
        return {}
    if isinstance(cotangents, Tensor):
        cotangents = _unscaled(cotangents, pullback.samples)
    if kind == "gram":
        return _measure_inner_products(pullback, cotangents)
    return _measure_norms(pullback, cotangents, kind)


@torch.no_grad()
def full_gradients(
    pullback: "Pullback",
    cotangent: Float[Tensor, "rows c"],
) -> dict[str, Float[Tensor, "1 ..."]]:
    """Write out the gradient of every parameter along one direction, summed over one sample's rows.

    Args:
        pullback: the pullback of a traced forward pass over one sample.
        cotangent: the direction v.

    Returns:
        Gradients [1, *parameter.shape] by name, without parameters that the logits do not depend
        on.
    """
    at = pullback.pull(cotangent)
    gradients: dict[str, Tensor] = {}
    for name, factor in pullback.single.items():
        deltas = pullback.cotangents_of(factor, at)
        if deltas is not None:
            with error_note(f"the gradient of {name}"):
                gradients[name] = factor.gradient.compute(deltas)
    return gradients | pullback.sum_shared(at)


def _unscaled(cotangents: Float[Tensor, "m rows c"], samples: int) -> Cotangents:
    """Wrap cotangents as a single block with scales 1; their rows belong to `samples` samples."""
    ones = torch.ones(len(cotangents), samples, dtype=torch.double, device=cotangents.device)
    return Cotangents(len(cotangents), lambda: [(cotangents, ones)])


@dataclass(frozen=True)
class Pullback:
    """Pulls directions in logit space back to the operations that use parameters.

    A gradient factor turns the cotangents at its operation's edges into the gradient of a
    parameter.

    Args:
        logits: the logits of a traced forward pass, with their graph.
        factors: the gradient factors of the parameters.
        weights: leaf tensors that replace the parameters in the traced pass.
        samples: the number of samples b.

    Attributes:
        index: the position of each edge in the cotangents that `pull` returns. An edge is listed
            once: the weight and the bias of an operation share its cotangent.
        single: the factor of each parameter whose gradient is a single factor.
        shared: the factors of each other parameter: its gradient is a sum of several factors
            (tied weights), or the parameter passes through other operations first (weight
            normalization).
    """

    logits: Float[Tensor, "rows c"]
    factors: Sequence[GradFactor]
    weights: Weights
    samples: int
    index: dict[GradientEdge, int] = field(default_factory=dict, init=False)
    single: dict[str, GradFactor] = field(default_factory=dict, init=False)
    shared: dict[str, list[GradFactor]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        uses: dict[str, list[GradFactor]] = {}
        for factor in self.factors:
            for edge in factor.edges:
                self.index.setdefault(edge, len(self.index))
            for name in roots(factor.target, self.weights):
                uses.setdefault(name, []).append(factor)
        for name, of_name in uses.items():
            if len(of_name) == 1 and id(of_name[0].target) in self.weights.names:
                self.single[name] = of_name[0]
            else:
                self.shared[name] = of_name

    def pull(
        self,
        cotangent: Float[Tensor, "rows _"],
        start: Tensor | GradientEdge | None = None,
    ) -> EdgeCotangents:
        """Pull a cotangent back to all edges, by one backward pass; the graph is kept.

        Args:
            cotangent: the cotangent at the start of the pass.
            start: a tensor or edge in the graph where the pass starts; the logits by default.

        Returns:
            A cotangent for each edge in the order of `index`; None if `start` does not depend on
            it.
        """
        # Raise a Ctrl-C that came since the last pass.
        interrupts.deliver()
        if start is None:
            start = self.logits
        return torch.autograd.grad(
            start, list(self.index), cotangent, retain_graph=True, allow_unused=True
        )

    def cotangents_of(
        self,
        factor: GradFactor,
        at: EdgeCotangents,
    ) -> list[Tensor | None] | None:
        """Select the cotangents at a factor's edges; None if the logits depend on none of the edges.

        Args:
            factor: one of `factors`.
            at: the cotangents at all edges, from `pull`.
        """
        deltas = [at[self.index[edge]] for edge in factor.edges]
        return None if all(d is None for d in deltas) else deltas

    def sum_shared(self, at: EdgeCotangents) -> dict[str, Float[Tensor, "b ..."]]:
        """Write out the gradients [b, …] of the `shared` parameters, the sum of their factors.

        Args:
            at: the cotangents at all edges, from `pull`.

        Returns:
            Gradients by name, without parameters that the logits do not depend on.
        """
        total: dict[str, Tensor] = {}

        def add(name: str, gradient: Tensor, of: int | slice = slice(None)) -> None:
            """Add a gradient of the samples `of` to the total of a parameter."""
            if name not in total:
                leaf = self.weights.leaves[name]
                total[name] = at_least_float32(leaf).new_zeros(self.samples, *leaf.shape)
            total[name][of] += gradient

        factors = {id(factor): factor for of_name in self.shared.values() for factor in of_name}
        for factor in factors.values():
            deltas = self.cotangents_of(factor, at)
            if deltas is None:
                continue
            target = factor.target
            names = sorted(roots(target, self.weights))
            with error_note("the gradient of " + ", ".join(names)):
                gradient = factor.gradient.compute(deltas)
            if id(target) in self.weights.names:
                add(self.weights.names[id(target)], gradient)
                continue
            # `target` was computed from parameters, so its gradient is pulled back to these, one
            # sample at a time.
            leaves = [self.weights.leaves[name] for name in names]
            for b, g in enumerate(gradient.to(target.dtype)):
                of_leaves = torch.autograd.grad(
                    target, leaves, g, retain_graph=True, allow_unused=True
                )
                for name, back in zip(names, of_leaves, strict=True):
                    if back is not None and name in self.shared:
                        add(name, back, b)
        return total


# Norms, one direction after the other.


def _measure_norms(
    pullback: Pullback,
    cotangents: Cotangents,
    kind: Kind,
) -> dict[str, Float[Tensor, "b m"]]:
    """Compute the norms along all directions, one direction after the other (see `measure`)."""
    names: list[str] = []
    # [m, parameter, b], filled in place: small results between large ones fragment the memory.
    table: Tensor | None = None
    number = 0
    for block, size in cotangents.blocks():
        start = number
        for cotangent in block.to(pullback.logits.dtype):
            values = _measure_one(pullback, cotangent, kind, cotangents.number)
            if table is None:
                names = list(values)
                table = torch.empty(
                    (cotangents.number, len(names), pullback.samples),
                    dtype=torch.double,
                    device=pullback.logits.device,
                )
            if names:
                table[number] = torch.stack([values[name].double() for name in names])
            number += 1
        if table is not None:
            rows_of_block = table[start:number]
            if kind == "l2":
                rows_of_block.sqrt_()
            rows_of_block *= size[:, None, :]
    if table is None:
        return {}
    return {name: table[:, i].T for i, name in enumerate(names)}


def _measure_one(
    pullback: Pullback,
    cotangent: Tensor,
    kind: Kind,
    directions: int,
) -> dict[str, Float[Tensor, " b"]]:
    """Compute Σ|g| (`l1`) or Σg² (`l2`) along one direction, for each parameter.

    Args:
        pullback: the pullback of a traced forward pass.
        cotangent: the direction, [rows, c].
        kind: `l1` or `l2`.
        directions: the number of directions that share the work on activations.
    """
    at = pullback.pull(cotangent)
    values: dict[str, Tensor] = {}
    for name, factor in pullback.single.items():
        deltas = pullback.cotangents_of(factor, at)
        if deltas is not None:
            with error_note(f"the gradient of {name}"):
                values[name] = _size_of_factor(factor, deltas, kind, directions)
    for name, gradient in pullback.sum_shared(at).items():
        values[name] = size_of(gradient, kind)
    return values


def _size_of_factor(
    factor: GradFactor,
    deltas: list[Tensor | None],
    kind: Kind,
    directions: int,
) -> Float[Tensor, " b"]:
    """Compute Σ|g| (`l1`) or Σg² (`l2`) of a gradient, without writing it out where that is cheaper.

    Args:
        factor: the only factor of the parameter.
        deltas: the cotangents at the factor's edges, one for each.
        kind: `l1` or `l2`.
        directions: the number of directions that share the work on activations.
    """
    gradient = factor.gradient
    if isinstance(gradient, Outer) and kind == "l2":
        return gradient.squared_norm(deltas, directions)
    if isinstance(gradient, Outer) and gradient.sizes.positions == 1:
        return gradient.l1_norm(deltas)
    return size_of(gradient.compute(deltas), kind)


def size_of(gradient: Float[Tensor, "b ..."], kind: Kind) -> Float[Tensor, " b"]:
    """Compute Σ|g| (`l1`) or Σg² (`l2`) of each sample's gradient, without copying the gradient."""
    flat = _flatten(gradient)
    if kind == "l1":
        return torch.linalg.vector_norm(flat, 1, dim=1)
    return sum_of_squares(flat)


def norm_of(gradient: Float[Tensor, "b ..."], kind: Kind) -> Float[Tensor, " b"]:
    """Compute Σ|g| (`l1`) or ‖g‖ (`l2`) of each sample's gradient."""
    size = size_of(gradient, kind)
    return size if kind == "l1" else size.sqrt()


# Inner products, of all directions together.


def _measure_inner_products(
    pullback: Pullback,
    cotangents: Cotangents,
) -> dict[str, Float[Tensor, "b m m"]]:
    """Compute ⟨g_m, g_n⟩ for all pairs of directions and each parameter (see `measure`).

    The cotangents of all directions are held in memory together.
    """
    all_at: list[EdgeCotangents] = []
    sizes: list[Tensor] = []
    for block, size in cotangents.blocks():
        sizes.append(size)
        for cotangent in block.to(pullback.logits.dtype):
            all_at.append(pullback.pull(cotangent))
    # [b, m], the sizes by which the cotangents were divided.
    scale = torch.cat(sizes).T
    scales = scale[:, :, None] * scale[:, None, :]
    values: dict[str, Tensor] = {}
    for name, factor in pullback.single.items():
        with error_note(f"the gradient of {name}"):
            products = _inner_products_of_factor(pullback, factor, all_at)
        if products is not None:
            values[name] = products * scales
    shared = [pullback.sum_shared(at) for at in all_at]
    for name in shared[0]:
        values[name] = _inner_products([gradients[name] for gradients in shared]) * scales
    return values


def _inner_products_of_factor(
    pullback: Pullback,
    factor: GradFactor,
    all_at: list[EdgeCotangents],
) -> Float[Tensor, "b m m"] | None:
    """Compute ⟨g_m, g_n⟩ for a parameter with one factor; None if the logits do not depend on it.

    Args:
        pullback: the pullback of a traced forward pass.
        factor: the only factor of the parameter.
        all_at: the cotangents of each direction at all edges.
    """
    deltas_of_directions: list[list[Tensor | None]] = []
    for at in all_at:
        deltas = pullback.cotangents_of(factor, at)
        if deltas is not None:
            deltas_of_directions.append(deltas)
    if not deltas_of_directions:
        return None
    if isinstance(factor.gradient, Outer):
        return factor.gradient.inner_products_along(deltas_of_directions)
    return _inner_products([factor.gradient.compute(deltas) for deltas in deltas_of_directions])


def _inner_products(gradients: list[Tensor]) -> Float[Tensor, "b m m"]:
    """Compute ⟨g_m, g_n⟩ of each sample, given the gradients [b, …] along each direction."""
    return inner_products(torch.stack([_flatten(gradient) for gradient in gradients], dim=1))


def _flatten(gradient: Float[Tensor, "b ..."]) -> Float[Tensor, "b p"]:
    """Flatten each sample's gradient to a row of its p entries."""
    return gradient.reshape(gradient.shape[0], -1)
