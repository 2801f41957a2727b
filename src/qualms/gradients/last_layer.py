"""The linear layer that ends a forward pass: gradients of C classes from D + 2 backward passes.

This is faster where the last layer has fewer input features D than classes C. `LastProduct` finds
the layer in a traced pass; `measure_via_last_layer` computes the norms.

With logits z = W h + b, D features h and C classes, every layer before the last one gets its C
gradients from D + 1 backward passes. Let k* be the gradient of log p of the predicted class c*, and
k_d that of the feature h_d (both are means over a sample's rows). Then for every class

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
    direction_of_class,
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
from qualms.gradients.tracing.outer_product import MIN_NORM_SHARE, Outer, gram_is_cheaper
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
# Numbers computed at a time, where computing them for all classes at once would take much memory.
BLOCK_NUMBERS = 2**20


@dataclass(frozen=True)
class LastProduct:
    """The linear layer z = W h + b that ends a forward pass.

    Attributes:
        weight: W, one row for each class.
        features: the edge of autograd's graph at which h enters the layer, where backward passes
            start; None if no parameter is used before the layer, or the graph was freed.
        layer_factors: the gradient factors of W and b.
        body: the gradient factors of all other parameters.
    """

    weight: Float[Tensor, "c d"]
    features: GradientEdge | None
    layer_factors: list[GradFactor]
    body: list[GradFactor]

    @classmethod
    def of(cls, pullback: Pullback) -> "LastProduct | None":
        """Find the linear layer that ends a traced forward pass, if there is one.

        Args:
            pullback: the logits with their graph, and the gradient factors of all parameters.

        Returns:
            The layer; None if the graph does not end in a linear layer, or if W or b is used
            elsewhere too or is computed from other parameters.
        """
        logits = pullback.logits
        num_classes = logits.shape[1]
        product, passed_nodes = _skip_views(logits.grad_fn)
        if product is None or product.name() not in PRODUCTS:
            return None
        # An `addmm` that multiplies W h by a number is no plain linear layer.
        if getattr(product, "_saved_alpha", 1) != 1:
            return None
        # The inputs of the product: b (only for `addmm`), h and W.
        *bias, (feature_node, output_index), weight = product.next_functions
        layer_factors: list[GradFactor] = []
        body: list[GradFactor] = []
        for factor in pullback.factors:
            # The cotangents of W and b are at the product's result, or at a view of it.
            if any(edge.node in passed_nodes for edge in factor.edges):
                layer_factors.append(factor)
            else:
                body.append(factor)
        # Other layers may be reached through h only, not through W or b (a hypernetwork).
        behind_weights = nodes_behind([node for node, _ in (*bias, weight)])
        if any(edge.node in behind_weights for factor in body for edge in factor.edges):
            return None
        # Nor may W or b be used elsewhere, or be computed from others: `single` lacks these.
        if not {id(f) for f in layer_factors} <= {id(f) for f in pullback.single.values()}:
            return None
        matrix = _find_weight_matrix(product, num_classes, layer_factors, is_first=not body)
        if matrix is None or len(matrix) != num_classes:
            return None
        # The factors are those of W and of b [C]: a bias of another size is broadcast.
        if any(f.gradient.numel not in (matrix.numel(), num_classes) for f in layer_factors):
            return None
        features = None
        # No node: h needs no gradient, as no parameter is used before the layer.
        if feature_node is not None:
            features = GradientEdge(feature_node, output_index)
        return cls(matrix, features, layer_factors, body)

    def without_graph(self) -> "LastProduct":
        """Make a copy with W and the sizes of the gradient factors, but without autograd's graph.

        Unlike the original, the copy does not keep the graph in memory.
        """
        layer_factors = [factor.without_graph() for factor in self.layer_factors]
        body = [factor.without_graph() for factor in self.body]
        return LastProduct(
            self.weight,
            features=None,
            layer_factors=layer_factors,
            body=body,
        )

    def is_cheaper(self, rows_per_sample: int) -> bool:
        """Whether going via the features takes fewer multiplications than a pass for each class.

        With D features and C classes it takes D + 2 backward passes instead of C. A pass from the
        logits takes C·D multiplications for the last layer, and for the layers before it at least
        twice those of the gradients (once for the cotangents, once for the gradients); a pass from
        the features saves C·D. The gradient of each class is a combination of m = D + 1 kept ones,
        so its squared norm is xᵀ K x, with K [m, m] their inner products and x [m] coefficients: K
        takes m² multiplications for each number kept of a gradient, and xᵀ K x m² for each class.

        Args:
            rows_per_sample: the number of rows of a sample.
        """
        num_classes, num_features = self.weight.shape
        m = num_features + 1
        body_cost = 0
        num_kept = 0
        for factor in self.body:
            body_cost += 2 * count_multiplications(factor, rows_per_sample, m)
            num_kept += _count_kept_numbers(factor, rows_per_sample, m) + num_classes
        cost_via_features = (m + 1) * body_cost + m * m * num_kept
        return cost_via_features < num_classes * (body_cost + num_classes * num_features)

    def count_numbers_held(self, rows_per_sample: int) -> int:
        """Count the numbers that are held in memory for a sample to go via the last layer's features.

        The gradient factors must have been traced on a single row.

        Args:
            rows_per_sample: the number of rows of a sample.
        """
        num_classes, num_features = self.weight.shape
        m = num_features + 1  # gradients that are kept of each parameter
        # Several arrays [rows, classes] of doubles: together 16 numbers for each entry.
        in_last_layer = 16 * rows_per_sample * num_classes
        if not self.body:
            return in_last_layer
        kept = [_count_kept_numbers(factor, rows_per_sample, m) for factor in self.body]
        # The largest parameter's gradients are copied twice while their inner products K are
        # computed; the coefficients x, x K and x² exist for every class.
        return in_last_layer + m * (sum(kept) + 2 * max(kept) + 3 * num_classes)


def _skip_views(node: Any) -> tuple[Any, set[Any]]:
    """Walk back in autograd's graph over views and copies, which do not change the logits' values.

    Args:
        node: the graph node of the logits.

    Returns:
        The first node that is not a view (None at the end of the graph), and the set of all nodes
        on the way, including the first and the last.
    """
    passed_nodes = {node}
    while node is not None and node.name() in VIEWS:
        node = node.next_functions[0][0]
        passed_nodes.add(node)
    return node, passed_nodes


def _find_weight_matrix(
    node: Any,
    classes: int,
    layer_factors: list[GradFactor],
    is_first: bool,
) -> Float[Tensor, "c d"] | None:
    """Find the matrix W of the last layer; None if its weights cannot be reshaped to [classes, d].

    Args:
        node: the node of the product W h in autograd's graph.
        classes: the number of classes.
        layer_factors: the gradient factors of W and b.
        is_first: whether this is the model's only layer. As h then needs no gradient, autograd
            does not save W; but then only the shape of the result matters.
    """
    if not is_first:
        saved: Tensor = node._saved_mat2
        return saved.detach().T
    # Of W and b, W has more entries.
    largest_target = max((factor.target for factor in layer_factors), key=Tensor.numel)
    if largest_target.numel() % classes:
        return None
    return largest_target.detach().reshape(classes, -1)


def _count_kept_numbers(
    factor: GradFactor,
    rows_per_sample: int,
    cotangents: int,
) -> int:
    """Count the numbers that are kept of one sample's gradient: its factor δ, or all entries.

    A weight's gradient is Σ_i δ_i a_iᵀ over positions i, with cotangents δ_i and activations a_i.
    The activations are the same for all gradients, so δ is enough where inner products of gradients
    are cheaper from the Gram matrices of δ and a.

    Args:
        factor: a gradient factor, traced on one row.
        rows_per_sample: the number of rows of a sample.
        cotangents: the number of gradients that share the work on activations.
    """
    if isinstance(factor.gradient, Outer):
        positions, out_features, in_features, groups = factor.gradient.sizes
        positions *= rows_per_sample
        if gram_is_cheaper(positions, out_features, in_features, cotangents):
            return positions * out_features * groups
    return factor.gradient.numel


def count_multiplications(
    factor: GradFactor,
    rows_per_sample: int,
    cotangents: int,
) -> int:
    """Count the multiplications that the norm of one sample's gradient takes, given its cotangent.

    Args:
        factor: a gradient factor, traced on one row.
        rows_per_sample: the number of rows of a sample.
        cotangents: the number of gradients that share the work on activations.
    """
    if not isinstance(factor.gradient, Outer):
        return max(factor.gradient.numel, rows_per_sample * factor.gradient.multiplications)
    positions, out_features, in_features, groups = factor.gradient.sizes
    positions *= rows_per_sample
    # Either all pairs of positions (Gram matrices), or all entries of the gradient.
    if gram_is_cheaper(positions, out_features, in_features, cotangents):
        return groups * positions * out_features * positions
    return groups * positions * out_features * in_features


# The norms of all classes.


@torch.no_grad()
def measure_via_last_layer(
    pullback: Pullback,
    directions: Sequence[str],
    last: LastProduct,
) -> dict[str, Float[Tensor, "b m"]]:
    """Compute the norms of all parameters' gradients with D + 2 backward passes instead of C.

    The result is that of `measure`, with D features of the last layer and C classes. The formulas
    are at the top of this file.

    Args:
        pullback: the pullback of a traced forward pass.
        directions: the names of the sets of directions (keys of `DIRECTIONS`). `classes` must be
            among them; each of the other sets has a single direction.
        last: the last layer of the pass.

    Returns:
        A dict from each parameter's name to norms [b, m], directions in the order of `directions`.
    """
    z = pullback.logits.detach().unflatten(0, (pullback.samples, -1))  # [b, r, c]
    predicted = z[:, 0].argmax(-1)
    other_sets = [name for name in directions if name != "classes"]
    # Directions with a pass each: that of the predicted class, whose norm may be too tiny to be a
    # difference of others, and those of the other sets.
    direct_sets = [direction_of_class(z, predicted)]
    direct_sets += [DIRECTIONS[name](z) for name in other_sets]
    # Divided by the rows of a sample, so that the sum over them is a mean.
    direct = torch.cat(direct_sets).flatten(1, 2) / z.shape[1]
    direct_norms = measure(pullback, Cotangents.of(direct, pullback.samples), "l2")
    squares: dict[str, Tensor] = {}
    if last.body:
        body_pullback = replace(pullback, factors=last.body)
        squares = _squared_norms_of_body(body_pullback, direct[:1], predicted, last)
    for factor in last.layer_factors:
        name = pullback.weights.names[id(factor.target)]
        squares[name] = _squared_norms_of_layer(z, factor)
    norms_by_name: dict[str, Tensor] = {}
    for name, of_direct in direct_norms.items():
        # `pop` frees the squares of each parameter once they are used.
        class_norms = squares.pop(name).sqrt_()
        # The norm of the predicted class is only rough, so it is replaced.
        class_norms.scatter_(1, predicted[:, None], of_direct[:, :1])
        norms_of_sets: list[Tensor] = []
        for set_name in directions:
            if set_name == "classes":
                norms_of_sets.append(class_norms)
            else:
                # Direction 0 is that of the predicted class.
                index = 1 + other_sets.index(set_name)
                norms_of_sets.append(of_direct[:, index].unsqueeze(1))
        norms_by_name[name] = torch.cat(norms_of_sets, dim=1)
    return norms_by_name


def _squared_norms_of_layer(
    z: Float[Tensor, "b r c"],
    factor: GradFactor,
) -> Float[Tensor, "b c"]:
    """Compute ‖∂W log p_c‖² or ‖∂b log p_c‖² of the last layer for every class, without cancellation.

    In a sample's gradient, the row of class c is the mean of (1 - p_rc) h_r over the sample's rows
    r, with probabilities p and features h; the row of another class k is the mean of -p_rk h_r. The
    squared norms of the rows are added up.

    Args:
        z: the logits of all rows.
        factor: the gradient factor of W or b.
    """
    p = z.double().softmax(-1)
    gradient = factor.gradient
    ones = p.new_ones(*p.shape[:2], 1)
    # Features [b, r, d]; for b, h is 1.
    h = gradient.activation_matrix.double() if isinstance(gradient, Outer) else ones
    # The row of class c has the coefficients 1 - p_rc, the sum of the other probabilities.
    own_row = _squared_row_norms(sum_of_others(p), h)
    other_rows = sum_of_others(_squared_row_norms(p, h))
    return own_row + other_rows


def _squared_row_norms(
    coefficients: Float[Tensor, "b r c"],
    h: Float[Tensor, "b r d"],
) -> Float[Tensor, "b c"]:
    """Compute ‖mean over r of coefficients_rk h_r‖² for each class k, a block of classes at a time."""
    samples, rows_per_sample, num_features = h.shape
    block_size = max(1, BLOCK_NUMBERS // (samples * num_features))
    squares: list[Tensor] = []
    for block in coefficients.split(block_size, dim=2):
        mean = block.mT @ h / rows_per_sample
        squares.append(torch.linalg.vecdot(mean, mean))
    return torch.cat(squares, dim=1)


def _squared_norms_of_body(
    pullback: Pullback,
    toward_predicted: Float[Tensor, "1 rows c"],
    predicted: Int[Tensor, " b"],
    last: LastProduct,
) -> dict[str, Float[Tensor, "b c"]]:
    """Compute ‖∇ log p_c‖² = xᵀ K x for every class and every parameter before the last layer.

    K are the inner products of the gradients k*, k_1, …, k_D, of the predicted class c* and of each
    of the D features; x = (1, W_c - W_c*) with the last layer's weights W.

    Args:
        pullback: the pullback to the gradient factors of these parameters alone.
        toward_predicted: e_c* - p, divided by the number of rows of a sample.
        predicted: c*, the predicted class of each sample.
        last: the last layer of the pass.

    Returns:
        Squared norms [b, c] by the parameter's name. Those of the predicted class are rough: the
        caller replaces them.
    """
    num_classes, num_features = last.weight.shape
    logits, samples = pullback.logits, pullback.samples
    rows = len(logits)
    gradients: dict[str, FeatureGradients] = {}
    for name, factor in pullback.single.items():
        gradients[name] = FeatureGradients(factor, num_features + 1, samples)
    (predicted_cotangent,), (scales,) = scale_to_unit(toward_predicted, samples)
    # There is an edge, as the parameters of `pullback` are used before the features.
    assert last.features is not None
    # Where each backward pass starts, and its cotangent: k* from the logits, k_d from h_d.
    starts: list[tuple[Tensor | GradientEdge, Tensor]] = [
        (logits, predicted_cotangent.to(logits.dtype))
    ]
    # Divided by the rows of a sample, so that the sum over them is a mean.
    units = torch.eye(num_features, dtype=logits.dtype, device=logits.device) * (samples / rows)
    for unit in units:
        starts.append((last.features, unit.expand(rows, -1)))
    for start, cotangent in starts:
        edge_cotangents = pullback.pull(cotangent, start)
        for name, factor in pullback.single.items():
            deltas = pullback.cotangents_of(factor, edge_cotangents)
            if deltas is not None:
                gradients[name].add(deltas)
        for name, gradient in pullback.sum_shared(edge_cotangents).items():
            if name not in gradients:
                gradients[name] = FeatureGradients(None, num_features + 1, samples)
            gradients[name].kept.append(gradient.flatten(1)[:, None])  # [b, 1, p]
    w = at_least_float32(last.weight)
    differences = w - w[predicted][:, None]  # W_c - W_c*
    # The coefficient of k* is not 1 but the scale by which its cotangent was divided.
    first_coefficients = scales.to(differences)[:, None, None].expand(-1, num_classes, 1)
    x = torch.cat([first_coefficients, differences], dim=2)
    squares: dict[str, Tensor] = {}
    # `popitem` lets a parameter's gradients be freed once their norms are known.
    while gradients:
        name, of_parameter = gradients.popitem()
        if of_parameter.kept:
            squares[name] = of_parameter.squared_norms(x, predicted)
    return squares


@dataclass
class FeatureGradients:
    """A parameter's gradients k*, k_1, …, k_D, from which its gradients for all classes follow.

    k* is the gradient of log p of the predicted class, k_d that of feature d of D before the last
    layer. The gradient of a weight is Σ_t δ_t a_tᵀ over positions t. The activations a are the same
    for all of the gradients, so it can be enough to keep the cotangents δ.

    Attributes:
        factor: the parameter's gradient factor; None if its gradient is a sum of several factors.
        cotangents: the number of gradients, D + 1.
        samples: the number of samples b.
        kept: for each gradient either δ [b·g, t, o] for g groups, t positions and o output
            features, or the gradient itself [b, 1, p] with its p entries.
    """

    factor: GradFactor | None
    cotangents: int
    samples: int
    kept: list[Tensor] = field(default_factory=list)

    @property
    def outer(self) -> Outer | None:
        """The gradient as Σ_t δ_t a_tᵀ, of which δ is kept; None if whole gradients are kept.

        δ is kept where that makes inner products cheaper.
        """
        if self.factor is None or not isinstance(self.factor.gradient, Outer):
            return None
        outer = self.factor.gradient
        return outer if outer.prefers_gram(self.cotangents) else None

    def add(self, deltas: list[Tensor | None]) -> None:
        """Add the next gradient to `kept`: its δ or all of its entries, depending on `outer`.

        Args:
            deltas: the cotangents at the edges of the parameter's factor, in autograd's graph.
        """
        assert self.factor is not None
        if self.outer is not None:
            self.kept.append(self.outer.compute_delta(deltas))
        else:
            self.kept.append(self.factor.gradient.compute(deltas).flatten(1)[:, None])

    def squared_norms(
        self,
        x: Float[Tensor, "b c m"],
        predicted: Int[Tensor, " b"],
    ) -> Float[Tensor, "b c"]:
        """Compute xᵀ K x for each class, with K [m, m] the inner products of the kept gradients.

        Where this loses digits, the gradient Σ_m x_m k_m itself is summed and squared instead. The
        value of the predicted class stays rough, as the caller replaces it. Empties `kept`.

        Args:
            x: for each class the coefficients (1, W_c - W_c*) of the m = D + 1 gradients.
            predicted: the predicted class c* of each sample.
        """
        factors = torch.stack(self.kept, dim=1)  # [b·g, m, t, o], or [b, m, 1, p]
        self.kept.clear()
        if self.outer is not None:
            products = self.outer.inner_products(factors)
            scale = self.outer.sum_of_position_norms(factors)
        else:
            products = inner_products(factors.flatten(2))
            scale = products.diagonal(dim1=1, dim2=2)
        squares = torch.linalg.vecdot(x @ products.to(x), x)
        # What the size of `squares` would be if terms did not cancel.
        without_cancellation = (x.square() @ scale.to(x).unsqueeze(2)).squeeze(2)
        # Where terms have canceled, digits are lost.
        recompute = squares < MIN_NORM_SHARE * without_cancellation
        # So they are where float32 under- or overflows.
        beyond = outside_float32_range(scale.amax(1))[:, None]
        beyond = beyond | outside_float32_range(squares)
        if bool(beyond.any()):
            # Where all gradients are zero, 0 is exact.
            nonzero = self._any_group(factors.flatten(1).any(1))
            squares = torch.where(nonzero, squares, 0.0)
            beyond &= nonzero
            # So it is where δ and the activations are nonzero at different positions.
            if self.outer is not None:
                overlaps = self._any_group(self.outer.overlaps(factors).any(1))
                beyond &= (squares != 0) | overlaps
        recompute |= beyond
        # The caller replaces the value of the predicted class.
        recompute.scatter_(1, predicted[:, None], False)
        squares = squares.double()
        for b in recompute.any(1).nonzero().flatten().tolist():
            class_indices = recompute[b].nonzero().flatten()
            squares[b, class_indices] = self._squares_of_sums(factors, x[b, class_indices], b)
        return squares

    def _any_group(self, of_group: Bool[Tensor, " bg"]) -> Bool[Tensor, "b 1"]:
        """Return for each sample whether a condition holds for any of its groups.

        Args:
            of_group: the condition for the g groups (of a grouped convolution, say) of b samples.
        """
        by_sample = of_group.unflatten(0, (self.samples, -1))
        return by_sample.any(1, keepdim=True)

    def _squares_of_sums(
        self,
        factors: Float[Tensor, "bg m t o"],
        x: Float[Tensor, "n m"],
        b: int,
    ) -> Float[Tensor, " n"]:
        """Compute ‖Σ_m x_m k_m‖² of one sample from the sum itself, in which no digits are lost.

        Args:
            factors: δ of all gradients k_m of all samples [b·g, m, t, o] (g groups, t positions, o
                output features), or the gradients themselves [b, m, 1, p].
            x: the coefficients x_m of n classes.
            b: the index of the sample.
        """
        # [m, g, t, o]
        of_sample = factors.unflatten(0, (self.samples, -1))[b].transpose(0, 1)
        numel = self.factor.gradient.numel if self.factor else of_sample[0].numel()
        squares: list[Tensor] = []
        # A block of classes at a time, which bounds the memory.
        for block in x.split(max(1, BLOCK_NUMBERS // numel)):
            total = block @ of_sample.flatten(1)
            total = total.unflatten(1, of_sample.shape[1:])  # [n, g, t, o]
            if self.outer is not None:
                total = total.mT @ self.outer.activations_of(b)
            squares.append(sum_of_squares(total.flatten(1)))
        return torch.cat(squares)
