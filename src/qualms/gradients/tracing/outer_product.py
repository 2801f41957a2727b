"""A gradient that is a sum of outer products over positions, and its norms without writing it out.

The gradient of the weight of a product is G = Σ_t δ_t ⊗ a_t: δ_t is the cotangent of the result and
a_t the input of the product, at position t. Its squared norm is ‖Σ_t δ_t a_tᵀ‖² written out, or
⟨δδᵀ, aaᵀ⟩ over pairs of positions, whichever takes fewer multiplications. The Gram matrix aaᵀ is
the same for all classes.

Index letters: b sample, g group, t position, o/f features of δ and a, m/n cotangents.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
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

# Entries of all windows of one sample; if there are more, they are not copied.
LARGE = 2**22
# A squared norm below this share of its sum without cancellation is computed again, more exactly.
CANCELLED = 1e-3


def raise_released(*_: Any) -> Tensor:
    """Raise AssertionError: replaces functions that need a forward pass which was freed."""
    raise AssertionError("the forward pass was released")


def gram_is_cheaper(t: int, o: int, f: int, cotangents: int) -> bool:
    """Whether the squared norm takes fewer multiplications as ⟨δδᵀ, aaᵀ⟩ than as ‖δᵀa‖².

    Args:
        t: number of positions.
        o: number of features of δ.
        f: number of features of a.
        cotangents: number of cotangents that share the Gram matrix aaᵀ.

    Returns:
        True if t² (o + f / cotangents) < t o f.
    """
    return t * t * (o + f / cotangents) < t * o * f


class SharedGram:
    """Computes δδᵀ once for gradients that share the factor δ, as W and U of a recurrent layer.

    The matrix of the last cotangent is kept, and returned again as long as that cotangent comes.
    """

    def __init__(self) -> None:
        # A weak reference to the last cotangent, called to get it.
        self._cotangent: Callable[[], Tensor | None] = lambda: None
        self._gram: Tensor | None = None

    def __call__(
        self, d: Float[Tensor, "bg t o"], deltas: list[Tensor | None]
    ) -> Float[Tensor, "bg t t"]:
        """Return δδᵀ, kept from the last call if that had the same cotangent.

        Args:
            d: the factor δ.
            deltas: the cotangent that δ was computed from, as the only entry of a list.
        """
        (cotangent,) = deltas
        assert cotangent is not None
        if self._gram is None or self._cotangent() is not cotangent:
            self._cotangent = weakref.ref(cotangent)
            self._gram = torch.bmm(d, d.mT)
        return self._gram


def _gram(d: Float[Tensor, "bg t o"], _: list[Tensor | None]) -> Float[Tensor, "bg t t"]:
    """Compute δδᵀ; the default of `Outer.delta_gram`."""
    return torch.bmm(d, d.mT)


def out_in(grad: Float[Tensor, "b 1 o f"]) -> Float[Tensor, "b o f"]:
    """Arrange the gradient of a weight [o, f], as `linear` takes it; axis 1 is the single group."""
    return grad.squeeze(1)


def in_out(grad: Float[Tensor, "b 1 o f"]) -> Float[Tensor, "b f o"]:
    """Arrange the gradient of a weight [f, o], as `matmul` takes it; axis 1 is the single group."""
    return grad.squeeze(1).mT


class OuterSizes(NamedTuple):
    """The sizes t, o, f, g of the factors δ [g, t, o] and a [g, t, f] of one sample's gradient."""

    positions: int
    out_features: int  # of δ
    in_features: int  # of a
    groups: int


