"""A gradient that is a sum of outer products over positions, and its norms without writing it out.

The gradient of the weight of a product is G = Σ_t δ_t ⊗ a_t: δ_t is the cotangent of the result and
a_t the input of the product, at position t. Its squared norm is ‖Σ_t δ_t a_tᵀ‖² written out, or
⟨δδᵀ, aaᵀ⟩ over pairs of positions, whichever takes fewer multiplications. The Gram matrix aaᵀ is
the same for all classes.

Index letters: b sample, g group, t position, o features of δ, f features of a, m and n cotangents.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from qualms.gradients.precision import (
    at_least_float32,
    inner_products,
    outside_float32_range,
    sum_of_squares,
)
from qualms.gradients.tracing.sample_axis import Layout

# The most entries that the windows of one sample may have; if there are more, they are not copied.
MAX_WINDOW_ENTRIES = 2**22
# A squared norm below this share of what it would be if no terms canceled is computed again, more
# exactly.
MIN_NORM_SHARE = 1e-3


def raise_released(*_: Any) -> Tensor:
    """Raise AssertionError: replaces functions that need a forward pass which was freed."""
    raise AssertionError("the forward pass was released")


def gram_is_cheaper(t: int, o: int, f: int, num_cotangents: int) -> bool:
    """Whether the squared norm takes fewer multiplications as ⟨δδᵀ, aaᵀ⟩ than as ‖δᵀa‖².

    δ [t, o] is the cotangent of a product and a [t, f] its input, at t positions.

    Args:
        t: number of positions.
        o: number of features of δ.
        f: number of features of the input a.
        num_cotangents: number of cotangents that share the Gram matrix aaᵀ.

    Returns:
        True if t² (o + f / num_cotangents) < t o f.
    """
    return t * t * (o + f / num_cotangents) < t * o * f


class SharedGram:
    """Computes δδᵀ once for gradients that share the factor δ, as W and U of a recurrent layer.

    The matrix δδᵀ of the most recent cotangent is kept, and returned if the same cotangent follows.
    """

    def __init__(self) -> None:
        # A weak reference to the most recent cotangent; calling it returns the cotangent, or None.
        self._cotangent: Callable[[], Tensor | None] = lambda: None
        # The matrix δδᵀ of that cotangent.
        self._gram: Tensor | None = None

    def __call__(
        self, delta: Float[Tensor, "bg t o"], cotangents: list[Tensor | None]
    ) -> Float[Tensor, "bg t t"]:
        """Return δδᵀ; it is computed only if the cotangent differs from that of the last call.

        Args:
            delta: the factor δ, for each of b samples and g groups.
            cotangents: the cotangent that δ was computed from, as the only entry of a list.
        """
        (cotangent,) = cotangents
        assert cotangent is not None
        if self._gram is None or self._cotangent() is not cotangent:
            self._cotangent = weakref.ref(cotangent)
            self._gram = torch.bmm(delta, delta.mT)
        return self._gram


def _multiply_delta(
    delta: Float[Tensor, "bg t o"], _: list[Tensor | None]
) -> Float[Tensor, "bg t t"]:
    """Compute δδᵀ; the default of `Outer.delta_gram`, which also passes δ's cotangents."""
    return torch.bmm(delta, delta.mT)


def arrange_out_in(grad: Float[Tensor, "b 1 o f"]) -> Float[Tensor, "b o f"]:
    """Reshape the gradient of a weight [o, f], as `linear` takes it, by dropping the group axis.

    b is the number of samples, o of output features, f of input features.
    """
    return grad.squeeze(1)


def arrange_in_out(grad: Float[Tensor, "b 1 o f"]) -> Float[Tensor, "b f o"]:
    """Reshape the gradient of a weight [f, o], as `matmul` takes it, and drop the group axis.

    b is the number of samples, o of output features, f of input features.
    """
    return grad.squeeze(1).mT


class OuterSizes(NamedTuple):
    """The sizes t, o, f, g of one sample's gradient Σ_t δ_t ⊗ a_t, with δ [g, t, o], a [g, t, f].

    Args:
        positions: number of positions, t.
        out_features: number of features of δ, o.
        in_features: number of features of the activations a, f.
        groups: number of groups, g.
    """

    positions: int
    out_features: int
    in_features: int
    groups: int


