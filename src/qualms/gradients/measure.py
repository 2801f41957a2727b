"""Norms and inner products of each sample's gradients, from cotangents and gradient factors.

A direction v in logit space has the gradient Jᵀv, with J the Jacobian of the logits. It is computed
in two steps: `Pullback` pulls v back to every operation that uses a parameter, and the gradient factor
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

# A cotangent for each edge in `Pullback.edge_index`; None where the logits do not depend on it.
EdgeCotangents = Sequence[Tensor | None]


@torch.no_grad()
def measure(
    pullback: "Pullback",
    cotangents: Cotangents | Float[Tensor, "m rows c"],
    kind: Kind,
) -> dict[str, Float[Tensor, "b m *m"]]:
    """Compute norms or inner products of each sample's gradients, parameter by parameter.

    Args:
        pullback: the pullback of a traced forward pass.
        cotangents: m directions v, each with a gradient g = Jᵀv. A plain tensor is used as it is,
            not scaled to a size near 1.
        kind: ‖g‖ (`l2`), Σ|g| (`l1`) or the inner products of all pairs of gradients (`gram`).

    Returns:
        A dict from the name of each parameter that the logits depend on to a tensor [b, m], or
        [b, m, m] for `gram`; in float64, in which squares of small numbers do not underflow.
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
    """Compute all entries of every parameter's gradient Jᵀv, summed over one sample's rows.

    Args:
        pullback: the pullback of a traced forward pass over one sample.
        cotangent: the direction v in logit space.

    Returns:
        Gradients [1, *parameter.shape] by name, without parameters that the logits do not depend
        on.
    """
    edge_cotangents = pullback.pull(cotangent)
    gradients: dict[str, Tensor] = {}
    for name, factor in pullback.single.items():
        deltas = pullback.cotangents_of(factor, edge_cotangents)
        if deltas is not None:
            with error_note(f"the gradient of {name}"):
                gradients[name] = factor.gradient.compute(deltas)
    return gradients | pullback.sum_shared(edge_cotangents)


def _unscaled(cotangents: Float[Tensor, "m rows c"], samples: int) -> Cotangents:
    """Wrap cotangents of `samples` samples as they are: a single block, all of its scales 1."""
    ones = torch.ones(
        len(cotangents),
        samples,
        dtype=torch.double,
        device=cotangents.device,
    )
    return Cotangents(len(cotangents), lambda: [(cotangents, ones)])


