"""The linear layer that ends a forward pass: gradients of C classes from D + 2 backward passes.

This is faster where the last layer has fewer input features D than classes C. `LastProduct` finds
the layer in a traced pass; `measure_via_last_layer` computes the norms.

With logits z = W h + b, D features h and C classes, every layer before the last one gets its C
gradients from D + 1 backward passes. Let k* be the gradient of log p of the predicted class c*, and
k_d that of the feature h_d (the mean over a sample's rows, as always). Then for every class

    ∇ log p_c = k* + Σ_d (W_c - W_c*)_d k_d,    ‖∇ log p_c‖² = xᵀ K x,    x = (1, W_c - W_c*),

with K the matrix of inner products of (k*, k_1, …, k_D). Starting from c* avoids cancellation for
confident samples: k*, which is tiny then, has a separate backward pass, and no other class has a
tiny gradient. Where terms cancel nevertheless, the gradient itself is summed before its norm is
taken.

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

# The names of the nodes of `linear`, `addmm` and `matmul` in autograd's graph.
PRODUCTS = ("AddmmBackward0", "MmBackward0")
# Nodes of views (and copies) that keep the order of the entries of [rows, classes].
VIEWS = (
    "ViewBackward0",
    "UnsafeViewBackward0",
    "CloneBackward0",
    "SqueezeBackward0",
    "SqueezeBackward1",
    "SqueezeBackward2",
)
# Numbers computed at a time, where all classes at once would take much memory.
BLOCK_NUMBERS = 2**20


@dataclass(frozen=True)
class LastProduct:
    """The linear layer z = W h + b that ends a forward pass.

    Attributes:
        weight: W, one row for each class.
        features: the edge of the graph at which h enters the layer, where backward passes start;
            None if no parameter comes before the layer, or the graph was freed.
        layer_factors: the gradient factors of W and b.
        body: the gradient factors of all other parameters.
    """

    weight: Float[Tensor, "c d"]
    features: GradientEdge | None
    layer_factors: list[GradFactor]
    body: list[GradFactor]

    @classmethod
    def of(cls, pullback: Pullback) -> "LastProduct | None":
        """Find the last layer in the graph of a traced forward pass.

        Args:
            pullback: the logits with their graph, and the gradient factors of all parameters.

        Returns:
            The layer; None if the graph does not end in a linear layer, or if W or b is used
            elsewhere too or is computed from other parameters.
        """
        logits = pullback.logits
        node, ends = _skip_views(logits.grad_fn)
        if node is None or node.name() not in PRODUCTS:
            return None
        if getattr(node, "_saved_alpha", 1) != 1:  # `addmm` that scales the product
            return None
        # The inputs of the product: b (only for `addmm`), h and W.
        *bias, (source, number), weight = node.next_functions
        layer_factors: list[GradFactor] = []
        body: list[GradFactor] = []
        for factor in pullback.factors:
            is_layer_factor = any(edge.node in ends for edge in factor.edges)
            (layer_factors if is_layer_factor else body).append(factor)
        # Only the features may lead on to other layers.
        behind_weights = nodes_behind([n for n, _ in (*bias, weight)])
        if any(edge.node in behind_weights for factor in body for edge in factor.edges):
            return None
        # W and b are used nowhere else, and not computed from other parameters.
        if not {id(f) for f in layer_factors} <= {id(f) for f in pullback.single.values()}:
            return None
        matrix = _weight_matrix(node, logits.shape[1], layer_factors, is_first=not body)
        if matrix is None or len(matrix) != logits.shape[1]:
            return None
        if any(f.gradient.numel not in (matrix.numel(), len(matrix)) for f in layer_factors):
            return None  # a bias that is broadcast over the classes
        features = GradientEdge(source, number) if source is not None else None
        return cls(matrix, features, layer_factors, body)

    def without_graph(self) -> "LastProduct":
        """A copy without references to the graph, which can then be freed.

        W stays, and of the gradient factors their sizes.
        """
        layer_factors = [factor.without_graph() for factor in self.layer_factors]
        body = [factor.without_graph() for factor in self.body]
        return LastProduct(self.weight, None, layer_factors, body)

    def pays(self, rows_per_sample: int) -> bool:
        """Whether D + 2 passes, with K and xᵀ K x, take fewer multiplications than C passes.

        D is the number of features, C of classes; K and x are explained at the top of the module.
        A pass from the logits takes at least twice the multiplications of the gradients (once for
        the cotangents, once for the gradients) and C·D for the last layer; a pass from the features
        saves the latter. With m = D + 1, K takes m² for each number kept of a gradient, and xᵀ K x
        takes m² for each class.
        """
        classes, width = self.weight.shape
        m = width + 1
        before, kept = 0, 0
        for factor in self.body:
            before += 2 * count_multiplications(factor, rows_per_sample, m)
            kept += _count_kept(factor, rows_per_sample, m) + classes
        return (m + 1) * before + m * m * kept < classes * (before + classes * width)

    def numbers_held(self, rows_per_sample: int) -> int:
        """How many numbers `measure_via_last_layer` keeps in memory for one sample.

        Only for factors that were traced on one row.

        Args:
            rows_per_sample: the number of rows of a sample.
        """
        classes, width = self.weight.shape
        last_layer = 16 * rows_per_sample * classes  # in double precision
        if not self.body:
            return last_layer
        kept = [_count_kept(factor, rows_per_sample, width + 1) for factor in self.body]
        # The largest has copies while K is computed; x, x K and x² exist for every class.
        return last_layer + (width + 1) * (sum(kept) + 2 * max(kept) + 3 * classes)


def _skip_views(node: Any) -> tuple[Any, set[Any]]:
    """Walk back from a node of the graph over views, which leave the logits as they are.

    Returns:
        The first node that is not a view, or None, and the set of all nodes passed, it included.
    """
    ends = {node}
    while node is not None and node.name() in VIEWS:
        node = node.next_functions[0][0]
        ends.add(node)
    return node, ends


def _weight_matrix(
    node: Any,
    classes: int,
    layer_factors: list[GradFactor],
    is_first: bool,
) -> Float[Tensor, "c d"] | None:
    """Find the matrix W of the last layer; None if its weights cannot be reshaped to [classes, d].

    Args:
        node: the node of the product in the graph.
        classes: the number of classes.
        layer_factors: the gradient factors of W and b.
        is_first: whether no layer comes before. Autograd does not save W then, and only the shape
            of the result matters.
    """
    if not is_first:
        saved: Tensor = node._saved_mat2
        return saved.detach().T
    widest = max((factor.target for factor in layer_factors), key=Tensor.numel)
    if widest.numel() % classes:
        return None
    return widest.detach().reshape(classes, -1)


def _count_kept(factor: GradFactor, rows_per_sample: int, cotangents: int) -> int:
    """How many numbers are kept of one sample's gradient: its factor δ, or the whole gradient.

    A weight's gradient is Σ_t δ_t a_tᵀ over positions t; the activations a are the same for all
    cotangents, so δ is enough where inner products are cheaper from the Gram matrices.

    Args:
        factor: a gradient factor, traced on one row.
        rows_per_sample: the number of rows of a sample.
        cotangents: the number of gradients that share the work on activations.
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
    """How many multiplications the norm of one sample's gradient takes, given its cotangent.

    Args:
        factor: a gradient factor, traced on one row.
        rows_per_sample: the number of rows of a sample.
        cotangents: the number of gradients that share the work on activations.
    """
    if not isinstance(factor.gradient, Outer):
        return max(factor.gradient.numel, rows_per_sample * factor.gradient.multiplications)
    # Positions, features of δ, features of a, groups.
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
    """Compute ‖g‖ of each parameter as `measure` does, with D + 2 passes instead of C.

    Args:
        pullback: the pullback of a traced forward pass.
        directions: the names of the sets of directions (keys of `DIRECTIONS`), `classes` among
            them.
        last: the last layer of the pass.

    Returns:
        For each parameter's name ‖g‖ [b, m], directions in the order of `directions`.
    """
    z = pullback.logits.detach().unflatten(0, (pullback.samples, -1))
    predicted = z[:, 0].argmax(-1)
    further = [name for name in directions if name != "classes"]
    sets = [of_class(z, predicted)]
    sets += [DIRECTIONS[name](z) for name in further]
    direct = torch.cat(sets).flatten(1, 2) / z.shape[1]
    # Measured by a pass each: the predicted class, whose norm may be tiny, and directions of other sets.
    measured = measure(pullback, Cotangents.of(direct, pullback.samples), "l2")
    squares: dict[str, Tensor] = {}
    if last.body:
        body_pullback = replace(pullback, factors=last.body)
        squares = _body_squares(body_pullback, direct[:1], predicted, last)
    for factor in last.layer_factors:
        squares[pullback.weights.names[id(factor.target)]] = _layer_squares(z, factor)
    values: dict[str, Tensor] = {}
    for name, column in measured.items():
        class_norms = squares.pop(name).sqrt_()
        class_norms.scatter_(1, predicted[:, None], column[:, :1])
        parts: list[Tensor] = []
        for direction in directions:
            if direction == "classes":
                parts.append(class_norms)
            else:
                parts.append(column[:, [1 + further.index(direction)]])
        values[name] = torch.cat(parts, dim=1)
    return values


