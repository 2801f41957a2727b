"""What a parameter's gradient is made of, and its norms without writing it out where that is
cheaper.

For one class the cotangent δ of an operation's result gives the gradient of each input's loss with
respect to the operation's parameter. Two forms cover all rules:

- `Outer`: Σ_t δ_t ⊗ a_t over positions t (weights of linear and convolution layers). Its squared
  norm is ‖Σ_t δ_t a_tᵀ‖² written out, or ⟨δδᵀ, aaᵀ⟩ over pairs of positions, whichever has fewer
  multiplications; aaᵀ serves all classes.
- `Summed`: written out directly (biases, scales, copies of a parameter), because it is no larger
  than the parameter.

Perturbed copies of an input are further positions of the same sum, so smoothing needs no other
algebra. Index letters: b input, g group, t position, o/f features of δ and a, m/n cotangents.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor
from torch.autograd.graph import GradientEdge

from qualms.gradients.precision import at_least_float32, beyond, inner_products, sum_of_squares
from qualms.gradients.tracing.sample_axis import Layout


def _gone(*_: Any) -> Tensor:
    raise AssertionError("the forward pass was let go")


@dataclass(frozen=True)
class Summed:
    """A gradient that is written out: `write` takes the cotangents at the piece's edges to [inputs,
    *shape].
    """

    write: Callable[[list[Tensor | None]], Tensor]
    numel: int  # of one input's gradient
    products: int = 0  # multiplications that it takes, if more than it has numbers

    @property
    def work(self) -> int:
        """Multiplications that one input's gradient takes, and its operation's forward pass as
        well.
        """
        return max(self.numel, self.products)

    def bare(self) -> "Summed":
        """Its size alone."""
        return Summed(_gone, self.numel, self.products)

    @classmethod
    def over_rows(cls, layout: Layout, inputs: int, shape: torch.Size) -> "Summed":
        """The cotangent of a copy that has a part for each row: add the parts of an input's rows."""

        def write(cotangents: list[Tensor | None]) -> Tensor:
            (d,) = cotangents
            assert d is not None
            leading = at_least_float32(layout.leading(d))
            if layout.axis is None:
                return leading.reshape(inputs, *shape)
            # The parts of one row follow each other on the axis: put the axis back, then add the
            # rows of an input.
            apart = leading.unflatten(0, (inputs, layout.rows // inputs, layout.per_row)).sum(1)
            return apart.movedim(1, 1 + layout.axis).reshape(inputs, *shape)

        return cls(write, shape.numel())

    @classmethod
    def broadcast(cls, layout: Layout, inputs: int, shape: torch.Size) -> "Summed":
        """The cotangent of a copy that was expanded along the row axis: add everything that one
        input has there.
        """

        def write(cotangents: list[Tensor | None]) -> Tensor:
            (d,) = cotangents
            assert d is not None
            leading = at_least_float32(layout.leading(d))
            return (
                leading.unflatten(0, (inputs, leading.shape[0] // inputs))
                .sum(1)
                .reshape(inputs, *shape)
            )

        return cls(write, shape.numel())

    @classmethod
    def of_copies(cls, inputs: int, shape: torch.Size) -> "Summed":
        """One cotangent for each row's own copy."""

        def write(cotangents: list[Tensor | None]) -> Tensor:
            known = next(d for d in cotangents if d is not None)
            each = [torch.zeros_like(known) if d is None else d for d in cotangents]
            return (
                at_least_float32(torch.stack(each))
                .unflatten(0, (inputs, -1))
                .sum(1)
                .reshape(inputs, *shape)
            )

        return cls(write, shape.numel())


LARGE = 2**22  # numbers in all windows of one input: beyond that no copy of them is made
CANCELLED = 1e-3  # of the sum without cancellation


def cheaper_by_pairs(t: int, o: int, f: int, cotangents: int) -> bool:
    """Multiplications of ⟨δδᵀ, aaᵀ⟩, with aaᵀ shared by the cotangents, against those of δᵀa."""
    return t * t * (o + f / cotangents) < t * o * f


class SharedPairs:
    """δδᵀ for several gradients that have the same factor δ: computed by the first one that asks
    for it.
    """

    def __init__(self) -> None:
        self._of: Callable[[], Tensor | None] = lambda: None
        self._known: Tensor | None = None

    def __call__(
        self, d: Float[Tensor, "bg t o"], deltas: list[Tensor | None]
    ) -> Float[Tensor, "bg t t"]:
        """From the factor δ, and the one cotangent that it comes from."""
        (cotangent,) = deltas
        assert cotangent is not None
        if self._known is None or self._of() is not cotangent:
            self._of, self._known = weakref.ref(cotangent), torch.bmm(d, d.mT)
        return self._known


@dataclass
class Outer:
    """A gradient Σ_t moving_t ⊗ fixed_t per group, not written out unless that is cheaper.

    Args:
        moving: from a cotangent to its factor [n, t, g, o]; n counts rows, or parts of rows in
            order.
        still: gives the factor [n, t, g, f] that all cotangents share; computed when first needed.
        arrange: from the written gradient [b, g, o, f] to [b, *target.shape].
        inputs: b.
        sizes: (t, o, f, g), positions counted per input.
        pairs: gives aaᵀ [b·g, t, t] where that is cheaper than multiplying `activations` with
            itself.
        direct: writes the gradient [*target.shape] of a single input from a cotangent, where
            `activations` is large.
        moving_pairs: from the factor δ, and the cotangents that it comes from, to δδᵀ [b·g, t, t].
    """

    grad_outputs: Callable[[Tensor], Tensor]
    activations: Callable[[], Tensor]
    arrange: Callable[[Tensor], Tensor]
    inputs: int
    sizes: tuple[int, int, int, int]
    pairs: Callable[[], Tensor] | None = None
    direct: Callable[[Tensor], Tensor] | None = None
    moving_pairs: Callable[[Tensor, list[Tensor | None]], Tensor] = lambda d, _: torch.bmm(d, d.mT)

    @classmethod
    def product(
        cls,
        inputs: int,
        layout: Layout,
        a: Tensor,
        features: int,
        arrange: Callable[[Tensor], Tensor],
    ) -> "Outer":
        """Of the cotangent [..., features] and the input a [..., f] of a product: every axis but
        the last is t.
        """

        def factor(t: Tensor) -> Tensor:
            leading = layout.leading(t)
            n = 1 if layout.axis is None else leading.shape[0]
            return leading.reshape(n, -1, 1, t.shape[-1])

        positions = a.numel() // a.shape[-1] // inputs
        return cls(
            factor, lambda: factor(a), arrange, inputs, (positions, features, a.shape[-1], 1)
        )

    @property
    def numel(self) -> int:
        """How many numbers one input's gradient has."""
        _, o, f, g = self.sizes
        return g * o * f

    def held(self, rows_per_sample: int, cotangents: int, alone: bool = False) -> int:
        """How many numbers are kept for one input of `rows_per_sample` rows, if this was recorded
        on one row.

        `alone`: it is the only input of its chunk, so that its gradient may be written without a
        copy of all windows.
        """
        t, o, f, g = self.sizes
        t *= rows_per_sample
        if cheaper_by_pairs(t, o, f, cotangents):
            return g * t * t
        return 0 if alone and self.direct is not None and g * t * f > LARGE else g * t * f

    def bare(self) -> "Outer":
        """Its sizes alone, without the tensors of a forward pass that it leads to."""
        return Outer(
            _gone, _gone, _gone, self.inputs, self.sizes, direct=_gone if self.direct else None
        )

    def by_pairs(self, cotangents: int) -> bool:
        """Whether ⟨δδᵀ, aaᵀ⟩ takes fewer multiplications than writing the gradient out, for so many
        cotangents.
        """
        t, o, f, _ = self.sizes
        return cheaper_by_pairs(t, o, f, cotangents)

    @cached_property
    def fixed(self) -> Float[Tensor, "bg t f"]:
        """a, shared by all cotangents."""
        return self._positions(self.activations())

    @cached_property
    def fixed_pairs(self) -> Float[Tensor, "bg t t"]:
        """aaᵀ, shared by all cotangents."""
        if self.pairs is not None:
            return self.pairs()
        a = self.fixed
        del self.__dict__["fixed"]
        return a @ a.mT

    def _positions(self, factor: Float[Tensor, "n t g f"]) -> Float[Tensor, "bg nt f"]:
        n, t, g, f = factor.shape
        rows_per_sample = at_least_float32(factor).reshape(self.inputs, n // self.inputs * t, g, f)
        if g == 1:
            return rows_per_sample.squeeze(2)
        # In order: of one input alone this could stay a view, which `bmm` would copy group by
        # group.
        return rows_per_sample.transpose(1, 2).reshape(self.inputs * g, -1, f).contiguous()

    def write(self, cotangents: list[Tensor | None]) -> Tensor:
        """The gradient of each input: [b, *target.shape]."""
        if self._directly:
            return self._direct(cotangents)
        d = self.delta(cotangents)
        grad = torch.bmm(d.mT, self.fixed)
        return self.arrange(grad.unflatten(0, (self.inputs, -1)))

    def square(self, deltas: list[Tensor | None], cotangents: int) -> Float[Tensor, " b"]:
        """The squared norm of each input's gradient; `cotangents` is how many share the work on a."""
        if self._directly and not self.by_pairs(cotangents):
            return sum_of_squares(self._direct(deltas).flatten(1))
        d = self.delta(deltas)
        if self.sizes[0] == 1:  # one position: ‖δ‖²‖a‖²
            each = sum_of_squares(d.flatten(1)) * sum_of_squares(self.fixed.flatten(1))
        elif self.by_pairs(cotangents):
            each = self._square_by_pairs(d, deltas)
        else:
            each = sum_of_squares(torch.bmm(d.mT, self.fixed).flatten(1))
        return each.unflatten(0, (self.inputs, -1)).sum(1)

    @property
    def _directly(self) -> bool:
        t, _, f, g = self.sizes
        return self.inputs == 1 and self.direct is not None and g * t * f > LARGE

    def _direct(self, cotangents: list[Tensor | None]) -> Float[Tensor, "1 ..."]:
        (d,) = cotangents
        assert d is not None
        assert self.direct is not None
        return self.direct(d)[None]

    def absolute(self, deltas: list[Tensor | None]) -> Float[Tensor, " b"]:
        """Σ|g| of each input's gradient where there is one position: Σ|δ| Σ|a|."""
        d = self.delta(deltas)
        return (
            (d.abs().sum((1, 2)) * self.fixed.abs().sum((1, 2)))
            .unflatten(0, (self.inputs, -1))
            .sum(1)
        )

    def _square_by_pairs(
        self, d: Float[Tensor, "bg t o"], deltas: list[Tensor | None]
    ) -> Float64[Tensor, " bg"]:
        pairs = self.fixed_pairs
        if d.shape[1] < d.shape[2]:  # the same sum, with the smaller matrix in between
            own = self.moving_pairs(d, deltas)
            each, sizes = _dot(own, pairs), own.diagonal(dim1=1, dim2=2)
        else:
            each, sizes = _dot(torch.bmm(pairs, d), d), torch.linalg.vecdot(d, d)
        # Positions that cancel take twice as many digits with them here as in the gradient itself:
        # write those out.
        fixed = pairs.diagonal(dim1=1, dim2=2)
        apart = torch.linalg.vecdot(sizes, fixed)
        odd = beyond(sizes.amax(1)) | beyond(fixed.amax(1)) | beyond(apart) | ~each.isfinite()
        if bool(odd.any()):
            each = torch.where(d.flatten(1).any(1), each, 0.0)
            odd &= (each != 0) | self.meets(d.unsqueeze(1)).squeeze(1)
        each, cancelled = each.double(), ((each < CANCELLED * apart) | odd).nonzero().squeeze(1)
        if len(cancelled):
            gradient = torch.bmm(d[cancelled].mT, self._positions(self.activations())[cancelled])
            each[cancelled] = sum_of_squares(gradient.flatten(1))
        return each

    def inner(self, deltas: list[list[Tensor | None]]) -> Float[Tensor, "b m m"]:
        """The inner products between the gradients of several cotangents."""
        return self.products(torch.stack([self.delta(of_one) for of_one in deltas], dim=1))

    def products(self, d: Float[Tensor, "bg m t o"]) -> Float[Tensor, "b m m"]:
        """The inner products between the gradients of several factors δ."""
        if self.by_pairs(d.shape[1]):
            seen = torch.matmul(self.fixed_pairs.unsqueeze(1), d)
            products = (seen.flatten(2) @ d.flatten(2).mT).double()
            squares = products.diagonal(dim1=1, dim2=2)
            odd = beyond(squares) | beyond(self.fixed_pairs.flatten(1).amax(1))[:, None]
            if bool(odd.any()):
                odd &= (squares != 0) | self.meets(d)
                self._again(products, d, odd.any(1).nonzero().flatten().tolist())
        else:
            products = inner_products(torch.matmul(d.mT, self.fixed.unsqueeze(1)).flatten(2))
        return products.unflatten(0, (self.inputs, -1)).sum(1)

    def _again(
        self, products: Float64[Tensor, "bg m m"], d: Float[Tensor, "bg m t o"], which: list[int]
    ) -> None:
        """The inner products of some inputs in 64 bits, which hold what 32 bits do not; one by one,
        for the memory.
        """
        activations = self._positions(self.activations()) if which else d
        for i in which:
            a, wide = activations[i].double(), d[i].double()
            products[i] = ((a @ a.mT) @ wide).flatten(1) @ wide.flatten(1).mT

    @cached_property
    def _live(self) -> Bool[Tensor, "bg t"]:
        """The positions at which a is not zero."""
        return self._positions(self.activations()).any(2)

    def meets(self, d: Float[Tensor, "bg m t o"]) -> Bool[Tensor, "bg m"]:
        """Whether δ and a are both not zero at some position: else the gradient is zero, and its
        square is right.
        """
        return (d.any(3) & self._live.unsqueeze(1)).any(2)

    def apart(self, d: Float[Tensor, "bg m t o"]) -> Float[Tensor, "b m"]:
        """Σ_t ‖δ_t‖²‖a_t‖²: the squared norms of the gradients if positions did not cancel."""
        each = torch.linalg.vecdot(
            d.square().sum(3), self.fixed_pairs.diagonal(dim1=1, dim2=2).unsqueeze(1)
        )
        return each.unflatten(0, (self.inputs, -1)).sum(1)

    def still_of(self, b: int) -> Float[Tensor, "g t f"]:
        """a of one input."""
        return self._positions(self.activations()).unflatten(0, (self.inputs, -1))[b]

    def delta(self, cotangents: list[Tensor | None]) -> Float[Tensor, "bg t o"]:
        """The factor δ that a cotangent gives."""
        (d,) = cotangents
        assert d is not None
        return self._positions(self.grad_outputs(d))


def _dot(a: Float[Tensor, "n i j"], b: Float[Tensor, "n i j"]) -> Float[Tensor, " n"]:
    """Σ_ij a_ij b_ij of each matrix."""
    return torch.linalg.vecdot(a.flatten(1), b.flatten(1))


@dataclass(frozen=True)
class GradFactor:
    """One meeting's share of a gradient.

    `target` is a parameter, or a tensor computed from parameters alone, as it is when the model
    runs on one row; `edges` are the places in the graph whose cotangents the gradient is made from.
    """

    target: Tensor
    edges: tuple[GradientEdge, ...]
    gradient: Outer | Summed

    def bare(self) -> "GradFactor":
        """What can be kept when the forward pass is let go: the target, and how large the gradient
        is.
        """
        return GradFactor(self.target, (), self.gradient.bare())