@dataclass(frozen=True)
class Pullback:
    """Pulls directions in logit space back to the operations that use parameters.

    A gradient factor then turns the cotangents at the edges of its operation, in autograd's graph,
    into the gradient of a parameter.

    Args:
        logits: the logits of a traced forward pass, with their graph.
        factors: the gradient factors of the parameters.
        weights: leaf tensors that replaced the parameters in the traced pass.
        samples: the number of samples b.

    Attributes:
        edge_index: the position of each edge in the cotangents that `pull` returns. An edge is
            listed once: the weight and the bias of an operation share its cotangent.
        single: the factor of each parameter whose gradient is a single factor.
        shared: the factors of each other parameter: its gradient is a sum of several factors
            (tied weights), or the parameter passes through other operations first (weight
            normalization).
    """

    logits: Float[Tensor, "rows c"]
    factors: Sequence[GradFactor]
    weights: Weights
    samples: int
    edge_index: dict[GradientEdge, int] = field(default_factory=dict, init=False)
    single: dict[str, GradFactor] = field(default_factory=dict, init=False)
    shared: dict[str, list[GradFactor]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        uses: dict[str, list[GradFactor]] = {}
        for factor in self.factors:
            for edge in factor.edges:
                self.edge_index.setdefault(edge, len(self.edge_index))
            for name in roots(factor.target, self.weights):
                uses.setdefault(name, []).append(factor)
        for name, factors in uses.items():
            # Not if the target was computed from the parameter.
            if len(factors) == 1 and id(factors[0].target) in self.weights.names:
                self.single[name] = factors[0]
            else:
                self.shared[name] = factors

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
            A cotangent for each edge, in the order of `edge_index`; None for an edge that `start`
            does not depend on.
        """
        # Raise KeyboardInterrupt here if Ctrl-C was pressed since the last pass.
        interrupts.deliver()
        if start is None:
            start = self.logits
        return torch.autograd.grad(
            start,
            list(self.edge_index),
            cotangent,
            retain_graph=True,
            allow_unused=True,
        )

    def cotangents_of(
        self,
        factor: GradFactor,
        edge_cotangents: EdgeCotangents,
    ) -> list[Tensor | None] | None:
        """Select the cotangents at a factor's edges; None if the logits depend on none of the edges.

        Args:
            factor: one of `factors`.
            edge_cotangents: the cotangents at all edges, from `pull`.
        """
        deltas = [edge_cotangents[self.edge_index[edge]] for edge in factor.edges]
        return None if all(delta is None for delta in deltas) else deltas

    def sum_shared(self, edge_cotangents: EdgeCotangents) -> dict[str, Float[Tensor, "b ..."]]:
        """Compute the gradients [b, …] of the `shared` parameters, each the sum of its factors.

        Args:
            edge_cotangents: the cotangents at all edges, from `pull`.

        Returns:
            Gradients by name, without parameters that the logits do not depend on.
        """
        totals: dict[str, Tensor] = {}

        def add(name: str, gradient: Tensor, samples: int | slice) -> None:
            """Add a gradient of some of the samples to a parameter's total, at first zero."""
            if name not in totals:
                leaf = self.weights.leaves[name]
                totals[name] = at_least_float32(leaf).new_zeros(self.samples, *leaf.shape)
            totals[name][samples] += gradient

        # Each factor once, though it may belong to several parameters.
        factors = {id(factor): factor for uses in self.shared.values() for factor in uses}
        for factor in factors.values():
            deltas = self.cotangents_of(factor, edge_cotangents)
            if deltas is None:
                continue
            target = factor.target
            names = sorted(roots(target, self.weights))
            with error_note("the gradient of " + ", ".join(names)):
                gradient = factor.gradient.compute(deltas)
            if id(target) in self.weights.names:
                add(self.weights.names[id(target)], gradient, samples=slice(None))
                continue
            # `target` was computed from parameters, so its gradient is pulled back to these, one
            # sample at a time.
            leaves = [self.weights.leaves[name] for name in names]
            for b, of_sample in enumerate(gradient.to(target.dtype)):
                leaf_gradients = torch.autograd.grad(
                    target,
                    leaves,
                    of_sample,
                    retain_graph=True,
                    allow_unused=True,
                )
                for name, leaf_gradient in zip(names, leaf_gradients, strict=True):
                    if leaf_gradient is not None and name in self.shared:
                        add(name, leaf_gradient, samples=b)
        return totals


# Norms, one direction after the other.


def _measure_norms(
    pullback: Pullback,
    cotangents: Cotangents,
    kind: Kind,
) -> dict[str, Float[Tensor, "b m"]]:
    """Compute ‖g‖ (`l2`) or Σ|g| (`l1`) of the gradient g along each direction, one after the other.

    Args:
        pullback: the pullback of a traced forward pass.
        cotangents: m directions.
        kind: `l1` or `l2`.

    Returns:
        Norms by the parameter's name.
    """
    num_directions = cotangents.num_directions
    names: list[str] = []
    # [m, parameters, b], filled in place: small results between large ones fragment the memory.
    norms: Tensor | None = None
    index = 0  # of the direction
    for block, scales in cotangents.blocks():
        start = index
        for cotangent in block.to(pullback.logits.dtype):
            sums = _measure_direction(pullback, cotangent, kind, num_directions)
            # The first direction shows which parameters the logits depend on.
            if norms is None:
                names = list(sums)
                norms = torch.empty(
                    (num_directions, len(names), pullback.samples),
                    dtype=torch.double,
                    device=pullback.logits.device,
                )
            if names:
                norms[index] = torch.stack([sums[name].double() for name in names])
            index += 1
        if norms is not None:
            norms_of_block = norms[start:index]
            # These are sums of squares so far.
            if kind == "l2":
                norms_of_block.sqrt_()
            # The cotangents were divided by these scales.
            norms_of_block *= scales[:, None, :]
    if norms is None:
        return {}
    return {name: norms[:, i].T for i, name in enumerate(names)}


def _measure_direction(
    pullback: Pullback,
    cotangent: Tensor,
    kind: Kind,
    directions: int,
) -> dict[str, Float[Tensor, " b"]]:
    """Compute Σ|g| (`l1`) or Σg² (`l2`) of the gradient g along one direction, for each parameter.

    Args:
        pullback: the pullback of a traced forward pass.
        cotangent: the direction, [rows, c].
        kind: `l1` or `l2`.
        directions: the number of directions for which work on activations is done only once.

    Returns:
        Sums by the parameter's name, without parameters that the logits do not depend on.
    """
    edge_cotangents = pullback.pull(cotangent)
    sums: dict[str, Tensor] = {}
    for name, factor in pullback.single.items():
        deltas = pullback.cotangents_of(factor, edge_cotangents)
        if deltas is not None:
            with error_note(f"the gradient of {name}"):
                sums[name] = _sum_of_powers_from_factor(factor, deltas, kind, directions)
    for name, gradient in pullback.sum_shared(edge_cotangents).items():
        sums[name] = sum_of_powers(gradient, kind)
    return sums


def _sum_of_powers_from_factor(
    factor: GradFactor,
    deltas: list[Tensor | None],
    kind: Kind,
    directions: int,
) -> Float[Tensor, " b"]:
    """Compute Σ|g| (`l1`) or Σg² (`l2`) of a parameter's gradient g, which has a single factor.

    Where it is cheaper, the sum is computed without the entries of g.

    Args:
        factor: the only factor of the parameter.
        deltas: the cotangents at the factor's edges, one for each.
        kind: `l1` or `l2`.
        directions: the number of directions for which work on activations is done only once.
    """
    gradient = factor.gradient
    if isinstance(gradient, Outer) and kind == "l2":
        return gradient.squared_norm(deltas, directions)
    # At a single position g = δaᵀ, so Σ|g| = Σ|δ| Σ|a|.
    if isinstance(gradient, Outer) and gradient.sizes.positions == 1:
        return gradient.l1_norm(deltas)
    return sum_of_powers(gradient.compute(deltas), kind)


def sum_of_powers(gradient: Float[Tensor, "b ..."], kind: Kind) -> Float[Tensor, " b"]:
    """Compute the sum over |g| (`l1`) or g² (`l2`) of each sample's gradient g, without a copy of g."""
    flat = _flatten(gradient)
    if kind == "l1":
        return torch.linalg.vector_norm(flat, 1, dim=1)
    return sum_of_squares(flat)


def norm_of(gradient: Float[Tensor, "b ..."], kind: Kind) -> Float[Tensor, " b"]:
    """Compute the norm of each sample's gradient g: Σ|g| (`l1`) or ‖g‖ (`l2`)."""
    power_sum = sum_of_powers(gradient, kind)
    return power_sum if kind == "l1" else power_sum.sqrt()


# Inner products, of all directions together.


def _measure_inner_products(
    pullback: Pullback,
    cotangents: Cotangents,
) -> dict[str, Float[Tensor, "b m m"]]:
    """Compute the inner products of the gradients along m directions, for each parameter.

    The cotangents of all directions are held in memory together.

    Args:
        pullback: the pullback of a traced forward pass.
        cotangents: the directions.

    Returns:
        Inner products [b, m, m] by the parameter's name.
    """
    edge_cotangents: list[EdgeCotangents] = []  # of each direction
    block_scales: list[Tensor] = []
    for block, scales in cotangents.blocks():
        block_scales.append(scales)
        for cotangent in block.to(pullback.logits.dtype):
            edge_cotangents.append(pullback.pull(cotangent))
    # The cotangents were divided by these scales, so products are multiplied by two of them.
    scale = torch.cat(block_scales).T  # [b, m]
    pair_scales = scale[:, :, None] * scale[:, None, :]
    products_by_name: dict[str, Tensor] = {}
    for name, factor in pullback.single.items():
        with error_note(f"the gradient of {name}"):
            products = _inner_products_of_factor(pullback, factor, edge_cotangents)
        if products is not None:
            products_by_name[name] = products * pair_scales
    shared = [pullback.sum_shared(of_direction) for of_direction in edge_cotangents]
    for name in shared[0]:
        products = _inner_products_of_list([gradients[name] for gradients in shared])
        products_by_name[name] = products * pair_scales
    return products_by_name


def _inner_products_of_factor(
    pullback: Pullback,
    factor: GradFactor,
    edge_cotangents: list[EdgeCotangents],
) -> Float[Tensor, "b m m"] | None:
    """Compute the inner products of a parameter's gradients along m directions, from its one factor.

    Args:
        pullback: the pullback of a traced forward pass.
        factor: the only factor of the parameter.
        edge_cotangents: for each direction the cotangents at all edges.

    Returns:
        The inner products; None if the logits do not depend on the parameter.
    """
    deltas_of_directions: list[list[Tensor | None]] = []
    for of_direction in edge_cotangents:
        deltas = pullback.cotangents_of(factor, of_direction)
        if deltas is not None:
            deltas_of_directions.append(deltas)
    if not deltas_of_directions:
        return None
    if isinstance(factor.gradient, Outer):
        return factor.gradient.inner_products_along(deltas_of_directions)
    return _inner_products_of_list(
        [factor.gradient.compute(deltas) for deltas in deltas_of_directions]
    )


def _inner_products_of_list(gradients: list[Tensor]) -> Float[Tensor, "b m m"]:
    """Compute each sample's inner products of m gradients, given as m tensors [b, …]."""
    return inner_products(torch.stack([_flatten(gradient) for gradient in gradients], dim=1))


def _flatten(gradient: Float[Tensor, "b ..."]) -> Float[Tensor, "b p"]:
    """Flatten each sample's gradient to a row of its p entries."""
    return gradient.reshape(gradient.shape[0], -1)
