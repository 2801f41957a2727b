"""How a parameter's gradient follows from the cotangents at the operation that uses it.

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
from qualms.gradients.tracing.outer_product import Outer, raise_released
from qualms.gradients.tracing.param_use import Weights, slice_of
from qualms.gradients.tracing.sample_axis import Layout


@dataclass(frozen=True)
class Summed:
    """A gradient that is always written out in full, such as the gradient of a bias or a scale.

    In shapes, b is the number of samples. `target` is the parameter, as in `GradFactor`.

    Args:
        compute: maps the cotangents at the factor's edges to the gradients [b, *target.shape].
        numel: number of entries of one sample's gradient.
        multiplications: number of multiplications for one sample's gradient; counted as `numel` if
            smaller.
    """

    compute: Callable[[list[Tensor | None]], Tensor]
    numel: int
    multiplications: int = 0

    @property
    def work(self) -> int:
        """Multiplications for one sample's gradient, also an estimate for the forward pass.

        At least one for each entry.
        """
        return max(self.numel, self.multiplications)

    def without_graph(self) -> "Summed":
        """Copy the sizes alone, so that the tensors that `compute` refers to can be freed.

        Calling `compute` of the copy raises AssertionError.
        """
        return Summed(raise_released, self.numel, self.multiplications)

    @classmethod
    def from_cotangent(
        cls,
        compute: Callable[[Tensor], Tensor],
        numel: int,
        multiplications: int = 0,
    ) -> "Summed":
        """Build a gradient that depends on the cotangent of a single edge.

        Args:
            compute: maps that cotangent to the gradients [b, *target.shape] of b samples.
            numel: number of entries of one sample's gradient.
            multiplications: number of multiplications for one sample's gradient.
        """

        def compute_from_list(cotangents: list[Tensor | None]) -> Tensor:
            """Call `compute` with the single entry of a list of cotangents."""
            (cotangent,) = cotangents
            # The caller leaves out factors of which every cotangent is None.
            assert cotangent is not None
            return compute(cotangent)

        return cls(compute_from_list, numel, multiplications)

    @classmethod
    def for_trailing_axes(
        cls,
        num_samples: int,
        layout: Layout,
        target: Tensor,
        get_scale: Callable[[], Tensor] | None = None,
    ) -> "Summed":
        """Build the gradient Σ_t δ_t s_t of a parameter that has the shape of the last axes of δ.

        δ [..., *target.shape] is the cotangent of the operation's result, s a scale, and t runs
        over the leading axes. For the scale or bias of a layer normalization, or the bias of a
        linear layer.

        Args:
            num_samples: number of samples, b.
            layout: which axis of δ is the batch axis.
            target: the parameter.
            get_scale: returns s, in the shape of δ; None if s is 1.
        """

        def sum_leading_axes(delta: Tensor) -> Tensor:
            """Sum δ s over each sample's rows and positions: [b, *target.shape]."""
            scaled = layout.rows_first(_apply_scale(delta, get_scale))
            return scaled.reshape(num_samples, -1, *target.shape).sum(1)

        return cls.from_cotangent(sum_leading_axes, target.numel())

    @classmethod
    def for_channels(
        cls,
        num_samples: int,
        layout: Layout,
        target: Tensor,
        get_scale: Callable[[], Tensor] | None = None,
        *,
        space: int,
    ) -> "Summed":
        """Build the gradient Σ_t δ_t s_t of a parameter with one entry per channel.

        δ [n, channel, *space] is the cotangent of the operation's result, s a scale, and t runs
        over a sample's rows and over space. For the scale of a batch normalization, or the bias of
        a convolution.

        Args:
            num_samples: number of samples, b.
            layout: which axis of δ is the batch axis.
            target: the parameter.
            get_scale: returns s, in the shape of δ; None if s is 1.
            space: number of spatial axes.
        """

        def sum_rows_and_space(delta: Tensor) -> Tensor:
            """Sum δ s over space, then over each sample's rows: [b, *target.shape]."""
            scaled = _apply_scale(delta, get_scale)
            if space:
                scaled = scaled.sum(tuple(range(-space, 0)))
            channels = scaled.shape[-1]
            by_sample = layout.rows_first(scaled).reshape(num_samples, -1, channels)
            return by_sample.sum(1).reshape(-1, *target.shape)

        return cls.from_cotangent(sum_rows_and_space, target.numel())

    @classmethod
    def for_repeated(cls, layout: Layout, num_samples: int, shape: torch.Size) -> "Summed":
        """Build the gradient of a parameter that the model itself repeats for each row.

        An example is a class token, expanded to [rows, 1, features]. The cotangent of the expanded
        tensor has a part for each row; these parts are summed over a sample's rows.

        Args:
            layout: which axis of the expanded tensor is the batch axis.
            num_samples: number of samples, b.
            shape: shape of one row's part of the expanded tensor.
        """

        def sum_row_parts(cotangent: Tensor) -> Tensor:
            """Sum the cotangent of the expanded tensor over each sample's rows: [b, *shape]."""
            rows_first = at_least_float32(layout.rows_first(_require_dense(cotangent)))
            if layout.axis is None:
                return rows_first.reshape(num_samples, *shape)
            # [b, rows of a sample, entries of a row, ...]
            by_row = rows_first.unflatten(0, (num_samples, -1, layout.entries_per_row))
            by_sample = by_row.sum(1)
            # A row's entries now are on axis 1: move them back to where a row's part has them.
            return by_sample.movedim(1, 1 + layout.axis).reshape(num_samples, *shape)

        return cls.from_cotangent(sum_row_parts, shape.numel())

    @classmethod
    def for_broadcast(cls, layout: Layout, num_samples: int, shape: torch.Size) -> "Summed":
        """Build the gradient of a parameter that the rule `broadcast` repeated for each row.

        It is the cotangent of the expanded copy, summed over the rows of each sample.

        Args:
            layout: which axis of the copy is the batch axis.
            num_samples: number of samples, b.
            shape: shape of the parameter.
        """

        def sum_rows(cotangent: Tensor) -> Tensor:
            """Sum the copy's cotangent over each sample's rows, which are adjacent: [b, *shape]."""
            rows_first = at_least_float32(layout.rows_first(cotangent))
            by_sample = rows_first.unflatten(0, (num_samples, -1)).sum(1)
            # Where the copy has the batch axis, the parameter may have an axis of size 1.
            return by_sample.reshape(num_samples, *shape)

        return cls.from_cotangent(sum_rows, shape.numel())

    @classmethod
    def for_row_copies(cls, num_samples: int, shape: torch.Size) -> "Summed":
        """Build the gradient for an operation that is run row by row.

        Each row has its own copy of the parameter, so there is one cotangent per row (None if the
        row's result is unused). The cotangents of a sample's rows are summed.

        Args:
            num_samples: number of samples, b.
            shape: shape of the parameter.
        """

        def sum_rows(cotangents: list[Tensor | None]) -> Tensor:
            """Stack the rows' cotangents, zeros for None, and sum them by sample: [b, *shape]."""
            first_used = next(d for d in cotangents if d is not None)
            zero = torch.zeros_like(_require_dense(first_used))
            by_row = torch.stack([zero if d is None else d for d in cotangents])
            by_sample = at_least_float32(by_row).unflatten(0, (num_samples, -1))
            return by_sample.sum(1).reshape(num_samples, *shape)

        return cls(sum_rows, shape.numel())


