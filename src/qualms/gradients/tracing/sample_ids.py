"""Finds the sample of each entry of an operation's result that has no batch axis.

Examples are experts that run on the tokens routed to them, texts without their padding, and inputs
sorted by length: the values decide where an entry goes. Still each entry belongs to one sample, and
cotangents show which: if the logits' cotangent is doubled for some samples, the cotangent of an
entry doubles if the entry belongs to one of these samples, and else stays the same. If neither
holds, the entry mixes samples. One backward pass for each binary digit of the samples' ids finds
the id of each entry's sample. The id of a sample is its index in the batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.graph import GradientEdge

from qualms.gradients.batch import SAMPLES_MIXED, NotBatchable
from qualms.gradients.isolation import interrupts
from qualms.gradients.precision import at_least_float32
from qualms.gradients.tracing.factors import GradFactor, Summed
from qualms.gradients.tracing.outer_product import Outer, OuterSizes

# The id at entries that the logits do not depend on, so that no sample is known.
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
    ops: Sequence[UnbatchedOp], logits: Float[Tensor, "rows c"], num_samples: int
) -> list[GradFactor]:
    """Find the sample of each entry of the operations' results, and build the gradient factors.

    Args:
        ops: operations whose results have no batch axis.
        logits: logits [rows, c] of the same forward pass.
        num_samples: number of samples of the batch.

    Returns:
        A factor for each parameter of each operation whose result the logits depend on.

    Raises:
        NotBatchable: if an entry depends on several samples.
    """
    # A dict, not a set: each edge once, in a fixed order.
    edges = list(dict.fromkeys(edge for op in ops for edge in op.edges))
    if not edges:
        return []
    ids_by_edge = _find_sample_ids(logits, edges, num_samples)
    factors: list[GradFactor] = []
    for op in ops:
        # The results that the logits depend on: only these have a cotangent.
        results: list[ResultWithIds] = []
        for result, edge in zip(op.results, op.edges, strict=True):
            if edge in ids_by_edge:
                results.append(ResultWithIds(result, edge, ids_by_edge[edge]))
        if results:
            sample_ids = SampleIds(results, num_samples)
            op_edges = tuple(result.edge for result in results)
            for target, build_gradient in op.gradients:
                factors.append(GradFactor(target, op_edges, build_gradient(sample_ids)))
    return factors


def _find_sample_ids(
    logits: Float[Tensor, "rows c"], edges: Sequence[GradientEdge], num_samples: int
) -> dict[GradientEdge, Int[Tensor, "..."]]:
    """Find the sample that each entry of some tensors belongs to, by backward passes from logits.

    Doubling the logits' cotangent for some samples doubles the cotangents of these samples' entries
    alone. In pass k these are the samples whose id has the binary digit 2^k.

    Args:
        logits: logits of `rows` rows and c classes, with their graph.
        edges: the edges of the autograd graph that belong to the tensors.
        num_samples: number of samples of the batch.

    Returns:
        For each edge that the logits depend on, the ids of the entries' samples in the tensor's
        shape; NO_SAMPLE at entries that the logits do not depend on.

    Raises:
        NotBatchable: if an entry depends on several samples.
    """
    # Random, so that no entry has a cotangent of 0 by chance. The same in every run and, as it is
    # drawn on the CPU in double precision, for every device and dtype.
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(logits.shape, generator=generator, dtype=torch.double).to(logits)
    rows_per_sample = len(logits) // num_samples
    all_ids = torch.arange(num_samples, device=logits.device)
    id_of_row = all_ids.repeat_interleave(rows_per_sample)

    def pull_back(row_scale: Tensor) -> dict[GradientEdge, Tensor]:
        """Compute the edges' cotangents, for noise times a scale per row at the logits."""
        # Raise a Ctrl-C that arrived since the last pass.
        interrupts.deliver()
        start = noise * row_scale.unsqueeze(1)
        cotangents = torch.autograd.grad(logits, edges, start, retain_graph=True, allow_unused=True)
        by_edge = zip(edges, cotangents, strict=True)
        return {edge: d for edge, d in by_edge if d is not None}

    unscaled = pull_back(torch.ones_like(id_of_row))
    ids_by_edge: dict[GradientEdge, Tensor] = {}
    for edge, cotangent in unscaled.items():
        ids_by_edge[edge] = torch.zeros_like(cotangent, dtype=torch.long)
    for digit in range((num_samples - 1).bit_length()):
        has_digit = (id_of_row >> digit) & 1
        # A scale of 2 for the samples whose id has this digit, of 1 for the others.
        for edge, scaled in pull_back(1 + has_digit).items():
            ids_by_edge[edge] += _is_doubled(unscaled[edge], scaled).long() << digit
    for edge, cotangent in unscaled.items():
        ids_by_edge[edge][cotangent == 0] = NO_SAMPLE
    return ids_by_edge


def _is_doubled(unscaled: Tensor, scaled: Tensor) -> Tensor:
    """Find the entries of a cotangent that doubled when the logits' cotangent was scaled.

    Args:
        unscaled: cotangent of an operation's result.
        scaled: the same cotangent after the logits' cotangent was doubled for some samples.

    Returns:
        A tensor of booleans in the same shape; True where an entry doubled.

    Raises:
        NotBatchable: if an entry neither doubled nor stayed the same, so it depends on several
            samples.
    """
    doubled = scaled.abs() > 1.5 * unscaled.abs()
    expected = torch.where(doubled, 2 * unscaled, unscaled)
    # Doubling is exact in floating point, but some devices vary the order of sums: allow for the
    # error of 1000 roundings of the entry, and of 100 of the whole tensor.
    magnitude = 1000 * expected.abs() + 100 * torch.linalg.vector_norm(expected)
    tolerance = torch.finfo(unscaled.dtype).eps * magnitude
    if bool(((scaled - expected).abs() > tolerance).any()):
        raise NotBatchable(SAMPLES_MIXED)
    return doubled


