"""Checks that every traced chunk must pass before its gradients are used.

- *Cross-batch influence*: the logits of a chunk must not change when its samples run in other
  batches, or alone.
- *Separation*: each sample's gradients must depend on the cotangent of that sample alone: if the
  cotangents are scaled sample by sample, the gradients of every layer must scale by the same
  factors.

Two further checks are elsewhere: planning compares the first sample's gradient with plain autograd
(`plan.py`), and `tracing/traced_forward.py` searches the graph for parameters that reach the logits
without being traced. A chunk that fails runs by plain autograd, one sample at a time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from qualms.gradients.batch import (
    SAMPLES_INFLUENCE,
    SAMPLES_MIXED,
    NotBatchable,
    num_samples,
    restore_order,
    strided_groups,
)
from qualms.gradients.directions import Cotangents
from qualms.gradients.measure import Pullback, measure
from qualms.gradients.model_input import ModelInput, forward_logits, rows_to_run_alone
from qualms.gradients.precision import TOLERANCE, close_logits, root_of_squares, tolerance_of
from qualms.gradients.request import GradientRequest
from qualms.gradients.settings import Kind

# Rows whose logits are computed together, ahead of the chunks compared with them.
ROWS_AHEAD = 2048


# Cross-batch influence.


@dataclass
class CrossBatchCheck:
    """Gives the logits of a request's rows from other batches than the chunks that they run in.

    A row is a sample or one of its perturbed copies. Its logits must not depend on the rows that it
    runs with, so engines compare the logits of a chunk with those from other batches. The latter
    are `request.known_logits` (of each sample, not of its perturbed copies) if these are given.
    Otherwise they are computed, for several chunks at a time.

    Args:
        request: the request, whose samples run in chunks.
        chunks: for each chunk, the indices of its samples.
    """

    request: GradientRequest
    chunks: Sequence[slice]

    def __post_init__(self) -> None:
        # The index in the request of the first sample in `_logits`.
        self._start = 0
        # The logits [samples, r, c] computed ahead for several chunks; None before the first call.
        self._logits: Tensor | None = None

    def logits_of(self, chunk: slice) -> Float[Tensor, "b _ c"]:
        """Return the logits that a chunk's rows have in other batches.

        Must be called for one chunk after the other, in their order: the logits of several chunks
        are computed ahead, and those of earlier chunks are dropped then.

        Args:
            chunk: the indices of the chunk's samples.

        Returns:
            Logits [b, r, c] of all r rows of each sample; if the request has known logits, those
            of its first row alone, [b, 1, c].
        """
        known = self.request.known_logits
        if known is not None:
            return known[chunk].unsqueeze(1)
        logits = self._logits
        if logits is None or chunk.stop > self._start + len(logits):
            logits = self._compute_from(chunk)
        return logits[chunk.start - self._start : chunk.stop - self._start]

    def _compute_from(self, chunk: slice) -> Float[Tensor, "b r c"]:
        """Compute the logits of a chunk, and ahead those of the chunks after it, in other batches.

        Up to `ROWS_AHEAD` rows are computed. Their logits are kept in `_logits` and returned.
        """
        remaining = [c for c in self.chunks if c.start >= chunk.start]
        rows = self.request.rows_per_sample * (chunk.stop - chunk.start)
        chunks_ahead = remaining[: max(1, ROWS_AHEAD // rows)]
        part = self.request.take(slice(chunk.start, chunks_ahead[-1].stop))
        self._start = chunk.start
        self._logits = cross_batch_logits(part, len(chunks_ahead))
        return self._logits


@torch.no_grad()
def cross_batch_logits(
    request: GradientRequest,
    chunks: int,
) -> Float[Tensor, "b r c"]:
    """Compute the logits of all rows by plain forward passes over groups other than the chunks.

    If a row has other logits in its chunk, samples influence each other. With n chunks a group has
    every n-th sample (every second if there is a single chunk), so that samples of one chunk run in
    different groups; and of each sample every second row.

    Args:
        request: the samples of consecutive chunks, each with r rows.
        chunks: the number of these chunks.
    """
    rows, samples = request.rows_per_sample, request.num_samples
    stride = min(samples, max(2, chunks))
    logits_of_groups: list[Tensor] = []
    for start in range(stride):
        group = slice(start, None, stride)
        group_size = len(range(samples)[group])
        logits = logits_in_groups(
            request.model,
            request.make_rows(group),
            groups=min(2, rows),
            period=rows,
        )
        logits_of_groups.append(logits.unflatten(0, (group_size, rows)))
    return restore_order(logits_of_groups, strided_groups(samples, stride))


@torch.no_grad()
def logits_in_groups(
    model: nn.Module,
    model_input: ModelInput,
    groups: int,
    period: int | None = None,
) -> Float[Tensor, "rows c"]:
    """Compute the logits of all rows in groups of every n-th row, so that neighbors are separated.

    Args:
        model: the model, inside `preserve_state`.
        model_input: the rows.
        groups: n, the number of groups.
        period: rows are dealt to the groups in turn, and dealing starts again at the first group
            after this many rows; None for never.
    """
    rows = num_samples(model_input.batch)
    row_groups = strided_groups(rows, groups, period)
    logits_of_groups: list[Tensor] = []
    for group in row_groups:
        logits_of_groups.append(forward_logits(model, model_input.take(group)))
    return restore_order(logits_of_groups, row_groups)


def require_same_across_batches(
    logits: Float[Tensor, "rows c"],
    elsewhere: Float[Tensor, "rows c"],
    precision: torch.dtype,
) -> None:
    """Raise `NotBatchable` if rows have other logits in this batch than they have in other batches.

    Args:
        logits: the logits of the rows in this batch.
        elsewhere: the logits of the same rows in other batches.
        precision: the coarsest float type that the forward pass casts to.
    """
    if not close_logits(elsewhere, logits, precision):
        raise NotBatchable(SAMPLES_INFLUENCE)


@torch.no_grad()
def require_same_alone(
    model: nn.Module,
    model_input: ModelInput,
    logits: Float[Tensor, "rows c"],
    every: bool,
    precision: torch.dtype,
) -> None:
    """Raise `NotBatchable` if rows have other logits in this batch than when each runs alone.

    A model that branches on values of tensors, or computes something from all rows at once, such as
    the length of the longest text, may compute other logits for a batch than for each row alone.
    Comparing two batches does not show this if the model takes the same branch for both.

    Args:
        model: the model, inside `preserve_state`.
        model_input: the rows.
        logits: the logits of all rows, run together.
        every: whether to run every row alone; otherwise two rows are.
        precision: the coarsest float type that the forward pass casts to.
    """
    rows = num_samples(model_input.batch)
    for row in range(rows) if every else rows_to_run_alone(rows):
        alone = forward_logits(model, model_input.take([row]))
        if not close_logits(alone, logits[row : row + 1], precision):
            raise NotBatchable(SAMPLES_INFLUENCE)


# Separation of samples.


@dataclass(frozen=True)
class Separation:
    """Checks that each sample's gradients depend on the cotangent of that sample alone.

    One of the chunk's cotangents v is pulled back again, the rows of each sample b multiplied by
    another factor s_b: the norms of sample b must then be s_b times those along v. If the model
    mixes samples, by an index, a list or a matrix, the gradient of one sample in some layer is
    multiplied by the factor of another sample.

    Attributes:
        scales: s_b for each sample b.
        precision: the coarsest float type that the forward pass casts to.
    """

    scales: Float[Tensor, " b"]
    precision: torch.dtype

    @classmethod
    def of(
        cls,
        samples: int,
        device: torch.device,
        precision: torch.dtype,
    ) -> "Separation":
        """Choose a different scale for each sample, from 1 down to 2⁻⁶ (2⁻³ for 16-bit types).

        They are evenly spread in logarithms, in random order.

        Args:
            samples: the number of samples.
            device: the device of the cotangents.
            precision: the coarsest float type that the forward pass casts to.
        """
        octaves = 6 if precision in TOLERANCE else 3
        order = torch.randperm(samples, generator=torch.Generator().manual_seed(0))
        return cls((-octaves * order.double() / samples).exp2().to(device), precision)

    def scale(self, cotangent: Float[Tensor, "rows c"]) -> Float[Tensor, "rows c"]:
        """Multiply the rows of each sample b in a cotangent by s_b, the sample's own factor."""
        rows_per_sample = len(cotangent) // len(self.scales)
        row_scales = self.scales.repeat_interleave(rows_per_sample)
        return cotangent * row_scales[:, None].to(cotangent)

    def require_scaled(
        self,
        plain: dict[str, Float[Tensor, " b"]],
        scaled: dict[str, Float[Tensor, " b"]],
    ) -> None:
        """Raise `NotBatchable` unless norms along a scaled cotangent are s_b times the plain ones.

        Args:
            plain: the norms of each sample b along a cotangent v, by the parameter's name.
            scaled: the norms along v with each sample multiplied by its s_b (`scale`), by name.
        """
        names = list(plain)
        if not names:
            return
        have = torch.stack([scaled[name] for name in names]).double()
        want = torch.stack([plain[name] for name in names]).double() * self.scales
        # A gradient that should be zero consists of rounding errors, which need not scale. They
        # are small beside the gradient of all parameters.
        rounding = 100 * torch.finfo(self.precision).eps * root_of_squares(want.T)
        allowed = tolerance_of(self.precision) * have.maximum(want) + rounding
        if bool(((have - want).abs() > allowed).any()):
            raise NotBatchable(SAMPLES_MIXED)