@dataclass
class Outer:
    """A gradient Σ_t δ_t ⊗ a_t for each group, written out only where that is cheaper.

    δ is the cotangent of a product, and a its input, the activations. In shapes, b counts samples,
    g groups, t positions, o features of δ, f features of a, m cotangents, and bg is a single axis
    of b·g entries. As matrices, δ is [bg, t, o] and a is [bg, t, f]. `target` is the parameter.

    Args:
        grad_outputs: maps a cotangent to its factor δ [n, t, g, o]; n counts rows, or parts of rows
            in order.
        activations: returns the factor a [n, t, g, f] that all cotangents share; called when a is
            first needed.
        arrange: reshapes the gradient from [b, g, o, f] to [b, *target.shape].
        num_samples: number of samples, b.
        sizes: (t, o, f, g), with positions counted for one sample.
        fast_gram: returns aaᵀ [bg, t, t]; passed where that is cheaper than multiplying
            `activations` with itself.
        direct: maps a cotangent to the gradient [*target.shape] of a single sample; passed where
            `activations` may be too large to write out.
        delta_gram: maps the factor δ, and the cotangents it was computed from, to δδᵀ [bg, t, t].
    """

    grad_outputs: Callable[[Tensor], Tensor]
    activations: Callable[[], Tensor]
    arrange: Callable[[Tensor], Tensor]
    num_samples: int
    sizes: OuterSizes
    fast_gram: Callable[[], Tensor] | None = None
    direct: Callable[[Tensor], Tensor] | None = None
    delta_gram: Callable[[Tensor, list[Tensor | None]], Tensor] = _multiply_delta

    @classmethod
    def for_product(
        cls,
        num_samples: int,
        layout: Layout,
        activations: Tensor,
        out_features: int,
        arrange: Callable[[Tensor], Tensor],
    ) -> "Outer":
        """Build the gradient of W in the product activations @ W.

        The axes of `activations` between rows and features count the positions t.

        Args:
            num_samples: number of samples, b.
            layout: which axis is the batch axis, of `activations` and of the product alike.
            activations: the input of the product, [..., f].
            out_features: number of features of the product, o.
            arrange: reshapes the gradient from [b, 1, o, f] to [b, *target.shape].
        """

        def arrange_factor(factor: Tensor) -> Tensor:
            """Reshape the activations, or a cotangent of the product, to [n, t, 1, features]."""
            rows_first = layout.rows_first(factor)
            # With axis None there is a single row, and the tensor may have no axis for it.
            n = 1 if layout.axis is None else rows_first.shape[0]
            return rows_first.reshape(n, -1, 1, factor.shape[-1])

        in_features = activations.shape[-1]
        sizes = OuterSizes(
            positions=activations.numel() // in_features // num_samples,
            out_features=out_features,
            in_features=in_features,
            groups=1,
        )
        return cls(
            grad_outputs=arrange_factor,
            activations=partial(arrange_factor, activations),
            arrange=arrange,
            num_samples=num_samples,
            sizes=sizes,
        )

    # The size of the gradient, and whether the Gram matrix is cheaper.

    @property
    def numel(self) -> int:
        """Number of entries of one sample's gradient, [groups, out_features, in_features]."""
        return self.sizes.groups * self.sizes.out_features * self.sizes.in_features

    def count_stored(
        self,
        rows_per_sample: int,
        num_cotangents: int,
        is_alone: bool = False,
    ) -> int:
        """Count the floats that the norm of a gradient δᵀa stores for each sample.

        These are the activations a [t, f] or their Gram matrix aaᵀ [t, t], for each group; none if
        the gradient is computed without them. The gradient must have been traced on a single row.

        Args:
            rows_per_sample: number of rows of each sample.
            num_cotangents: number of cotangents that share what is stored.
            is_alone: whether the sample is the only one of its chunk, so that `direct` may compute
                its gradient without a copy of all windows.
        """
        # Positions, features of δ, features of a, groups.
        t, o, f, g = self.sizes
        t *= rows_per_sample
        if gram_is_cheaper(t, o, f, num_cotangents):
            return g * t * t
        if is_alone and self.direct is not None and g * t * f > MAX_WINDOW_ENTRIES:
            return 0
        return g * t * f

    def without_graph(self) -> "Outer":
        """Copy the sizes alone: the functions hold tensors of a forward pass, which can be freed.

        Calling a function of the copy raises AssertionError.
        """
        direct = raise_released if self.direct else None
        return Outer(
            grad_outputs=raise_released,
            activations=raise_released,
            arrange=raise_released,
            num_samples=self.num_samples,
            sizes=self.sizes,
            direct=direct,
        )

    def prefers_gram(self, num_cotangents: int) -> bool:
        """Whether squared norms of the gradient δᵀa take less work as ⟨δδᵀ, aaᵀ⟩ than as ‖δᵀa‖².

        Args:
            num_cotangents: number of cotangents that share the Gram matrix aaᵀ.
        """
        # Positions, features of δ, features of the activations a, groups.
        t, o, f, _ = self.sizes
        return gram_is_cheaper(t, o, f, num_cotangents)

    @property
    def _is_direct(self) -> bool:
        """Whether `direct` computes the gradient: for a single sample with large activations."""
        num_entries = self.sizes.groups * self.sizes.positions * self.sizes.in_features
        is_large = num_entries > MAX_WINDOW_ENTRIES
        return self.num_samples == 1 and self.direct is not None and is_large

    # The factors.

    def compute_delta(self, cotangents: list[Tensor | None]) -> Float[Tensor, "bg t o"]:
        """Arrange the cotangent δ of the operation's result by sample, group and position.

        Args:
            cotangents: the cotangent at the factor's edge, as the only entry of a list.

        Returns:
            The factor δ [b·g, t, o], for b samples, g groups, t positions and o features.
        """
        (cotangent,) = cotangents
        assert cotangent is not None
        return self._by_position(self.grad_outputs(cotangent))

    @cached_property
    def activation_matrix(self) -> Float[Tensor, "bg t f"]:
        """The activations a, shared by all cotangents; kept until `activation_gram` is computed.

        b counts samples, g groups, t positions and f features.
        """
        return self._by_position(self.activations())

    @cached_property
    def activation_gram(self) -> Float[Tensor, "bg t t"]:
        """The Gram matrix aaᵀ of the activations a, shared by all cotangents.

        b counts samples, g groups and t positions.
        """
        if self.fast_gram is not None:
            return self.fast_gram()
        a = self.activation_matrix
        # Drop the cached value: norms now need aaᵀ alone, and `a` may take much memory.
        del self.__dict__["activation_matrix"]
        return a @ a.mT

    def activations_of(self, sample: int) -> Float[Tensor, "g t f"]:
        """Compute the activations [g, t, f] of one sample, for g groups, t positions, f features.

        Args:
            sample: the sample's index in the batch.
        """
        by_sample_and_group = self._by_position(self.activations())
        return by_sample_and_group.unflatten(0, (self.num_samples, -1))[sample]

    def _by_position(self, factor: Float[Tensor, "n t g f"]) -> Float[Tensor, "bg nt f"]:
        """Reshape δ or a to one matrix for each sample and group, with a row for each position.

        Args:
            factor: δ or a for n rows of the batch, t positions of a row, g groups and f features.

        Returns:
            Matrices [b·g, (n / b)·t, f], for b samples.
        """
        n, t, g, f = factor.shape
        positions = n // self.num_samples * t
        by_sample = at_least_float32(factor).reshape(self.num_samples, positions, g, f)
        if g == 1:
            return by_sample.squeeze(2)
        # Contiguous: for a single sample this could stay a view, which `bmm` would copy group by
        # group.
        return by_sample.transpose(1, 2).reshape(self.num_samples * g, -1, f).contiguous()

    # The gradient, and its norms.

    def compute(self, cotangents: list[Tensor | None]) -> Float[Tensor, "b ..."]:
        """Write out the gradient Σ_t δ_t a_tᵀ of each of the b samples: [b, *target.shape].

        δ_t is the cotangent of a product and a_t its input, at position t.

        Args:
            cotangents: the cotangents at the factor's edges, for one class or direction.
        """
        if self._is_direct:
            return self._compute_directly(cotangents)
        delta = self.compute_delta(cotangents)
        grad = torch.bmm(delta.mT, self.activation_matrix)  # [b·g, o, f]
        return self.arrange(grad.unflatten(0, (self.num_samples, -1)))

    def squared_norm(
        self, cotangents: list[Tensor | None], num_cotangents: int
    ) -> Float[Tensor, " b"]:
        """Compute ‖Σ_t δ_t a_tᵀ‖² of each of the b samples, in the way that takes the least work.

        δ_t is the cotangent of a product and a_t its input, the activations, at position t.

        Args:
            cotangents: the cotangents at the factor's edges; for most gradients there is one edge.
            num_cotangents: number of classes or directions that this is called for, which share the
                work on activations.
        """
        if self._is_direct and not self.prefers_gram(num_cotangents):
            return sum_of_squares(self._compute_directly(cotangents).flatten(1))
        delta = self.compute_delta(cotangents)
        if self.sizes.positions == 1:  # a single product δaᵀ, of norm ‖δ‖ ‖a‖
            squared_delta = sum_of_squares(delta.flatten(1))
            squared_norms = squared_delta * sum_of_squares(self.activation_matrix.flatten(1))
        elif self.prefers_gram(num_cotangents):
            squared_norms = self._squared_norm_by_gram(delta, cotangents)
        else:
            grad = torch.bmm(delta.mT, self.activation_matrix)
            squared_norms = sum_of_squares(grad.flatten(1))
        return self._sum_groups(squared_norms)

    def l1_norm(self, cotangents: list[Tensor | None]) -> Float[Tensor, " b"]:
        """Compute Σ|g| = Σ|δ| Σ|a| of each sample's gradient g = δaᵀ, for b samples.

        δ is the cotangent of a product and a its input. Only valid if there is a single position,
        so that the gradient is a single outer product.

        Args:
            cotangents: the cotangents at the factor's edges.
        """
        delta_norms = self.compute_delta(cotangents).abs().sum((1, 2))
        activation_norms = self.activation_matrix.abs().sum((1, 2))
        return self._sum_groups(delta_norms * activation_norms)

    def inner_products_along(
        self, cotangents_by_direction: list[list[Tensor | None]]
    ) -> Float[Tensor, "b m m"]:
        """Compute ⟨G_i, G_j⟩ between the gradients of m directions, for each of b samples.

        Args:
            cotangents_by_direction: for each direction, the cotangents at the factor's edges.
        """
        deltas = [self.compute_delta(cotangents) for cotangents in cotangents_by_direction]
        return self.inner_products(torch.stack(deltas, dim=1))

    def inner_products(self, deltas: Float[Tensor, "bg m t o"]) -> Float[Tensor, "b m m"]:
        """Compute ⟨G_i, G_j⟩ between m gradients G_i = δ_iᵀa, which share the activations a.

        Args:
            deltas: the factors δ_1, …, δ_m, for b samples, g groups, t positions and o features.
        """
        if not self.prefers_gram(deltas.shape[1]):
            gradients = torch.matmul(deltas.mT, self.activation_matrix.unsqueeze(1))
            return self._sum_groups(inner_products(gradients.flatten(2)))
        # ⟨G_i, G_j⟩ = ⟨aaᵀ δ_i, δ_j⟩.
        gram = self.activation_gram
        gram_times_deltas = torch.matmul(gram.unsqueeze(1), deltas)
        # float64, as products that are out of float32's range are overwritten below.
        products = (gram_times_deltas.flatten(2) @ deltas.flatten(2).mT).double()
        squares = products.diagonal(dim1=1, dim2=2)
        largest_gram_entry = gram.flatten(1).amax(1).unsqueeze(1)
        unreliable = outside_float32_range(squares) | outside_float32_range(largest_gram_entry)
        if bool(unreliable.any()):
            # A square of 0 is exact where δ or a is zero at every position.
            unreliable &= (squares != 0) | self.overlaps(deltas)
            indices = unreliable.any(1).nonzero().flatten().tolist()
            self._recompute_in_double(products, deltas, indices)
        return self._sum_groups(products)

    def sum_of_position_norms(self, deltas: Float[Tensor, "bg m t o"]) -> Float[Tensor, "b m"]:
        """Compute Σ_t ‖δ_t‖²‖a_t‖²: the squared norms if the terms of positions were orthogonal.

        A squared norm that is much smaller than this sum has lost digits to cancellation.

        Args:
            deltas: m factors δ, for b samples, g groups, t positions and o features.
        """
        squared_activations = self.activation_gram.diagonal(dim1=1, dim2=2).unsqueeze(1)
        squared_deltas = deltas.square().sum(3)
        return self._sum_groups(torch.linalg.vecdot(squared_deltas, squared_activations))

    def overlaps(self, deltas: Float[Tensor, "bg m t o"]) -> Bool[Tensor, "bg m"]:
        """Whether δ and a are both nonzero at some position; else the gradient is exactly zero.

        Args:
            deltas: m factors δ, for b samples, g groups, t positions and o features.
        """
        return (deltas.any(3) & self._nonzero_positions.unsqueeze(1)).any(2)

    @cached_property
    def _nonzero_positions(self) -> Bool[Tensor, "bg t"]:
        """Whether the activations a_t have a nonzero entry, for each sample, group and position."""
        return self._by_position(self.activations()).any(2)

    def _compute_directly(self, cotangents: list[Tensor | None]) -> Float[Tensor, "1 ..."]:
        """Compute the gradient of a single sample by `direct`, without a copy of its windows."""
        (cotangent,) = cotangents
        assert cotangent is not None
        assert self.direct is not None
        return self.direct(cotangent).unsqueeze(0)  # the sample axis

    def _sum_groups(self, values: Float[Tensor, "bg ..."]) -> Float[Tensor, "b ..."]:
        """Sum the values of the g groups of each of the b samples."""
        return values.unflatten(0, (self.num_samples, -1)).sum(1)

    def _squared_norm_by_gram(
        self, delta: Float[Tensor, "bg t o"], cotangents: list[Tensor | None]
    ) -> Float64[Tensor, " bg"]:
        """Compute ‖δᵀa‖² as ⟨δδᵀ, aaᵀ⟩; write out δᵀa where that would lose digits or overflow.

        a are the activations, whose Gram matrix aaᵀ is computed once.

        Args:
            delta: the factor δ, for b samples, g groups, t positions and o features.
            cotangents: the cotangents that δ was computed from, passed on to `delta_gram`.
        """
        gram = self.activation_gram
        # If t < o, δδᵀ [t, t] is smaller than aaᵀδ [t, o].
        if delta.shape[1] < delta.shape[2]:
            delta_gram = self.delta_gram(delta, cotangents)
            squared_norms = _frobenius_product(delta_gram, gram)
            squared_deltas = delta_gram.diagonal(dim1=1, dim2=2)
        else:
            squared_norms = _frobenius_product(torch.bmm(gram, delta), delta)
            squared_deltas = torch.linalg.vecdot(delta, delta)
        squared_activations = gram.diagonal(dim1=1, dim2=2)
        # What the squared norm would be if the terms of positions were orthogonal. Where it is much
        # smaller, this way has lost twice as many digits as ‖δᵀa‖² loses.
        without_cancellation = torch.linalg.vecdot(squared_deltas, squared_activations)
        unreliable = outside_float32_range(squared_deltas.amax(1))
        unreliable |= outside_float32_range(squared_activations.amax(1))
        unreliable |= outside_float32_range(without_cancellation) | ~squared_norms.isfinite()
        if bool(unreliable.any()):
            # Where δ or a is zero at every position, 0 is exact.
            squared_norms = torch.where(delta.flatten(1).any(1), squared_norms, 0.0)
            # `overlaps` takes m factors δ: here m is 1.
            overlaps = self.overlaps(delta.unsqueeze(1)).squeeze(1)
            unreliable &= (squared_norms != 0) | overlaps
        # float64, as `sum_of_squares` returns, which overwrites some of them.
        squared_norms = squared_norms.double()
        recompute = (squared_norms < MIN_NORM_SHARE * without_cancellation) | unreliable
        indices = recompute.nonzero().squeeze(1)
        if len(indices):
            a = self._by_position(self.activations())[indices]
            grad = torch.bmm(delta[indices].mT, a)
            squared_norms[indices] = sum_of_squares(grad.flatten(1))
        return squared_norms

    def _recompute_in_double(
        self,
        products: Float64[Tensor, "bg m m"],
        deltas: Float[Tensor, "bg m t o"],
        indices: list[int],
    ) -> None:
        """Overwrite inner products that do not fit 32 bits by inner products computed in 64 bits.

        One matrix after the other, to save memory.

        Args:
            products: ⟨G_i, G_j⟩ of the gradients G_i = δ_iᵀa, with activations a; changed in place.
            deltas: the m factors δ_i, for b samples, g groups, t positions and o features.
            indices: indices of the matrices to overwrite, along the first axis.
        """
        if not indices:
            return
        activations = self._by_position(self.activations())
        for i in indices:
            a, delta = activations[i].double(), deltas[i].double()
            gram_times_delta = (a @ a.mT) @ delta
            products[i] = gram_times_delta.flatten(1) @ delta.flatten(1).mT


def _frobenius_product(a: Float[Tensor, "n i j"], b: Float[Tensor, "n i j"]) -> Float[Tensor, " n"]:
    """Compute Σ_ij a_ij b_ij for each of n pairs of matrices a, b."""
    return torch.linalg.vecdot(a.flatten(1), b.flatten(1))
