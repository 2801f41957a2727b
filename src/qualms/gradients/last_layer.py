"""The linear layer that ends a forward pass: gradients of C classes from D + 2 backward passes.

This pays where the last layer sees fewer features D than there are classes C. `LastProduct` finds
the layer in a traced pass; `measure_via_last_layer` measures by it.

With logits z = W h + b, D features h and C classes, every layer before the last one gets its C
gradients from D + 1 others. Let k* be the gradient of log p of the predicted class c*, and k_d that
of the feature h_d (the mean over a sample's rows, as always). Then for every class

    ∇ log p_c = k* + Σ_d (W_c - W_c*)_d k_d,    ‖∇ log p_c‖² = xᵀ K x,    x = (1, W_c - W_c*),

with K the inner products of (k*, k_1, …, k_D). Starting from c* leaves nothing to cancel for
confident samples: k*, which is tiny then, is a backward pass of its own, and no other class has a
tiny direction. Where terms cancel all the same, the gradient is added up before its norm is taken.

The last layer itself needs no pass: the rows of ∂W log p_c are means over a sample's rows r of
-p_rk h_r for k ≠ c and of (1 - p_rc) h_r for k = c, so ‖∂W log p_c‖² = ‖mean (1 - p_rc) h_r‖² +
Σ_{k≠c} ‖mean p_rk h_r‖²; for b, h is 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.graph import GradientEdge

from qualms.gradients.directions import (
    DIRECTIONS,
    Cotangents,
    of_class,
    scale_to_unit,
    sum_of_others,
)
from qualms.gradients.measure import Pullback, measure
from qualms.gradients.precision import (
    at_least_float32,
    inner_products,
    outside_float32_range,
    sum_of_squares,
)
from qualms.gradients.tracing.factors import GradFactor
from qualms.gradients.tracing.outer_product import CANCELLED, Outer, gram_is_cheaper
from qualms.gradients.tracing.param_use import nodes_behind

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
BLOCK_NUMBERS = 2**20  # in what is added up at once


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
    def of(cls, pullback: Pullback) -> "LastProduct | None":
        """Find the last layer in the graph of a traced forward pass.

        Returns:
            The layer; None if the graph does not end in one, or its parameters are used elsewhere
            or computed from others.
        """
        logits = pullback.logits
        node, ends = _skip_views(logits.grad_fn)
        if node is None or node.name() not in PRODUCTS:
            return None
        if getattr(node, "_saved_alpha", 1) != 1:
            return None
        *bias, (source, number), weight = node.next_functions
        own: list[GradFactor] = []
        body: list[GradFactor] = []
        for factor in pullback.factors:
            is_own = any(edge.node in ends for edge in factor.edges)
            (own if is_own else body).append(factor)
        # Only the features may lead on to other layers.
        aside = nodes_behind([n for n, _ in (*bias, weight)])
        if any(edge.node in aside for factor in body for edge in factor.edges):
            return None
        if not {id(f) for f in own} <= {id(f) for f in pullback.single.values()}:
            return None
        matrix = _weight_matrix(node, logits.shape[1], own, is_first=not body)
        if matrix is None or len(matrix) != logits.shape[1]:
            return None
        if any(f.gradient.numel not in (matrix.numel(), len(matrix)) for f in own):
            return None  # a bias that is broadcast over the classes
        features = GradientEdge(source, number) if source is not None else None
        return cls(matrix, features, own, body)

    def without_graph(self) -> "LastProduct":
        """What can be kept when the graph is freed."""
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
            kept += _count_kept(factor, rows_per_sample, m) + classes
        return (m + 1) * before + m * m * kept < classes * (before + classes * width)

    def numbers_held(self, rows_per_sample: int) -> int:
        """How many numbers are kept for one sample, if this was traced on one row."""
        classes, width = self.weight.shape
        own = 16 * rows_per_sample * classes  # in double precision
        if not self.body:
            return own
        kept = [_count_kept(factor, rows_per_sample, width + 1) for factor in self.body]
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
    node: Any,
    classes: int,
    own: list[GradFactor],
    is_first: bool,
) -> Float[Tensor, "c d"] | None:
    """W; None if it has another shape.

    Args:
        node: of the product.
        classes: C.
        own: the factors of the product's parameters.
        is_first: whether no layer comes before. Autograd then does not save W, since no gradient
            needs it: its shape is all that counts.
    """
    if not is_first:
        saved: Tensor = node._saved_mat2
        return saved.detach().T
    widest = max((factor.target for factor in own), key=Tensor.numel)
    if widest.numel() % classes:
        return None
    return widest.detach().reshape(classes, -1)


def _count_kept(factor: GradFactor, rows_per_sample: int, cotangents: int) -> int:
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


def count_multiplications(
    factor: GradFactor,
    rows_per_sample: int,
    cotangents: int,
) -> int:
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


# The norms of all classes.


@torch.no_grad()
def measure_via_last_layer(
    pullback: Pullback,
    directions: Sequence[str],
    last: LastProduct,
) -> dict[str, Float[Tensor, "b m"]]:
    """‖g‖ for each parameter: what `measure` gives, without the C passes of `classes`.

    Args:
        pullback: of a traced forward pass.
        directions: names of the sets, `classes` among them.
        last: the last layer of the pass.
    """
    z = pullback.logits.detach().unflatten(0, (pullback.samples, -1))
    predicted = z[:, 0].argmax(-1)
    further = [name for name in directions if name != "classes"]
    sets = [of_class(z, predicted)]
    sets += [DIRECTIONS[name](z) for name in further]
    direct = torch.cat(sets).flatten(1, 2) / z.shape[1]
    known = measure(pullback, Cotangents.of(direct, pullback.samples), "l2")
    squares: dict[str, Tensor] = {}
    if last.body:
        of_body = replace(pullback, factors=last.body)
        squares = _body_squares(of_body, direct[:1], predicted, last)
    for factor in last.own:
        squares[pullback.weights.names[id(factor.target)]] = _own_squares(z, factor)
    values: dict[str, Tensor] = {}
    for name, column in known.items():
        of_classes = squares.pop(name).sqrt_()
        of_classes.scatter_(1, predicted[:, None], column[:, :1])
        parts: list[Tensor] = []
        for direction in directions:
            if direction == "classes":
                parts.append(of_classes)
            else:
                parts.append(column[:, [1 + further.index(direction)]])
        values[name] = torch.cat(parts, dim=1)
    return values


def _own_squares(
    z: Float[Tensor, "b r c"],
    factor: GradFactor,
) -> Float[Tensor, "b c"]:
    """‖∂W log p_c‖² or ‖∂b log p_c‖²: sums of squares, in which nothing cancels.

    Args:
        z: the logits of all rows.
        factor: of W or b.
    """
    p = z.double().softmax(-1)
    h = p.new_ones(*p.shape[:2], 1)
    if isinstance(factor.gradient, Outer):
        h = factor.gradient.activation_matrix.double()
    size = max(1, BLOCK_NUMBERS // (len(h) * h.shape[2]))

    def squares(weight: Float[Tensor, "b r c"]) -> Float[Tensor, "b c"]:
        parts: list[Tensor] = []
        for part in weight.split(size, dim=2):
            mean = part.mT @ h / p.shape[1]
            parts.append(torch.linalg.vecdot(mean, mean))
        return torch.cat(parts, dim=1)

    return squares(sum_of_others(p)) + sum_of_others(squares(p))


def _body_squares(
    pullback: Pullback,
    toward_predicted: Float[Tensor, "1 rows c"],
    predicted: Int[Tensor, " b"],
    last: LastProduct,
) -> dict[str, Float[Tensor, "b c"]]:
    """xᵀ K x for every class and every parameter before the last layer.

    Args:
        pullback: to the factors of these parameters.
        toward_predicted: e_c* - p, divided by the number of a sample's rows.
        predicted: c*.
        last: the last layer of the pass.
    """
    classes, width = last.weight.shape
    logits, samples = pullback.logits, pullback.samples
    rows = len(logits)
    found: dict[str, FeatureGradients] = {}
    for name, factor in pullback.single.items():
        found[name] = FeatureGradients(factor, width + 1, samples)
    (of_predicted,), (size,) = scale_to_unit(toward_predicted, samples)
    assert last.features is not None  # it leads to the body
    pulls: list[tuple[Tensor | GradientEdge, Tensor]] = [(logits, of_predicted.to(logits.dtype))]
    for unit in torch.eye(width, dtype=logits.dtype, device=logits.device) * (samples / rows):
        pulls.append((last.features, unit.expand(rows, -1)))
    for start, cotangent in pulls:
        at = pullback.pull(cotangent, start)
        for name, factor in pullback.single.items():
            deltas = pullback.cotangents_of(factor, at)
            if deltas is not None:
                found[name].add(deltas)
        for name, gradient in pullback.sum_shared(at).items():
            if name not in found:
                found[name] = FeatureGradients(None, width + 1, samples)
            found[name].kept.append(gradient.flatten(1)[:, None])
    w = at_least_float32(last.weight)
    apart = w - w[predicted][:, None]
    x = torch.cat([size.to(apart)[:, None, None].expand(-1, classes, 1), apart], dim=2)
    values: dict[str, Tensor] = {}
    while found:  # each is freed when its norms are known
        name, gradients = found.popitem()
        if gradients.kept:
            values[name] = gradients.squares(x, predicted)
    return values


@dataclass
class FeatureGradients:
    """A parameter's gradients k*, k_1, …, k_D: of each its factor δ, or all of it.

    Attributes:
        factor: the only one of the parameter; None if its gradient is made of several.
        cotangents: D + 1.
        samples: how many there are.
        kept: δ [b·g, t, o] or the gradient [b, 1, p], one after the other.
    """

    factor: GradFactor | None
    cotangents: int
    samples: int
    kept: list[Tensor] = field(default_factory=list)

    @property
    def outer(self) -> Outer | None:
        """The outer product whose factor δ is kept."""
        if self.factor is None or not isinstance(self.factor.gradient, Outer):
            return None
        outer = self.factor.gradient
        return outer if outer.prefers_gram(self.cotangents) else None

    def add(self, deltas: list[Tensor | None]) -> None:
        """Keep one gradient of a single factor."""
        assert self.factor is not None
        if self.outer is not None:
            self.kept.append(self.outer.delta(deltas))
        else:
            self.kept.append(self.factor.gradient.write(deltas).flatten(1)[:, None])

    def squares(
        self,
        x: Float[Tensor, "b c m"],
        predicted: Int[Tensor, " b"],
    ) -> Float[Tensor, "b c"]:
        """xᵀ K x; not that of the predicted class, which is known more precisely."""
        factors = torch.stack(self.kept, dim=1)  # [b·g, m, t, o]
        self.kept.clear()
        if self.outer is not None:
            products = self.outer.inner_products(factors)
            scale = self.outer.sum_of_position_norms(factors)
        else:
            products = inner_products(factors.flatten(2))
            scale = products.diagonal(dim1=1, dim2=2)
        squares = torch.linalg.vecdot(x @ products.to(x), x)
        without_cancellation = (x.square() @ scale.to(x).unsqueeze(2)).squeeze(2)
        again = squares < CANCELLED * without_cancellation
        odd = outside_float32_range(scale.amax(1))[:, None] | outside_float32_range(squares)
        if bool(odd.any()):
            nonzero = self._any_group(factors.flatten(1).any(1))
            squares = torch.where(nonzero, squares, 0.0)
            odd &= nonzero
            if self.outer is not None:  # nor is there more to know where a is zero
                overlaps = self._any_group(self.outer.overlaps(factors).any(1))
                odd &= (squares != 0) | overlaps
        again |= odd
        again.scatter_(1, predicted[:, None], False)
        squares = squares.double()
        for b in again.any(1).nonzero().flatten().tolist():
            chosen = again[b].nonzero().flatten()
            squares[b, chosen] = self._squares_of_sums(factors, x[b, chosen], b)
        return squares

    def _any_group(self, of_group: Bool[Tensor, " bg"]) -> Bool[Tensor, "b 1"]:
        """Whether it holds for some group of each sample."""
        return of_group.unflatten(0, (self.samples, -1)).any(1)[:, None]

    def _squares_of_sums(
        self,
        factors: Float[Tensor, "bg m t o"],
        x: Float[Tensor, "n m"],
        b: int,
    ) -> Float[Tensor, " n"]:
        """‖Σ_m x_m k_m‖² of one sample, from the sum itself.

        Args:
            factors: what is kept of all gradients.
            x: of some classes.
            b: the sample.
        """
        of_sample = factors.unflatten(0, (self.samples, -1))[b].transpose(0, 1)  # [m, g, t, o]
        numel = self.factor.gradient.numel if self.factor else of_sample[0].numel()
        parts: list[Tensor] = []
        for part in x.split(max(1, BLOCK_NUMBERS // numel)):
            total = (part @ of_sample.flatten(1)).unflatten(1, of_sample.shape[1:])  # [n, g, t, o]
            if self.outer is not None:
                total = total.mT @ self.outer.activations_of(b)
            parts.append(sum_of_squares(total.flatten(1)))
        return torch.cat(parts)