def require_separate_gradients(pullback: Pullback, precision: torch.dtype) -> None:
    """Raise `NotBatchable` if a sample's gradients depend on the cotangents of other samples.

    Norms along a random direction must scale with the cotangent, each sample by another factor.
    This takes two further backward passes; `measure_separate` needs only one.

    Args:
        pullback: the pullback of a traced forward pass.
        precision: the coarsest float type that the forward pass casts to.
    """
    if pullback.samples < 2 or not pullback.factors:
        return
    logits = pullback.logits
    separation = Separation.of(pullback.samples, logits.device, precision)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(logits.shape, generator=generator, dtype=torch.double).to(logits.device)
    norms = measure(pullback, torch.stack([noise, separation.scale(noise)]), "l2")
    plain = _norms_along(norms, 0)
    scaled = _norms_along(norms, 1)
    separation.require_scaled(plain, scaled)


def measure_separate(
    pullback: Pullback,
    cotangents: Cotangents,
    kind: Kind,
    precision: torch.dtype,
) -> dict[str, Float[Tensor, "b m"]]:
    """Compute norms as `measure` does, and check by one further pass that samples are separate.

    The further pass is along a copy of one direction, with each sample multiplied by another
    factor: its norms must scale by the same factors.

    Args:
        pullback: the pullback of a traced forward pass.
        cotangents: m directions.
        kind: `l2` or `l1`.
        precision: the coarsest float type that the forward pass casts to.

    Returns:
        Norms by the parameter's name.

    Raises:
        NotBatchable: if a sample's gradients depend on the cotangents of other samples.
    """
    samples = pullback.samples
    if samples < 2 or not pullback.factors:
        return measure(pullback, cotangents, kind)
    separation = Separation.of(samples, pullback.logits.device, precision)
    with_copy = _WithScaledCopy(cotangents, separation, samples)
    num_directions = cotangents.num_directions
    norms = measure(pullback, Cotangents(num_directions + 1, with_copy.blocks), kind)
    if with_copy.copied_index is None:
        # Every direction is zero for some sample, so a random one is used.
        require_separate_gradients(pullback, precision)
    else:
        plain = _norms_along(norms, with_copy.copied_index)
        scaled = _norms_along(norms, -1)
        separation.require_scaled(plain, scaled)
    # Without the norms along the copy.
    return {name: of_name[:, :num_directions] for name, of_name in norms.items()}


