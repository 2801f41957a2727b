"""Finds the sample of each entry of an operation's result where no axis of it counts the rows.

Examples are experts that run on the tokens routed to them, texts without their padding, and inputs
sorted by length: the values decide where an entry goes. Still each entry belongs to one sample, and
cotangents show which: if the logits' cotangent is doubled for some samples, the cotangent of an
entry doubles if the entry belongs to one of these samples, and else stays the same. If neither
holds, the entry mixes samples. One backward pass for each binary digit of the samples' numbers
finds the number of each entry's sample.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.graph import GradientEdge

from qualms.gradients.batch import NotBatchable
from qualms.gradients.isolation import interrupts
from qualms.gradients.precision import at_least_float32
from qualms.gradients.tracing.factors import GradFactor, Summed
from qualms.gradients.tracing.outer_product import Outer, OuterSizes

# Stands for a sample's number at entries that the logits do not depend on.
NO_SAMPLE = -1


@dataclass(frozen=True)
class UnbatchedOp:
    """An operation in whose results the sample of each entry is not known yet.

    Args:
        results: the operation's differentiable results.
        edges: the edges of the autograd graph that belong to `results`.
        gradients: pairs of a parameter (or a tensor computed from parameters alone) and a function
            that builds its gradient once the samples of the entries are known.
    """

    results: Sequence[Tensor]
    edges: tuple[GradientEdge, ...]
    gradients: Sequence[tuple[Tensor, Callable[["SampleIds"], Outer | Summed]]]


def resolve_sample_ids(
    ops: Sequence[UnbatchedOp], logits: Float[Tensor, "rows c"], samples: int
) -> list[GradFactor]:
    """Find the sample of each entry of the operations' results, and build the gradient factors.

    Args:
        ops: operations in whose results no axis counts the rows.
        logits: logits [rows, c] of the same forward pass.
        samples: number of samples of the batch.

    Raises:
        NotBatchable: if an entry depends on several samples.
    """
    edges = list(dict.fromkeys(edge for op in ops for edge in op.edges))
    if not edges:
        return []
    numbers = _sample_numbers(logits, edges, samples)
    factors: list[GradFactor] = []
    for op in ops:
        numbered: list[NumberedResult] = []
        for result, edge in zip(op.results, op.edges, strict=True):
            if edge in numbers:
                numbered.append(NumberedResult(result, edge, numbers[edge]))
        if numbered:
            ids = SampleIds(numbered, samples)
            op_edges = tuple(result.edge for result in numbered)
            for target, build_gradient in op.gradients:
                factors.append(GradFactor(target, op_edges, build_gradient(ids)))
    return factors


def _sample_numbers(
    logits: Float[Tensor, "rows c"], edges: Sequence[GradientEdge], samples: int
) -> dict[GradientEdge, Int[Tensor, "..."]]:
    """Find the number of each entry's sample, for each edge that the logits depend on.

    Args:
        logits: logits [rows, c].
        edges: edges of the autograd graph that belong to results of operations.
        samples: number of samples of the batch.

    Returns:
        By edge, the samples' numbers in the result's shape; NO_SAMPLE at entries that the logits do
        not depend on.
    """
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(logits.shape, generator=generator, dtype=torch.double).to(logits)
    rows_per_sample = len(logits) // samples
    sample_of_row = torch.arange(samples, device=logits.device).repeat_interleave(rows_per_sample)

    def cotangents(factor: Tensor) -> dict[GradientEdge, Tensor]:
        """Pull noise on the logits, times a factor for each row, back to the edges."""
        interrupts.deliver()
        grads = torch.autograd.grad(
            logits, edges, noise * factor[:, None], retain_graph=True, allow_unused=True
        )
        return {edge: d for edge, d in zip(edges, grads, strict=True) if d is not None}

    plain = cotangents(torch.ones_like(sample_of_row))
    numbers = {edge: torch.zeros_like(d, dtype=torch.long) for edge, d in plain.items()}
    for digit in range((samples - 1).bit_length()):
        # 2 for samples whose number has this digit.
        factor = 1 + (sample_of_row >> digit & 1)
        for edge, d in cotangents(factor).items():
            numbers[edge] += _is_doubled(plain[edge], d).long() << digit
    for edge, d in plain.items():
        numbers[edge][d == 0] = NO_SAMPLE
    return numbers


def _is_doubled(d: Tensor, other: Tensor) -> Tensor:
    """Find the entries at which `other` is 2 d, not d; True there.

    Args:
        d: cotangent of an operation's result.
        other: the same cotangent after the logits' cotangent was doubled for some samples.

    Raises:
        NotBatchable: if an entry of `other` is neither d nor 2 d, so it depends on several samples.
    """
    doubled = other.abs() > 1.5 * d.abs()
    expected = torch.where(doubled, 2 * d, d)
    # Doubling is exact in floating point. What tolerance there is allows for sums in another order,
    # on devices where the order varies.
    scale = 1000 * expected.abs() + 100 * torch.linalg.vector_norm(expected)
    if bool(((other - expected).abs() > torch.finfo(d.dtype).eps * scale).any()):
        raise NotBatchable("the model mixes samples within a batch")
    return doubled


class NumberedResult(NamedTuple):
    """A result of an operation, with the number of the sample of each of its entries.

    Args:
        result: a result that the logits depend on.
        edge: the edge of the result in the autograd graph, from before any change in place.
        numbers: numbers of the entries' samples, in the result's shape.
    """

    result: Tensor
    edge: GradientEdge
    numbers: Int[Tensor, "..."]


@dataclass(frozen=True)
class SampleIds:
    """Which sample each entry of an operation's results belongs to; builds gradients from that.

    Args:
        results: the operation's results that the logits depend on.
        samples: number of samples of the batch, b.
    """

    results: Sequence[NumberedResult]
    samples: int

    def by_autograd(self, copy: Tensor) -> Summed:
        """Build the gradient of any argument by the operation's own derivative.

        For each sample, autograd pulls back the cotangents with zeros at other samples' entries.

        Args:
            copy: the leaf that replaced the argument in the operation.
        """

        def write(cotangents: list[Tensor | None]) -> Tensor:
            """Take one backward pass through the operation for each sample: [b, *copy.shape]."""
            # Edges, not results: the results may have been changed in place since.
            edges: list[GradientEdge] = []
            numbered_cotangents: list[tuple[Tensor, Tensor]] = []
            for result, d in zip(self.results, cotangents, strict=True):
                if d is not None:
                    edges.append(result.edge)
                    numbered_cotangents.append((d, result.numbers))
            of_samples: list[Tensor] = []
            for b in range(self.samples):
                masked = [d * (numbers == b) for d, numbers in numbered_cotangents]
                (g,) = torch.autograd.grad(edges, [copy], masked, retain_graph=True)
                of_samples.append(at_least_float32(g))
            return torch.stack(of_samples)

        return Summed(write, copy.numel())

    def product(self, a: Float[Tensor, "*t f"], arrange: Callable[[Tensor], Tensor]) -> Outer:
        """Build the gradient of W in a @ W; every axis of `a` but the last counts positions t.

        Args:
            a: the input of the product, [*t, f].
            arrange: reshapes the gradient from [b, 1, o, f] to [b, *target.shape].
        """
        places = self._positions()
        features = self.results[0].result.shape[-1]
        sizes = OuterSizes(places.shape[1], features, a.shape[-1], 1)

        def grad_outputs(d: Tensor) -> Tensor:
            """Gather δ by sample, as [b, t, 1, o]."""
            return _gather(d, places)

        def activations() -> Tensor:
            """Gather `a` by sample, as [b, t, 1, f]."""
            return _gather(a, places)

        return Outer(grad_outputs, activations, arrange, self.samples, sizes)

    def total(self, target: Tensor) -> Summed:
        """Build the gradient of a bias: the sum of the cotangents over each sample's positions.

        Args:
            target: the bias, added at every position.
        """
        places = self._positions()

        def write(d: Tensor) -> Tensor:
            """Sum a cotangent over each sample's positions: [b, *target.shape]."""
            of_positions = at_least_float32(_gather(d, places))
            return of_positions.sum(1).reshape(self.samples, *target.shape)

        return Summed.from_cotangent(write, target.numel())

    def _positions(self) -> Int[Tensor, "b t"]:
        """List the positions of each sample in the operation's only result [*positions, features].

        Lists shorter than the longest, t, are padded with the number of all positions, an index
        past the end at which `_gather` puts zeros.

        Raises:
            NotBatchable: if the features of a position belong to several samples.
        """
        (only,) = self.results
        numbers = only.numbers.reshape(-1, only.numbers.shape[-1])
        of_position = numbers.amax(1)
        if bool(((numbers != NO_SAMPLE) & (numbers != of_position[:, None])).any()):
            raise NotBatchable("the model mixes samples within a batch")
        samples = torch.arange(self.samples, device=numbers.device)
        belongs = of_position == samples[:, None]  # [b, positions]
        longest = max(1, int(belongs.sum(1).max()))
        # The stable sort puts each sample's positions first, in order.
        places = belongs.byte().argsort(dim=1, descending=True, stable=True)[:, :longest]
        return torch.where(belongs.gather(1, places), places, len(of_position))


def _gather(t: Float[Tensor, "*t f"], places: Int[Tensor, "b n"]) -> Float[Tensor, "b n 1 f"]:
    """Gather the features at given positions; zeros where `_positions` padded.

    Args:
        t: a tensor whose axes but the last count positions.
        places: indices of positions from `_positions`, for each sample.

    Returns:
        The features, with an axis for the single group.
    """
    flat = t.reshape(-1, t.shape[-1])
    padded = torch.cat([flat, flat.new_zeros(1, flat.shape[1])])
    return padded[places].unsqueeze(2)