@dataclass
class Outer:
    """A gradient Σ_t δ_t ⊗ a_t for each group, written out only where that is cheaper.

    In shapes, b counts samples, g groups, t positions, o and f the features of δ and a, and m
    cotangents; `bg` is a single axis of b·g. As matrices, δ is [bg, t, o] and a is [bg, t, f].

    Args:
        grad_outputs: maps a cotangent to its factor δ [n, t, g, o]; n counts rows, or parts of rows
            in order.
        activations: returns the factor a [n, t, g, f] that all cotangents share; called when a is
            first needed.
        arrange: reshapes the gradient from [b, g, o, f] to [b, *target.shape].
        samples: number of samples, b.
        sizes: (t, o, f, g), with positions counted for one sample.
        fast_gram: returns aaᵀ [b·g, t, t]; given where that is cheaper than multiplying
            `activations` with itself.
        direct: maps a cotangent to the gradient [*target.shape] of a single sample; given where
            `activations` may be too large to write out.
        delta_gram: maps the factor δ, and the cotangents it was computed from, to δδᵀ [b·g, t, t].
    """

    grad_outputs: Callable[[Tensor], Tensor]
    activations: Callable[[], Tensor]
    arrange: Callable[[Tensor], Tensor]
    samples: int
    sizes: OuterSizes
    fast_gram: Callable[[], Tensor] | None = None
    direct: Callable[[Tensor], Tensor] | None = None
    delta_gram: Callable[[Tensor, list[Tensor | None]], Tensor] = _gram

    @classmethod
    def product(
        cls,
        samples: int,
        layout: Layout,
        a: Tensor,
        features: int,
        arrange: Callable[[Tensor], Tensor],
    ) -> "Outer":
        """Build the gradient of W in a @ W: axes of `a` between rows and features are positions t.

        Args:
            samples: number of samples, b.
            layout: which axis counts the rows, of `a` and of the product alike.
            a: the input of the product, [..., f].
            features: number of features of the product, o.
            arrange: reshapes the gradient from [b, 1, o, f] to [b, *target.shape].
        """

        def factor(t: Tensor) -> Tensor:
            """Arrange `a`, or the cotangent of the product, as [n, t, 1, features]."""
            leading = layout.leading(t)
            n = 1 if layout.axis is None else leading.shape[0]  # axis None: a single row
            return leading.reshape(n, -1, 1, t.shape[-1])

        def activations() -> Tensor:
            """Arrange `a` when it is first needed."""
            return factor(a)

        positions = a.numel() // a.shape[-1] // samples
        sizes = OuterSizes(positions, features, a.shape[-1], 1)
        return cls(factor, activations, arrange, samples, sizes)

    # The size of the gradient, and whether the Gram matrix is cheaper.

    @property
    def numel(self) -> int:
        """Number of entries of one sample's gradient."""
        return self.sizes.groups * self.sizes.out_features * self.sizes.in_features

    def count_stored(self, rows_per_sample: int, cotangents: int, alone: bool = False) -> int:
        """Count the numbers that a norm has to store for each sample: aaᵀ, a, or none.

        For a gradient that was recorded on a single row.

        Args:
            rows_per_sample: number of rows of each sample.
            cotangents: number of cotangents that share what is stored.
            alone: whether the sample is the only one of its chunk, so that `direct` may write its
                gradient without a copy of all windows.
        """
        t, o, f, g = self.sizes
        t *= rows_per_sample
        if gram_is_cheaper(t, o, f, cotangents):
            return g * t * t
        if alone and self.direct is not None and g * t * f > LARGE:
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
            samples=self.samples,
            sizes=self.sizes,
            direct=direct,
        )

    def prefers_gram(self, cotangents: int) -> bool:
        """Whether norms are cheaper as ⟨δδᵀ, aaᵀ⟩ than by δᵀa if this many cotangents share aaᵀ."""
        t, o, f, _ = self.sizes
        return gram_is_cheaper(t, o, f, cotangents)

    @property
    def _is_direct(self) -> bool:
        """Whether `direct` writes the gradient: for a single sample with a large factor a."""
        t, _, f, g = self.sizes
        return self.samples == 1 and self.direct is not None and g * t * f > LARGE

    # The factors.

    def delta(self, cotangents: list[Tensor | None]) -> Float[Tensor, "bg t o"]:
        """Compute the factor δ from a cotangent, given as the only entry of a list."""
        (d,) = cotangents
        assert d is not None
        return self._by_position(self.grad_outputs(d))

    @cached_property
    def activation_matrix(self) -> Float[Tensor, "bg t f"]:
        """The factor a, shared by all cotangents; kept until `activation_gram` is computed."""
        return self._by_position(self.activations())

    @cached_property
    def activation_gram(self) -> Float[Tensor, "bg t t"]:
        """The Gram matrix aaᵀ, shared by all cotangents."""
        if self.fast_gram is not None:
            return self.fast_gram()
        a = self.activation_matrix
        # Not needed any more: free the memory.
        del self.__dict__["activation_matrix"]
        return a @ a.mT

    def activations_of(self, sample: int) -> Float[Tensor, "g t f"]:
        """Compute the factor a of one sample, given the sample's index in the batch."""
        return self._by_position(self.activations()).unflatten(0, (self.samples, -1))[sample]

    def _by_position(self, factor: Float[Tensor, "n t g f"]) -> Float[Tensor, "bg nt f"]:
        """Arrange a factor as a matrix for each sample and group, over all the rows' positions."""
        n, t, g, f = factor.shape
        positions = n // self.samples * t
        of_samples = at_least_float32(factor).reshape(self.samples, positions, g, f)
        if g == 1:
            return of_samples.squeeze(2)
        # Contiguous: for a single sample this could stay a view, which `bmm` would copy group by
        # group.
        return of_samples.transpose(1, 2).reshape(self.samples * g, -1, f).contiguous()

    # The gradient, and its norms.

    def write(self, cotangents: list[Tensor | None]) -> Float[Tensor, "b ..."]:
        """Write out the gradient Σ_t δ_t a_tᵀ of each sample: [b, *target.shape].

        Args:
            cotangents: the cotangents at the factor's edges, for one class or direction.
        """
        if self._is_direct:
            return self._write_directly(cotangents)
        d = self.delta(cotangents)
        grad = torch.bmm(d.mT, self.activation_matrix)
        return self.arrange(grad.unflatten(0, (self.samples, -1)))

    def squared_norm(self, deltas: list[Tensor | None], cotangents: int) -> Float[Tensor, " b"]:
        """Compute ‖Σ_t δ_t a_tᵀ‖² of each sample, in the way that takes the least work.

        Args:
            deltas: the cotangents at the factor's edges; for most gradients there is a single one.
            cotangents: for how many classes or directions this is called, sharing the work on a.
        """
        if self._is_direct and not self.prefers_gram(cotangents):
            return sum_of_squares(self._write_directly(deltas).flatten(1))
        d = self.delta(deltas)
        if self.sizes.positions == 1:  # ‖δ‖²‖a‖²
            of_delta = sum_of_squares(d.flatten(1))
            each = of_delta * sum_of_squares(self.activation_matrix.flatten(1))
        elif self.prefers_gram(cotangents):
            each = self._squared_norm_by_gram(d, deltas)
        else:
            each = sum_of_squares(torch.bmm(d.mT, self.activation_matrix).flatten(1))
        return self._sum_groups(each)

    def l1_norm(self, deltas: list[Tensor | None]) -> Float[Tensor, " b"]:
        """Compute Σ|g| = Σ|δ| Σ|a| of each sample; only valid if there is a single position."""
        of_delta = self.delta(deltas).abs().sum((1, 2))
        of_activations = self.activation_matrix.abs().sum((1, 2))
        return self._sum_groups(of_delta * of_activations)

    def inner_products_along(self, deltas: list[list[Tensor | None]]) -> Float[Tensor, "b m m"]:
        """Compute ⟨G_m, G_n⟩ between the gradients of several directions.

        Args:
            deltas: the cotangents at the factor's edges, for each of the m gradients.
        """
        factors = [self.delta(of_one) for of_one in deltas]
        return self.inner_products(torch.stack(factors, dim=1))

    def inner_products(self, d: Float[Tensor, "bg m t o"]) -> Float[Tensor, "b m m"]:
        """Compute ⟨G_m, G_n⟩ between the gradients G_m = δ_mᵀa of m factors δ that share a."""
        if not self.prefers_gram(d.shape[1]):
            gradients = torch.matmul(d.mT, self.activation_matrix.unsqueeze(1))
            return self._sum_groups(inner_products(gradients.flatten(2)))
        gram = self.activation_gram
        gram_times_d = torch.matmul(gram.unsqueeze(1), d)
        products = (gram_times_d.flatten(2) @ d.flatten(2).mT).double()
        squares = products.diagonal(dim1=1, dim2=2)
        unreliable = (
            outside_float32_range(squares) | outside_float32_range(gram.flatten(1).amax(1))[:, None]
        )
        if bool(unreliable.any()):
            # A square of 0 is exact where δ or a is zero at every position.
            unreliable &= (squares != 0) | self.overlaps(d)
            indices = unreliable.any(1).nonzero().flatten().tolist()
            self._recompute_in_double(products, d, indices)
        return self._sum_groups(products)

    def sum_of_position_norms(self, d: Float[Tensor, "bg m t o"]) -> Float[Tensor, "b m"]:
        """Compute Σ_t ‖δ_t‖²‖a_t‖²: the squared norms if the terms of positions were orthogonal.

        Much smaller norms have lost digits to cancellation.
        """
        of_activations = self.activation_gram.diagonal(dim1=1, dim2=2).unsqueeze(1)
        return self._sum_groups(torch.linalg.vecdot(d.square().sum(3), of_activations))

    def overlaps(self, d: Float[Tensor, "bg m t o"]) -> Bool[Tensor, "bg m"]:
        """Whether δ and a are both nonzero at some position; else the gradient is exactly zero."""
        return (d.any(3) & self._nonzero_positions.unsqueeze(1)).any(2)

    @cached_property
    def _nonzero_positions(self) -> Bool[Tensor, "bg t"]:
        """Whether a_t has a nonzero entry, for each position."""
        return self._by_position(self.activations()).any(2)

    def _write_directly(self, cotangents: list[Tensor | None]) -> Float[Tensor, "1 ..."]:
        """Write the gradient of a single sample by `direct`, without a copy of its windows."""
        (d,) = cotangents
        assert d is not None
        assert self.direct is not None
        return self.direct(d)[None]

    def _sum_groups(self, each: Float[Tensor, "bg ..."]) -> Float[Tensor, "b ..."]:
        """Add up the groups' values for each sample."""
        return each.unflatten(0, (self.samples, -1)).sum(1)

    def _squared_norm_by_gram(
        self, d: Float[Tensor, "bg t o"], deltas: list[Tensor | None]
    ) -> Float64[Tensor, " bg"]:
        """Compute ⟨δδᵀ, aaᵀ⟩, or ‖δᵀa‖² where positions cancel or 32 bits are too few.

        Args:
            d: the factor δ.
            deltas: the cotangents that δ was computed from, passed on to `delta_gram`.
        """
        gram = self.activation_gram
        # T < o: δδᵀ [t, t] is smaller than aaᵀδ [t, o].
        if d.shape[1] < d.shape[2]:
            of_delta = self.delta_gram(d, deltas)
            squared_norms = _frobenius_product(of_delta, gram)
            delta_squares = of_delta.diagonal(dim1=1, dim2=2)
        else:
            squared_norms = _frobenius_product(torch.bmm(gram, d), d)
            delta_squares = torch.linalg.vecdot(d, d)
        squares = gram.diagonal(dim1=1, dim2=2)
        # Where positions cancel, this sum loses twice as many digits as the gradient δᵀa does:
        # write that out instead.
        without_cancellation = torch.linalg.vecdot(delta_squares, squares)
        unreliable = outside_float32_range(delta_squares.amax(1)) | outside_float32_range(
            squares.amax(1)
        )
        unreliable |= outside_float32_range(without_cancellation) | ~squared_norms.isfinite()
        if bool(unreliable.any()):
            # Where δ or a is zero at every position, 0 is exact.
            squared_norms = torch.where(d.flatten(1).any(1), squared_norms, 0.0)
            unreliable &= (squared_norms != 0) | self.overlaps(d.unsqueeze(1)).squeeze(1)
        squared_norms = squared_norms.double()
        recompute = (squared_norms < CANCELLED * without_cancellation) | unreliable
        indices = recompute.nonzero().squeeze(1)
        if len(indices):
            a = self._by_position(self.activations())[indices]
            squared_norms[indices] = sum_of_squares(torch.bmm(d[indices].mT, a).flatten(1))
        return squared_norms

    def _recompute_in_double(
        self, products: Float64[Tensor, "bg m m"], d: Float[Tensor, "bg m t o"], which: list[int]
    ) -> None:
        """Overwrite the inner products that 32 bits do not hold by those computed in 64 bits.

        One matrix after the other, to save memory.

        Args:
            products: ⟨G_m, G_n⟩; changed in place.
            d: the factors δ of the gradients G_m.
            which: indices of the matrices to overwrite, along the first axis.
        """
        # If `which` is empty, any tensor will do, as none is read.
        activations = self._by_position(self.activations()) if which else d
        for i in which:
            a, wide = activations[i].double(), d[i].double()
            products[i] = ((a @ a.mT) @ wide).flatten(1) @ wide.flatten(1).mT


def _frobenius_product(a: Float[Tensor, "n i j"], b: Float[Tensor, "n i j"]) -> Float[Tensor, " n"]:
    """Compute Σ_ij a_ij b_ij for each pair of matrices."""
    return torch.linalg.vecdot(a.flatten(1), b.flatten(1))