def _require_dense(cotangent: Tensor) -> Tensor:
    """Return a cotangent, or raise NotBatchable if it is sparse, as `EmbeddingBag` may make it."""
    if cotangent.layout != torch.strided:
        raise NotBatchable("the gradient of a parameter is a sparse tensor")
    return cotangent


def _apply_scale(delta: Tensor, get_scale: Callable[[], Tensor] | None) -> Tensor:
    """Return δ times get_scale(), or δ itself if there is no scale, in at least 32 bits."""
    delta = at_least_float32(delta)
    return delta if get_scale is None else delta * get_scale()


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
        return GradFactor(self.target, edges=(), gradient=self.gradient.without_graph())


# A parameter W may stack several matrices W[e], such as those of all experts. Each use of a W[e]
# adds a factor. These are merged into one `Outer` with a group for each matrix: the gradient of W
# is zero but for the experts that ran, and its norm does not need it written out.


def merge_slices(factors: Sequence[GradFactor], weights: Weights) -> list[GradFactor]:
    """Merge the factors of all slices W[e] of a parameter W into a single factor of W.

    An example of W is a stack of the weight matrices of all experts e. Factors of whole parameters
    are returned unchanged, before the merged ones. If a slice is used twice, only its first factor
    is merged.

    Args:
        factors: the factors of one forward pass.
        weights: the leaves that replace the parameters.
    """
    # From the name of W to the factor of each of its slices, by e.
    slices_by_name: dict[str, dict[int, GradFactor]] = {}
    merged: list[GradFactor] = []
    for factor in factors:
        name_and_index = slice_of(factor.target, weights)
        if name_and_index is None:
            merged.append(factor)
            continue
        name, e = name_and_index
        slices = slices_by_name.setdefault(name, {})
        if e in slices or not _can_merge(factor):
            merged.append(factor)
        else:
            slices[e] = factor
    for name, slices in slices_by_name.items():
        if slices:
            parameter = weights.leaves[name]
            edges = tuple(factor.edges[0] for factor in slices.values())
            merged.append(GradFactor(parameter, edges, MergedOuter.of(slices, parameter)))
    return merged