def _layer_squares(
    z: Float[Tensor, "b r c"],
    factor: GradFactor,
) -> Float[Tensor, "b c"]:
    """Compute ‖∂W log p_c‖² or ‖∂b log p_c‖² for every class, without cancellation.

    A gradient has a row mean (1 - p_rc) h_r for class c and rows mean -p_rk h_r for the others k,
    means over the sample's rows r; their squared norms are added up.

    Args:
        z: the logits of all rows.
        factor: the gradient factor of W or b.
    """
    p = z.double().softmax(-1)
    h = p.new_ones(*p.shape[:2], 1)  # for b
    if isinstance(factor.gradient, Outer):
        h = factor.gradient.activation_matrix.double()
    size = max(1, BLOCK_NUMBERS // (len(h) * h.shape[2]))

    def squares(weight: Float[Tensor, "b r c"]) -> Float[Tensor, "b c"]:
        """‖mean over r of weight_rk h_r‖² for each class k, a block of classes at a time."""
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
    """Compute ‖∇ log p_c‖² = xᵀ K x for every class and every parameter before the last layer.

    K are the inner products of the gradients k*, k_1, …, k_D, of the predicted class c* and of each
    feature; x = (1, W_c - W_c*).

    Args:
        pullback: the pullback to the gradient factors of these parameters alone.
        toward_predicted: e_c* - p, divided by the number of rows of a sample.
        predicted: c*, the predicted class of each sample.
        last: the last layer of the pass.

    Returns:
        Squared norms [b, c] by the parameter's name; those of the predicted class are rough.
    """
    classes, width = last.weight.shape
    logits, samples = pullback.logits, pullback.samples
    rows = len(logits)
    kept: dict[str, FeatureGradients] = {}
    for name, factor in pullback.single.items():
        kept[name] = FeatureGradients(factor, width + 1, samples)
    (predicted_cotangent,), (size,) = scale_to_unit(toward_predicted, samples)
    # The body's parameters come before the features.
    assert last.features is not None
    # Where each backward pass starts, and its cotangent: k* from the logits, k_d from h_d.
    pulls: list[tuple[Tensor | GradientEdge, Tensor]] = [
        (logits, predicted_cotangent.to(logits.dtype))
    ]
    for unit in torch.eye(width, dtype=logits.dtype, device=logits.device) * (samples / rows):
        pulls.append((last.features, unit.expand(rows, -1)))
    for start, cotangent in pulls:
        # Cotangents at the operations that use parameters.
        at = pullback.pull(cotangent, start)
        for name, factor in pullback.single.items():
            deltas = pullback.cotangents_of(factor, at)
            if deltas is not None:
                kept[name].add(deltas)
        for name, gradient in pullback.sum_shared(at).items():
            if name not in kept:
                kept[name] = FeatureGradients(None, width + 1, samples)
            kept[name].kept.append(gradient.flatten(1)[:, None])
    w = at_least_float32(last.weight)
    differences = w - w[predicted][:, None]  # W_c - W_c*
    # x = (1, W_c - W_c*), its 1 times the size by which k* was divided.
    ones = size.to(differences)[:, None, None].expand(-1, classes, 1)
    x = torch.cat([ones, differences], dim=2)
    values: dict[str, Tensor] = {}
    # A parameter's gradients are freed when their norms are known.
    while kept:
        name, gradients = kept.popitem()
        if gradients.kept:
            values[name] = gradients.squares(x, predicted)
    return values


@dataclass
class FeatureGradients:
    """A parameter's gradients k*, k_1, …, k_D: of each the factor δ, or the whole gradient.

    k* is the gradient of log p of the predicted class, k_d that of feature d before the last layer.
    The gradient of a weight is Σ_t δ_t a_tᵀ; the activations a are the same for all of them.

    Attributes:
        factor: the parameter's gradient factor; None if its gradient is a sum of several factors.
        cotangents: the number of gradients, D + 1.
        samples: the number of samples b.
        kept: for each gradient δ [b·g, t, o], or the gradient [b, 1, p].
    """

    factor: GradFactor | None
    cotangents: int
    samples: int
    kept: list[Tensor] = field(default_factory=list)

    @property
    def outer(self) -> Outer | None:
        """The outer product Σ_t δ_t a_tᵀ if only δ is kept; None if whole gradients are kept."""
        if self.factor is None or not isinstance(self.factor.gradient, Outer):
            return None
        outer = self.factor.gradient
        return outer if outer.prefers_gram(self.cotangents) else None

    def add(self, deltas: list[Tensor | None]) -> None:
        """Keep the next gradient.

        Args:
            deltas: the cotangents at the edges of the parameter's factor.
        """
        assert self.factor is not None
        if self.outer is not None:
            self.kept.append(self.outer.compute_delta(deltas))
        else:
            self.kept.append(self.factor.gradient.compute(deltas).flatten(1)[:, None])

    def squares(
        self,
        x: Float[Tensor, "b c m"],
        predicted: Int[Tensor, " b"],
    ) -> Float[Tensor, "b c"]:
        """Compute xᵀ K x for each class, with K the inner products of the kept gradients.

        Where digits were lost, the gradient Σ_m x_m k_m itself is summed instead; not for the
        predicted class, whose value is rough and is replaced by the caller. Frees the gradients.

        Args:
            x: the coefficients (1, W_c - W_c*) of the gradients, for each class.
            predicted: the predicted class c* of each sample.
        """
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
        # Digits lost: sum the gradient itself.
        again = squares < CANCELLED * without_cancellation
        odd = outside_float32_range(scale.amax(1))[:, None] | outside_float32_range(squares)
        if bool(odd.any()):
            nonzero = self._any_group(factors.flatten(1).any(1))
            squares = torch.where(nonzero, squares, 0.0)
            odd &= nonzero
            # Where δ and activations do not overlap, 0 is exact.
            if self.outer is not None:
                overlaps = self._any_group(self.outer.overlaps(factors).any(1))
                odd &= (squares != 0) | overlaps
        again |= odd  # float32 under- or overflows there
        again.scatter_(1, predicted[:, None], False)
        squares = squares.double()
        for b in again.any(1).nonzero().flatten().tolist():
            chosen = again[b].nonzero().flatten()
            squares[b, chosen] = self._squares_of_sums(factors, x[b, chosen], b)
        return squares

    def _any_group(self, of_group: Bool[Tensor, " bg"]) -> Bool[Tensor, "b 1"]:
        """Whether a condition holds for any group of each sample.

        Args:
            of_group: the condition for all g groups of all b samples, such as those of a grouped
                convolution.
        """
        return of_group.unflatten(0, (self.samples, -1)).any(1)[:, None]

    def _squares_of_sums(
        self,
        factors: Float[Tensor, "bg m t o"],
        x: Float[Tensor, "n m"],
        b: int,
    ) -> Float[Tensor, " n"]:
        """Compute ‖Σ_m x_m k_m‖² of one sample from the sum itself, in which no digits are lost.

        Args:
            factors: what is kept of all gradients k_m of all samples.
            x: the coefficients x_m of n classes.
            b: the index of the sample.
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