@dataclass
class _WithScaledCopy:
    """Cotangents, followed by a copy of one of them scaled sample by sample (`Separation`).

    Attributes:
        cotangents: the directions.
        separation: scales the copy.
        samples: the number of samples b.
        copied_index: the index of the direction that is copied, set while `blocks` runs; None if
            every direction is zero for some sample.
    """

    cotangents: Cotangents
    separation: Separation
    samples: int
    copied_index: int | None = None

    def blocks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the blocks of `cotangents`, then a block with the scaled copy of one direction.

        The first direction that is nonzero for every sample is copied, as a gradient of zero shows
        nothing. If there is none, no copy is yielded.

        Yields:
            Pairs of k cotangents [k, rows, c] and their scales [k, b].
        """
        chosen: tuple[Tensor, Tensor] | None = None
        num_before = 0  # directions in earlier blocks
        for block, scales in self.cotangents.blocks():
            if chosen is None:
                by_sample = block.unflatten(1, (self.samples, -1)).flatten(2)
                is_nonzero = by_sample.any(2).all(1)  # for every sample
                usable = is_nonzero.nonzero().flatten().tolist()
                if usable:
                    first = usable[0]
                    self.copied_index = num_before + first
                    # A clone, as a view would keep the whole block in memory.
                    chosen = block[first].clone(), scales[first]
            num_before += len(block)
            yield block, scales
        if chosen is not None:
            cotangent, scale = chosen
            scaled = self.separation.scale(cotangent)
            # A block of a single direction, [1, rows, c] with scales [1, b].
            yield scaled.unsqueeze(0), scale.unsqueeze(0)


def _norms_along(
    norms: dict[str, Tensor],
    index: int,
) -> dict[str, Float[Tensor, " b"]]:
    """Select each parameter's norms [b] along the direction `index`, from norms [b, m]."""
    return {name: of_name[:, index] for name, of_name in norms.items()}