def _can_merge(factor: GradFactor) -> bool:
    """Whether `MergedOuter` can take a slice's factor: an `Outer` with one group and one edge."""
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
        """Merge the gradients of several slices W[e] of a parameter W, each as a group.

        The activations of all slices are padded to the same number of positions.

        Args:
            slices: a dict from e to the factor of W[e].
            target: the parameter W; its first axis counts the slices.
        """
        slice_indices = list(slices)
        outers: list[Outer] = []
        for factor in slices.values():
            assert isinstance(factor.gradient, Outer)
            outers.append(factor.gradient)
        max_positions = max(outer.sizes.positions for outer in outers)

        def arrange(grad: Float[Tensor, "b g o f"]) -> Tensor:
            """Write each group's gradient to its slice of W; zeros for slices without a factor."""
            # [g], not g: `Outer.arrange` takes a tensor with an axis for the groups.
            slice_grads = [outer.arrange(grad[:, [g]]) for g, outer in enumerate(outers)]
            full_grad = grad.new_zeros(len(grad), *target.shape)
            full_grad[:, slice_indices] = torch.stack(slice_grads, dim=1)
            return full_grad

        def stack_activations() -> Tensor:
            """Stack the activations of all slices as groups, [b, t, g, f]."""
            return _stack_groups([outer.activation_matrix for outer in outers], max_positions)

        first = outers[0]
        return cls(
            # Not called: `compute_delta` of this class asks each slice's gradient instead.
            grad_outputs=first.grad_outputs,
            activations=stack_activations,
            arrange=arrange,
            num_samples=first.num_samples,
            sizes=first.sizes._replace(positions=max_positions, groups=len(outers)),
            outers=outers,
        )

    def compute_delta(self, cotangents: list[Tensor | None]) -> Float[Tensor, "bg t o"]:
        """Compute the factor δ of the merged gradient, for b samples, g slices and t positions.

        Args:
            cotangents: one for each slice; None if the slice's result is unused, so that δ is 0
                there.
        """
        deltas: list[Tensor | None] = []
        for outer, cotangent in zip(self.outers, cotangents, strict=True):
            deltas.append(None if cotangent is None else outer.compute_delta([cotangent]))
        first_used = next(delta for delta in deltas if delta is not None)
        # A slice without a cotangent has no positions; `_stack_groups` fills them with zeros.
        no_positions = first_used.new_zeros(len(first_used), 0, first_used.shape[2])
        slice_deltas = [no_positions if delta is None else delta for delta in deltas]
        return self._by_position(_stack_groups(slice_deltas, self.sizes.positions))


def _stack_groups(
    factors: Sequence[Float[Tensor, "b _ f"]], positions: int
) -> Float[Tensor, "b t g f"]:
    """Stack the factors of g groups, each padded with zeros to the same number of positions.

    Args:
        factors: one for each group, [b, up to `positions`, f].
        positions: number of positions t after padding.
    """
    padded: list[Tensor] = []
    for factor in factors:
        missing_positions = positions - factor.shape[1]
        padded.append(F.pad(factor, (0, 0, 0, missing_positions)))
    return torch.stack(padded, dim=2)
