"""Which sample an entry of an operation's result belongs to, where no axis of it counts the rows.

Experts that take the words meant for them, texts without their padding, inputs sorted by length:
the values decide what goes where. Still each entry belongs to one sample, and the cotangents tell
which. If the logits' cotangent is doubled for some samples, that of an entry doubles if it is
theirs, and else stays; an entry for which neither holds mixes samples. One pass for each binary
digit of a sample's number tells the number.
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

NO_SAMPLE = -1  # the number of entries that the logits do not depend on


@dataclass(frozen=True)
class UnbatchedOp:
    """An operation whose results' entries belong to samples that are not known yet.

    Args:
        results: those that can be differentiated.
        edges: of the results, in the graph.
        gradients: for each target, what makes its gradient once the samples are known.
    """

    results: Sequence[Tensor]
    edges: tuple[GradientEdge, ...]
    gradients: Sequence[tuple[Tensor, Callable[["SampleIds"], Outer | Summed]]]


def resolve_sample_ids(
    ops: Sequence[UnbatchedOp], logits: Float[Tensor, "rows c"], samples: int
) -> list[GradFactor]:
    """Find the sample of each entry of the operations' results, and the gradient factors with it.

    Args:
        ops: operations in whose results no axis counts the rows.
        logits: of the same forward pass.
        samples: number of samples in it.
    """
    edges = list(dict.fromkeys(edge for op in ops for edge in op.edges))
    if not edges:
        return []
    numbers = _sample_numbers(logits, edges, samples)
    factors: list[GradFactor] = []
    for op in ops:
        found: list[NumberedResult] = []
        for result, edge in zip(op.results, op.edges, strict=True):
            if edge in numbers:
                found.append(NumberedResult(result, edge, numbers[edge]))
        if found:
            ids = SampleIds(found, samples)
            own_edges = tuple(entry.edge for entry in found)
            for target, gradient in op.gradients:
                factors.append(GradFactor(target, own_edges, gradient(ids)))
    return factors


def _sample_numbers(
    logits: Float[Tensor, "rows c"], edges: Sequence[GradientEdge], samples: int
) -> dict[GradientEdge, Int[Tensor, "..."]]:
    """The number of the sample of each entry at these edges, but for those that the logits do not
    depend on.
    """
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(logits.shape, generator=generator, dtype=torch.double).to(logits)
    rows_per_sample = len(logits) // samples
    of_row = torch.arange(samples, device=logits.device).repeat_interleave(rows_per_sample)

    def cotangents(factor: Tensor) -> dict[GradientEdge, Tensor]:
        interrupts.deliver()
        found = torch.autograd.grad(
            logits, edges, noise * factor[:, None], retain_graph=True, allow_unused=True
        )
        return {edge: d for edge, d in zip(edges, found, strict=True) if d is not None}

    plain = cotangents(torch.ones_like(of_row))
    numbers = {edge: torch.zeros_like(d, dtype=torch.long) for edge, d in plain.items()}
    for digit in range((samples - 1).bit_length()):
        for edge, d in cotangents(1 + (of_row >> digit & 1)).items():
            numbers[edge] += _is_doubled(plain[edge], d).long() << digit
    for edge, d in plain.items():
        numbers[edge][d == 0] = NO_SAMPLE
    return numbers


def _is_doubled(d: Tensor, other: Tensor) -> Tensor:
    """Which entries of a cotangent were doubled; all others must be unchanged."""
    doubled = other.abs() > 1.5 * d.abs()
    expected = torch.where(doubled, 2 * d, d)
    # Doubling is exact in floating point, so what is left is the order of sums, on devices where
    # that varies.
    scale = 1000 * expected.abs() + 100 * torch.linalg.vector_norm(expected)
    if bool(((other - expected).abs() > torch.finfo(d.dtype).eps * scale).any()):
        raise NotBatchable("the model mixes samples within a batch")
    return doubled


class NumberedResult(NamedTuple):
    """A result of an operation, and the sample of each of its entries.

    Args:
        result: one that the logits depend on.
        edge: of the result, as the operation returned it.
        numbers: of the samples, in the result's shape.
    """

    result: Tensor
    edge: GradientEdge
    numbers: Int[Tensor, "..."]


@dataclass(frozen=True)
class SampleIds:
    """Which sample each entry of an operation's results belongs to.

    Args:
        found: the results that the logits depend on.
        samples: how many there are.
    """

    found: Sequence[NumberedResult]
    samples: int

    def by_autograd(self, copy: Tensor) -> Summed:
        """The gradient of any argument, a leaf: the operation's own, at each sample's entries."""

        def write(cotangents: list[Tensor | None]) -> Tensor:
            # From the edges: the results themselves may have been changed in place since.
            edges: list[GradientEdge] = []
            known: list[tuple[Tensor, Tensor]] = []
            for entry, d in zip(self.found, cotangents, strict=True):
                if d is not None:
                    edges.append(entry.edge)
                    known.append((d, entry.numbers))
            of_samples: list[Tensor] = []
            for b in range(self.samples):
                masked = [d * (numbers == b) for d, numbers in known]
                (g,) = torch.autograd.grad(edges, [copy], masked, retain_graph=True)
                of_samples.append(at_least_float32(g))
            return torch.stack(of_samples)

        return Summed(write, copy.numel())

    def product(self, a: Float[Tensor, "*t f"], arrange: Callable[[Tensor], Tensor]) -> Outer:
        """The gradient of the matrix that `a` was multiplied by; all axes but the last count t.

        Args:
            a: the input of the product.
            arrange: from [b, 1, o, f] to [b, *target.shape].
        """
        places = self._positions()
        features = self.found[0].result.shape[-1]
        sizes = OuterSizes(places.shape[1], features, a.shape[-1], 1)

        def grad_outputs(d: Tensor) -> Tensor:
            return _gather(d, places)

        def activations() -> Tensor:
            return _gather(a, places)

        return Outer(grad_outputs, activations, arrange, self.samples, sizes)

    def total(self, target: Tensor) -> Summed:
        """The gradient of what was added at every position: the sum of the cotangents there."""
        places = self._positions()

        def write(d: Tensor) -> Tensor:
            each = at_least_float32(_gather(d, places))
            return each.sum(1).reshape(self.samples, *target.shape)

        return Summed.from_cotangent(write, target.numel())

    def _positions(self) -> Int[Tensor, "b t"]:
        """The positions of each sample, padded with a number beyond all of them."""
        (only,) = self.found
        numbers = only.numbers.reshape(-1, only.numbers.shape[-1])
        of_position = numbers.amax(1)
        if bool(((numbers != NO_SAMPLE) & (numbers != of_position[:, None])).any()):
            raise NotBatchable("the model mixes samples within a batch")
        samples = torch.arange(self.samples, device=numbers.device)
        own = of_position == samples[:, None]  # [b, positions]
        most = max(1, int(own.sum(1).max()))
        first = own.byte().argsort(dim=1, descending=True, stable=True)[:, :most]
        return torch.where(own.gather(1, first), first, len(of_position))


def _gather(t: Float[Tensor, "*t f"], places: Int[Tensor, "b n"]) -> Float[Tensor, "b n 1 f"]:
    """The entries at some positions; zero beyond the last one."""
    flat = t.reshape(-1, t.shape[-1])
    padded = torch.cat([flat, flat.new_zeros(1, flat.shape[1])])
    return padded[places].unsqueeze(2)