class ResultWithIds(NamedTuple):
    """A result of an operation, with the id of the sample that each of its entries belongs to.

    Args:
        result: a result that the logits depend on.
        edge: the edge of the result in the autograd graph, from before any change in place.
        ids: ids of the entries' samples, in the result's shape.
    """

    result: Tensor
    edge: GradientEdge
    ids: Int[Tensor, "..."]


@dataclass(frozen=True)
class SampleIds:
    """Which sample each entry of an operation's results belongs to; builds gradients from that.

    Args:
        results: the operation's results that the logits depend on.
        num_samples: number of samples of the batch.
    """

    results: Sequence[ResultWithIds]
    num_samples: int

    def for_argument(self, copy: Tensor) -> Summed:
        """Build the gradient of any argument, with one backward pass per sample.

        In a sample's pass through the operation, the cotangents of other samples' entries are zero.

        Args:
            copy: the leaf that replaced the argument in the operation.
        """

        def pull_back_by_sample(cotangents: list[Tensor | None]) -> Tensor:
            """Compute the gradient of each sample: [b, *copy.shape].

            b is the number of samples, and `cotangents` has an entry for each result.
            """
            # Edges, not results: the results may have been changed in place since.
            edges: list[GradientEdge] = []
            cotangents_and_ids: list[tuple[Tensor, Tensor]] = []
            for result, cotangent in zip(self.results, cotangents, strict=True):
                if cotangent is not None:
                    edges.append(result.edge)
                    cotangents_and_ids.append((cotangent, result.ids))
            grads: list[Tensor] = []
            for sample in range(self.num_samples):
                masked = [cotangent * (ids == sample) for cotangent, ids in cotangents_and_ids]
                (grad,) = torch.autograd.grad(edges, [copy], masked, retain_graph=True)
                grads.append(at_least_float32(grad))
            return torch.stack(grads)

        return Summed(pull_back_by_sample, copy.numel())

    def for_product(
        self, activations: Float[Tensor, "*t f"], arrange: Callable[[Tensor], Tensor]
    ) -> Outer:
        """Build the gradient of W in the product activations @ W.

        Every axis of `activations` but the last counts positions t.

        Args:
            activations: the input of the product, with f features.
            arrange: reshapes the gradient from [b, 1, o, f] to [b, *W.shape], for b samples and o
                features of the product.

        Returns:
            The gradient of each sample, an outer product over that sample's positions.
        """
        indices = self._positions_by_sample()
        product = self.results[0].result  # [*t, o]
        sizes = OuterSizes(
            positions=indices.shape[1],
            out_features=product.shape[-1],
            in_features=activations.shape[-1],
            groups=1,
        )
        return Outer(
            # Called with the cotangent; the activations are known, but gathered only when needed.
            grad_outputs=partial(_gather, indices=indices),
            activations=partial(_gather, activations, indices),
            arrange=arrange,
            num_samples=self.num_samples,
            sizes=sizes,
        )

    def for_bias(self, target: Tensor) -> Summed:
        """Build the gradient of a bias: the sum of the cotangents over each sample's positions.

        Args:
            target: the bias, added at every position.
        """
        indices = self._positions_by_sample()

        def sum_positions(cotangent: Tensor) -> Tensor:
            """Sum a cotangent over the positions of each of the b samples: [b, *target.shape]."""
            by_sample = at_least_float32(_gather(cotangent, indices))
            return by_sample.sum(1).reshape(self.num_samples, *target.shape)

        return Summed.from_cotangent(sum_positions, target.numel())

    def _positions_by_sample(self) -> Int[Tensor, "b t"]:
        """List the positions of each sample in the operation's only result [*positions, features].

        Returns:
            Indices of positions in the flattened result, for each of b samples. t is the largest
            number of positions of a sample; shorter lists are padded with the number of all
            positions, an index past the end at which `_gather` returns zeros.

        Raises:
            NotBatchable: if the features of a position belong to several samples.
        """
        (only_result,) = self.results
        ids = only_result.ids.reshape(-1, only_result.ids.shape[-1])  # [positions, features]
        # NO_SAMPLE is smaller than any id.
        id_of_position = ids.amax(1)
        if bool(((ids != NO_SAMPLE) & (ids != id_of_position.unsqueeze(1))).any()):
            raise NotBatchable(SAMPLES_MIXED)
        all_ids = torch.arange(self.num_samples, device=ids.device)
        belongs = id_of_position == all_ids.unsqueeze(1)  # [b, positions]
        longest = max(1, int(belongs.sum(1).max()))
        # The stable sort puts each sample's positions first, in order.
        indices = belongs.byte().argsort(
            dim=1,
            descending=True,
            stable=True,
        )[:, :longest]
        return torch.where(belongs.gather(1, indices), indices, len(id_of_position))


def _gather(t: Float[Tensor, "*t f"], indices: Int[Tensor, "b n"]) -> Float[Tensor, "b n 1 f"]:
    """Gather the features at given positions, with zeros at the index past the last position.

    Args:
        t: a tensor whose last axis counts f features, and whose other axes count positions.
        indices: n indices of positions for each of b samples, from `_positions_by_sample`.

    Returns:
        The features, with an axis for the single group.
    """
    flat = t.reshape(-1, t.shape[-1])
    padded = torch.cat([flat, flat.new_zeros(1, flat.shape[1])])
    return padded[indices].unsqueeze(2)
