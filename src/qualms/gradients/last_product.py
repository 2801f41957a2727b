"""The linear layer that ends a forward pass, and what it saves: D + 1 backward passes for C classes.

The identity behind it stands in `engines/last_layer.py`, which uses it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor
from torch.autograd.graph import GradientEdge

from qualms.gradients.measure import group_by_parameter
from qualms.gradients.tracing.factors import GradFactor
from qualms.gradients.tracing.outer_product import Outer, gram_is_cheaper
from qualms.gradients.tracing.weights import Weights, nodes_behind

# What the graph calls `linear`, `addmm` and `matmul`.
PRODUCTS = ("AddmmBackward0", "MmBackward0")
# Views that leave [rows, classes] in order.
VIEWS = (
    "ViewBackward0",
    "UnsafeViewBackward0",
    "CloneBackward0",
    "SqueezeBackward0",
    "SqueezeBackward1",
    "SqueezeBackward2",
)


@dataclass(frozen=True)
class LastProduct:
    """The product z = W h + b that ends a forward pass.

    Attributes:
        weight: W.
        features: where h enters the graph; None if nothing comes before, or the graph is gone.
        own: the factors of W and b.
        body: the factors of all other parameters.
    """

    weight: Float[Tensor, "c d"]
    features: GradientEdge | None
    own: list[GradFactor]
    body: list[GradFactor]

    @classmethod
    def of(
        cls, logits: Tensor, factors: Sequence[GradFactor], weights: Weights
    ) -> "LastProduct | None":
        """Find the last layer in the graph of a traced forward pass.

        Args:
            logits: of the pass, with its graph.
            factors: of all parameters.
            weights: the leaves.

        Returns:
            The layer; None if the graph does not end in one, or its parameters are used elsewhere
            or computed from others.
        """
        node, ends = _skip_views(logits.grad_fn)
        if node is None or node.name() not in PRODUCTS:
            return None
        if getattr(node, "_saved_alpha", 1) != 1:
            return None
        *bias, (source, number), weight = node.next_functions
        own: list[GradFactor] = []
        body: list[GradFactor] = []
        for factor in factors:
            is_own = any(edge.node in ends for edge in factor.edges)
            (own if is_own else body).append(factor)
        # Only the features may lead on to other layers.
        aside = nodes_behind([n for n, _ in (*bias, weight)])
        if any(edge.node in aside for factor in body for edge in factor.edges):
            return None
        alone, _ = group_by_parameter(factors, weights)
        if not {id(f) for f in own} <= {id(f) for f in alone.values()}:
            return None
        matrix = _weight_matrix(node, logits.shape[1], own, is_first=not body)
        if matrix is None or len(matrix) != logits.shape[1]:
            return None
        if any(f.gradient.numel not in (matrix.numel(), len(matrix)) for f in own):
            return None  # a bias that is broadcast over the classes
        features = GradientEdge(source, number) if source is not None else None
        return cls(matrix, features, own, body)

    def without_graph(self) -> "LastProduct":
        """What can be kept when the graph is let go."""
        own = [factor.without_graph() for factor in self.own]
        body = [factor.without_graph() for factor in self.body]
        return LastProduct(self.weight, None, own, body)

    def pays(self, rows_per_sample: int) -> bool:
        """Whether D + 2 passes and their algebra take fewer multiplications than C passes.

        A pass takes at least twice the multiplications of the gradients it ends in (for the
        cotangents, and for the gradients), and C D through the last layer, which those that start
        from its features need not; K takes m² for each number kept of a gradient, m = D + 1, and xᵀ
        K x takes m² for each class.
        """
        classes, width = self.weight.shape
        m = width + 1
        before, kept = 0, 0
        for factor in self.body:
            before += 2 * count_multiplications(factor, rows_per_sample, m)
            kept += numbers_kept(factor, rows_per_sample, m) + classes
        return (m + 1) * before + m * m * kept < classes * (before + classes * width)

    def numbers_held(self, rows_per_sample: int) -> int:
        """How many numbers are kept for one sample, if this was traced on one row."""
        classes, width = self.weight.shape
        own = 16 * rows_per_sample * classes  # in double precision
        if not self.body:
            return own
        kept = [numbers_kept(factor, rows_per_sample, width + 1) for factor in self.body]
        # Of the largest there are copies while K is computed; x, x K and x² are there for every
        # class.
        return own + (width + 1) * (sum(kept) + 2 * max(kept) + 3 * classes)


def _skip_views(node: Any) -> tuple[Any, set[Any]]:
    """The first node that is not a view, and all nodes up to it."""
    ends = {node}
    while node is not None and node.name() in VIEWS:
        node = node.next_functions[0][0]
        ends.add(node)
    return node, ends


def _weight_matrix(
    node: Any, classes: int, own: list[GradFactor], is_first: bool
) -> Float[Tensor, "c d"] | None:
    """W; None if it has another shape.

    Args:
        node: of the product.
        classes: C.
        own: the factors of the product's parameters.
        is_first: whether no layer comes before. Nothing then asks autograd for W, so that it is not
            saved: its shape is all that counts.
    """
    if not is_first:
        saved: Tensor = node._saved_mat2
        return saved.detach().T
    widest = max((factor.target for factor in own), key=Tensor.numel)
    if widest.numel() % classes:
        return None
    return widest.detach().reshape(classes, -1)


def numbers_kept(factor: GradFactor, rows_per_sample: int, cotangents: int) -> int:
    """How many numbers are kept of one sample's gradient: δ, or all of it.

    Args:
        factor: traced on one row.
        rows_per_sample: how many rows a sample has.
        cotangents: how many gradients share what is computed once.
    """
    if isinstance(factor.gradient, Outer):
        t, o, f, g = factor.gradient.sizes
        if gram_is_cheaper(t * rows_per_sample, o, f, cotangents):
            return t * rows_per_sample * o * g
    return factor.gradient.numel


def count_multiplications(factor: GradFactor, rows_per_sample: int, cotangents: int) -> int:
    """Multiplications that lead from one cotangent to one gradient.

    Args:
        factor: traced on one row.
        rows_per_sample: how many rows a sample has.
        cotangents: how many gradients share what is computed once.
    """
    if not isinstance(factor.gradient, Outer):
        return max(factor.gradient.numel, rows_per_sample * factor.gradient.multiplications)
    t, o, f, g = factor.gradient.sizes
    t *= rows_per_sample
    return g * t * o * (t if gram_is_cheaper(t, o, f, cotangents) else f)
