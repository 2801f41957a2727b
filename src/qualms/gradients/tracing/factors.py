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
from qualms.gradients.tracing.outer_product import Outer, OuterSizes, released
from qualms.gradients.tracing.param_use import Weights, slice_of
from qualms.gradients.tracing.sample_axis import Layout


@dataclass(frozen=True)
class Summed:
    """A gradient that is written out.

    Args:
        write: from the cotangents at the factor's edges to the gradients [b, *target.shape].
        numel: how many numbers one sample's gradient has.
        multiplications: how many of them it takes, if more than it has numbers.
    """

    write: Callable[[list[Tensor | None]], Tensor]
    numel: int
    multiplications: int = 0

    @property
    def work(self) -> int:
        """Multiplications of one sample's gradient, and of its operation's forward pass."""
        return max(self.numel, self.multiplications)

    def without_graph(self) -> "Summed":
        """The size alone, without the tensors of a forward pass that this leads to."""
        return Summed(released, self.numel, self.multiplications)

    @classmethod
    def from_cotangent(
        cls, write: Callable[[Tensor], Tensor], numel: int, multiplications: int = 0
    ) -> "Summed":
        """A gradient that is made from the cotangent of a single edge."""

        def write_single(cotangents: list[Tensor | None]) -> Tensor:
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
        """Σ_t δ_t s_t over all axes but the last ones, which the parameter has.

        Args:
            samples: b.
            layout: of the cotangent.
            target: the parameter.
            scale: gives s, in the cotangent's shape; 1 by default.
        """

        def write(d: Tensor) -> Tensor:
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
        """Σ_t δ_t s_t over rows and space, for each channel of [n, channel, *space].

        Args:
            samples: b.
            layout: of the cotangent.
            target: the parameter.
            scale: gives s, in the cotangent's shape; 1 by default.
            space: number of spatial axes.
        """

        def write(d: Tensor) -> Tensor:
            each = _scale(d, scale)
            if space:
                each = each.sum(tuple(range(-space, 0)))
            of_rows = layout.leading(each).reshape(samples, -1, each.shape[-1])
            return of_rows.sum(1).reshape(-1, *target.shape)

        return cls.from_cotangent(write, target.numel())

    @classmethod
    def row_parts(cls, layout: Layout, samples: int, shape: torch.Size) -> "Summed":
        """The cotangent of a copy that has a part for each row: add the parts of a sample's rows.

        Args:
            layout: of the copy.
            samples: b.
            shape: of one row's part.
        """

        def write(d: Tensor) -> Tensor:
            leading = at_least_float32(layout.leading(_dense(d)))
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
        """The cotangent of a copy that was expanded along the row axis: add all of a sample's.

        Args:
            layout: of the operation's result.
            samples: b.
            shape: of the parameter.
        """

        def write(d: Tensor) -> Tensor:
            leading = at_least_float32(layout.leading(d))
            of_samples = leading.unflatten(0, (samples, leading.shape[0] // samples))
            return of_samples.sum(1).reshape(samples, *shape)

        return cls.from_cotangent(write, shape.numel())

    @classmethod
    def row_copies(cls, samples: int, shape: torch.Size) -> "Summed":
        """One cotangent for the copy that each row has for itself.

        Args:
            samples: b.
            shape: of the parameter.
        """

        def write(cotangents: list[Tensor | None]) -> Tensor:
            zero = torch.zeros_like(_dense(next(d for d in cotangents if d is not None)))
            each = [zero if d is None else d for d in cotangents]
            of_samples = at_least_float32(torch.stack(each)).unflatten(0, (samples, -1))
            return of_samples.sum(1).reshape(samples, *shape)

        return cls(write, shape.numel())


def _dense(d: Tensor) -> Tensor:
    """The cotangent of a copy; an error if it is sparse, as that of `EmbeddingBag` may be."""
    if d.layout != torch.strided:
        raise NotBatchable("the gradient of a parameter is a sparse tensor")
    return d


def _scale(d: Tensor, scale: Callable[[], Tensor] | None) -> Tensor:
    d = at_least_float32(d)
    return d if scale is None else d * scale()


@dataclass(frozen=True)
class GradFactor:
    """What one use of a parameter adds to its gradient.

    Args:
        target: a parameter, or a tensor computed from parameters alone, as it is when the model
            runs on one row.
        edges: the places in the graph whose cotangents the gradient is made from.
        gradient: how it is made from them.
    """

    target: Tensor
    edges: tuple[GradientEdge, ...]
    gradient: Outer | Summed

    def without_graph(self) -> "GradFactor":
        """The target and the size of the gradient: what is kept without the forward pass."""
        return GradFactor(self.target, (), self.gradient.without_graph())


# Matrices kept in one parameter, such as those of all experts: each matrix W[e] has a factor of its
# own. Together they are one `Outer` with a group for each, so that the parameter's gradient, zero
# but for the experts that were asked, need not be written out for its norm.


def merge_slices(factors: Sequence[GradFactor], weights: Weights) -> list[GradFactor]:
    """The same factors, those of different matrices W[e] of one parameter merged into one."""
    slices: dict[str, dict[int, GradFactor]] = {}
    others: list[GradFactor] = []
    for factor in factors:
        place = slice_of(factor.target, weights)
        if place is None:
            others.append(factor)
            continue
        name, number = place
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
    gradient = factor.gradient
    return isinstance(gradient, Outer) and gradient.sizes.groups == 1 and len(factor.edges) == 1


@dataclass
class MergedOuter(Outer):
    """The gradients of slices W[e] of one parameter: a cotangent and a group for each."""

    outers: Sequence[Outer] = ()

    @classmethod
    def of(cls, slices: dict[int, GradFactor], target: Tensor) -> "MergedOuter":
        """Merge the gradients of `target[number]`, by that number."""
        numbers = list(slices)
        outers: list[Outer] = []
        for factor in slices.values():
            assert isinstance(factor.gradient, Outer)
            outers.append(factor.gradient)

        def arrange(grad: Float[Tensor, "b g o f"]) -> Tensor:
            parts = [outer.arrange(grad[:, [g]]) for g, outer in enumerate(outers)]
            whole = grad.new_zeros(len(grad), *target.shape)
            whole[:, numbers] = torch.stack(parts, dim=1)
            return whole

        def activations() -> Tensor:
            return _side_by_side([outer.activation_matrix for outer in outers], most)

        first = outers[0]
        most = max(outer.sizes.positions for outer in outers)
        _, out_features, in_features, _ = first.sizes
        sizes = OuterSizes(most, out_features, in_features, len(outers))
        return cls(first.grad_outputs, activations, arrange, first.samples, sizes, outers=outers)

    def delta(self, cotangents: list[Tensor | None]) -> Float[Tensor, "bg t o"]:
        """The factor δ that a cotangent gives; zero for a matrix that it does not reach."""
        deltas: list[Tensor | None] = []
        for outer, d in zip(self.outers, cotangents, strict=True):
            deltas.append(None if d is None else outer.delta([d]))
        some = next(delta for delta in deltas if delta is not None)
        nothing = some.new_zeros(len(some), 0, some.shape[2])
        known = [nothing if delta is None else delta for delta in deltas]
        return self._by_position(_side_by_side(known, self.sizes.positions))


def _side_by_side(
    factors: Sequence[Float[Tensor, "b _ f"]], positions: int
) -> Float[Tensor, "b t g f"]:
    """One group for each factor, with zeros at positions that it does not have."""
    groups: list[Tensor] = []
    for factor in factors:
        groups.append(F.pad(factor, (0, 0, 0, positions - factor.shape[1])))
    return torch.stack(groups, dim=2)
