"""What a parameter's gradient is made of.

For one class the cotangent δ of an operation's result gives the gradient of each sample's loss with
respect to the operation's parameter. Two forms cover all rules:

- `Outer` (`outer_product.py`): Σ_t δ_t ⊗ a_t over positions t, for the weights of linear and
  convolution layers. Its norm may be cheaper than the gradient itself.
- `Summed`: written out directly, for biases, scales and copies of a parameter, because it is no
  larger than the parameter.

Perturbed copies of a sample are further positions of the same sum, so smoothing needs no other
algebra.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.autograd.graph import GradientEdge

from qualms.gradients.batch import NotBatchable
from qualms.gradients.precision import at_least_float32
from qualms.gradients.tracing.outer_product import Outer, OuterSizes, raise_released
from qualms.gradients.tracing.param_use import Weights, slice_of
from qualms.gradients.tracing.sample_axis import Layout


@dataclass(frozen=True)
class Summed:
    """A gradient that is always written out in full, such as the gradient of a bias or a scale.

    Args:
        write: maps the cotangents at the factor's edges to the gradients [b, *target.shape].
        numel: number of entries of one sample's gradient.
        multiplications: number of multiplications for one sample's gradient; counted as `numel` if
            smaller.
    """

    write: Callable[[list[Tensor | None]], Tensor]
    numel: int
    multiplications: int = 0

    @property
    def work(self) -> int:
        """Multiplications for one sample's gradient; the operation's forward pass takes as many."""
        return max(self.numel, self.multiplications)

    def without_graph(self) -> "Summed":
        """Copy the sizes alone: `write` refers to tensors of a forward pass, which can be freed.

        Calling `write` of the copy raises AssertionError.
        """
        return Summed(raise_released, self.numel, self.multiplications)

    @classmethod
    def from_cotangent(
        cls, write: Callable[[Tensor], Tensor], numel: int, multiplications: int = 0
    ) -> "Summed":
        """Build a gradient that depends on the cotangent of a single edge.

        Args:
            write: maps that cotangent to the gradients [b, *target.shape].
            numel: number of entries of one sample's gradient.
            multiplications: number of multiplications for one sample's gradient.
        """

        def write_single(cotangents: list[Tensor | None]) -> Tensor:
            """Unpack the single cotangent, as `Summed.write` takes a list."""
            (d,) = cotangents
            assert d is not None
            return write(d)

        return cls(write_single, numel, multiplications)

    @classmethod
    def trailing(
        cls,
        samples: int,
        layout: Layout,
        target: Tensor,
        scale: Callable[[], Tensor] | None = None,
    ) -> "Summed":
        """Build Σ_t δ_t s_t for a parameter in the shape of the last axes: others are summed over.

        For the scale or bias of a layer normalization, or the bias of a linear layer.

        Args:
            samples: number of samples, b.
            layout: which axis of the cotangent δ [..., *target.shape] counts the rows.
            target: the parameter.
            scale: returns s, in the cotangent's shape; 1 by default.
        """

        def write(d: Tensor) -> Tensor:
            """Sum over each sample's rows and positions."""
            leading = layout.leading(_scale(d, scale))
            return leading.reshape(samples, -1, *target.shape).sum(1)

        return cls.from_cotangent(write, target.numel())

    @classmethod
    def channels(
        cls,
        samples: int,
        layout: Layout,
        target: Tensor,
        scale: Callable[[], Tensor] | None = None,
        *,
        space: int,
    ) -> "Summed":
        """Build Σ_t δ_t s_t for a parameter with one entry per channel: rows and space are summed.

        For the scale of a batch normalization, or the bias of a convolution.

        Args:
            samples: number of samples, b.
            layout: which axis of the cotangent δ [n, channel, *space] counts the rows.
            target: the parameter.
            scale: returns s, in the cotangent's shape; 1 by default.
            space: number of spatial axes.
        """

        def write(d: Tensor) -> Tensor:
            """Sum over space, then over each sample's rows."""
            scaled = _scale(d, scale)
            if space:
                scaled = scaled.sum(tuple(range(-space, 0)))
            of_rows = layout.leading(scaled).reshape(samples, -1, scaled.shape[-1])
            return of_rows.sum(1).reshape(-1, *target.shape)

        return cls.from_cotangent(write, target.numel())

    @classmethod
    def row_parts(cls, layout: Layout, samples: int, shape: torch.Size) -> "Summed":
        """Build the gradient of a parameter that the model repeats to [rows, ...] before use.

        An example is a class token. Each row has its part of the copy; the cotangents of the parts
        are summed over a sample's rows.

        Args:
            layout: which axis of the copy counts the rows.
            samples: number of samples, b.
            shape: shape of one row's part, which is the parameter's.
        """

        def write(d: Tensor) -> Tensor:
            """Sum a cotangent, in the copy's shape, over each sample's rows: [b, *shape]."""
            leading = at_least_float32(layout.leading(_require_dense(d)))
            if layout.axis is None:
                return leading.reshape(samples, *shape)
            # The parts of one row follow each other on the axis: put the axis back, then add the
            # rows of a sample.
            rows_per_sample = layout.rows // samples
            parts = leading.unflatten(0, (samples, rows_per_sample, layout.per_row)).sum(1)
            return parts.movedim(1, 1 + layout.axis).reshape(samples, *shape)

        return cls.from_cotangent(write, shape.numel())

    @classmethod
    def broadcast(cls, layout: Layout, samples: int, shape: torch.Size) -> "Summed":
        """Build the gradient of a parameter that was expanded along the row axis.

        The rule `broadcast` expands it. Its gradient is the copy's cotangent, summed over the rows
        of each sample.

        Args:
            layout: which axis of the operation's result counts the rows.
            samples: number of samples, b.
            shape: shape of the parameter.
        """

        def write(d: Tensor) -> Tensor:
            """Sum a cotangent over each sample's rows, which are adjacent: [b, *shape]."""
            leading = at_least_float32(layout.leading(d))
            of_samples = leading.unflatten(0, (samples, leading.shape[0] // samples))
            return of_samples.sum(1).reshape(samples, *shape)

        return cls.from_cotangent(write, shape.numel())

    @classmethod
    def from_row_copies(cls, samples: int, shape: torch.Size) -> "Summed":
        """Build the gradient for an operation that is run row by row.

        Each row has its own copy of the parameter, so there is one cotangent per row (None if the
        row's result is unused). The cotangents of a sample's rows are summed.

        Args:
            samples: number of samples, b.
            shape: shape of the parameter.
        """

        def write(cotangents: list[Tensor | None]) -> Tensor:
            """Stack the rows' cotangents, zeros for None, and sum them by sample: [b, *shape]."""
            first_used = next(d for d in cotangents if d is not None)
            zero = torch.zeros_like(_require_dense(first_used))
            of_rows = [zero if d is None else d for d in cotangents]
            of_samples = at_least_float32(torch.stack(of_rows)).unflatten(0, (samples, -1))
            return of_samples.sum(1).reshape(samples, *shape)

        return cls(write, shape.numel())


def _require_dense(d: Tensor) -> Tensor:
    """Return a cotangent, or raise NotBatchable if it is sparse, as `EmbeddingBag` may make it."""
    if d.layout != torch.strided:
        raise NotBatchable("the gradient of a parameter is a sparse tensor")
    return d


def _scale(d: Tensor, scale: Callable[[], Tensor] | None) -> Tensor:
    """Multiply a cotangent δ by s = scale(), or by 1 for None, in at least 32 bits."""
    d = at_least_float32(d)
    return d if scale is None else d * scale()


@dataclass(frozen=True)
class GradFactor:
    """The contribution of one use of a parameter to the parameter's gradient.

    Args:
        target: the parameter, or a tensor computed from parameters alone, with the value that it
            has when the model runs on one row.
        edges: the edges of the autograd graph whose cotangents determine the contribution.
        gradient: computes the contribution from the cotangents at `edges`.
    """

    target: Tensor
    edges: tuple[GradientEdge, ...]
    gradient: Outer | Summed

    def without_graph(self) -> "GradFactor":
        """Copy the target and the gradient's sizes alone, so that the forward pass can be freed."""
        return GradFactor(self.target, (), self.gradient.without_graph())


# A parameter W may stack several matrices W[e], such as those of all experts. Each use of a W[e]
# adds a factor. These are merged into one `Outer` with a group for each matrix: the gradient of W
# is zero but for the experts that ran, and its norm does not need it written out.


def merge_slices(factors: Sequence[GradFactor], weights: Weights) -> list[GradFactor]:
    """Merge the factors of different matrices W[e] of one parameter W into one factor of W.

    Other factors are kept as they are, and come first. If a matrix is used twice, only its first
    factor is merged.

    Args:
        factors: the factors of one forward pass.
        weights: the leaves that replace the parameters.
    """
    slices: dict[str, dict[int, GradFactor]] = {}
    others: list[GradFactor] = []
    for factor in factors:
        name_and_index = slice_of(factor.target, weights)
        if name_and_index is None:
            others.append(factor)
            continue
        name, number = name_and_index  # of W, and e
        of_parameter = slices.setdefault(name, {})
        if number in of_parameter or not _can_merge(factor):
            others.append(factor)
        else:
            of_parameter[number] = factor
    for name, of_parameter in slices.items():
        if of_parameter:
            target = weights.leaves[name]
            edges = tuple(factor.edges[0] for factor in of_parameter.values())
            others.append(GradFactor(target, edges, MergedOuter.of(of_parameter, target)))
    return others


def _can_merge(factor: GradFactor) -> bool:
    """Whether a factor is a plain sum of outer products, with one group and one cotangent."""
    gradient = factor.gradient
    return isinstance(gradient, Outer) and gradient.sizes.groups == 1 and len(factor.edges) == 1


@dataclass
class MergedOuter(Outer):
    """The gradient of a parameter W through its slices W[e]: a group and a cotangent for each.

    Args:
        outers: the gradient of each slice, in the order of the cotangents.
    """

    outers: Sequence[Outer] = ()

    @classmethod
    def of(cls, slices: dict[int, GradFactor], target: Tensor) -> "MergedOuter":
        """Merge the gradients of several slices; pads each to the same number of positions.

        Args:
            slices: from e to the factor of W[e].
            target: the parameter W [e, ...].
        """
        numbers = list(slices)
        outers: list[Outer] = []
        for factor in slices.values():
            assert isinstance(factor.gradient, Outer)
            outers.append(factor.gradient)
        max_positions = max(outer.sizes.positions for outer in outers)

        def arrange(grad: Float[Tensor, "b g o f"]) -> Tensor:
            """Write each group's gradient to its slice of W; zeros for slices without a factor."""
            parts = [outer.arrange(grad[:, [g]]) for g, outer in enumerate(outers)]
            whole = grad.new_zeros(len(grad), *target.shape)
            whole[:, numbers] = torch.stack(parts, dim=1)
            return whole

        def activations() -> Tensor:
            """Stack the slices' factors a as groups."""
            return _stack_groups([outer.activation_matrix for outer in outers], max_positions)

        first = outers[0]
        _, out_features, in_features, _ = first.sizes
        sizes = OuterSizes(max_positions, out_features, in_features, groups=len(outers))
        return cls(first.grad_outputs, activations, arrange, first.samples, sizes, outers=outers)

    def delta(self, cotangents: list[Tensor | None]) -> Float[Tensor, "bg t o"]:
        """Compute the factor δ of the merged gradient, with bg = b·(number of slices).

        Args:
            cotangents: one for each slice; None if the slice's result is unused, so that δ is 0
                there.
        """
        deltas: list[Tensor | None] = []
        for outer, d in zip(self.outers, cotangents, strict=True):
            deltas.append(None if d is None else outer.delta([d]))
        first_used = next(delta for delta in deltas if delta is not None)
        no_positions = first_used.new_zeros(len(first_used), 0, first_used.shape[2])
        of_slices = [no_positions if delta is None else delta for delta in deltas]
        return self._by_position(_stack_groups(of_slices, self.sizes.positions))


def _stack_groups(
    factors: Sequence[Float[Tensor, "b _ f"]], positions: int
) -> Float[Tensor, "b t g f"]:
    """Stack factors as groups, each padded with zeros to the same number of positions.

    Args:
        factors: one for each group, [b, up to `positions`, f].
        positions: number of positions t after padding.
    """
    groups: list[Tensor] = []
    for factor in factors:
        groups.append(F.pad(factor, (0, 0, 0, positions - factor.shape[1])))
    return torch.stack(groups, dim=2)
