"""Checks that every traced chunk must pass before its gradients are used.

- *Cross-batch influence*: the logits of a chunk must not change when its samples run in other
  batches, or alone.
- *Separation*: each sample's gradients must depend on the cotangent of that sample alone: if the
  cotangents are scaled sample by sample, the gradients of every layer must scale by the same
  numbers.

Two further checks are elsewhere: planning compares the first sample's gradient with plain autograd
(`plan.py`), and `tracing/traced_forward.py` searches the graph for parameters that reach the logits
without being traced. A chunk that fails runs by plain autograd, one sample at a time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from qualms.gradients.batch import NotBatchable, num_samples, restore_order, strided_groups
from qualms.gradients.directions import Cotangents
from qualms.gradients.measure import Pullback, measure
from qualms.gradients.model_input import ModelInput, forward_logits, rows_to_run_alone
from qualms.gradients.precision import TOLERANCE, close_logits, root_of_squares, tolerance_of
from qualms.gradients.request import GradientRequest
from qualms.gradients.settings import Kind

# Rows whose logits are computed together, ahead of the chunks compared with them.
ROWS_AHEAD = 2048
# Reasons that users see in a `SlowWarning`.
INFLUENCE = "the samples of a batch influence each other"
MIXTURE = "the model mixes samples within a batch"


# Cross-batch influence.


@dataclass
class CrossBatchCheck:
    """Gives the logits of a request's rows from other batches than the chunks that they run in.

    A row's logits must not depend on the rows that it runs with, so engines compare the two. The
    logits from other batches are `request.known_logits`, if given: those of each sample without its
    perturbed copies. Otherwise they are computed, for several chunks at a time.

    Args:
        request: the request, whose samples run in chunks.
        chunks: for each chunk, the indices of its samples.
    """

    request: GradientRequest
    chunks: Sequence[slice]

    def __post_init__(self) -> None:
        self._start = 0  # the index of the first sample in `_logits`
        # [samples, r, c], computed ahead for several chunks.
        self._logits: Tensor | None = None

    def logits_of(self, chunk: slice) -> Float[Tensor, "b _ c"]:
        """Return the logits that a chunk's rows have in other batches.

        Chunks must be asked for in order: logits are computed ahead, and replaced by later ones.

        Args:
            chunk: the indices of the chunk's samples.

        Returns:
            Logits [b, r, c] of all rows of each sample; [b, 1, c] of its first row if they are
            the request's known logits.
        """
        known = self.request.known_logits
        if known is not None:
            return known[chunk, None]
        logits = self._logits
        if logits is None or chunk.stop > self._start + len(logits):
            logits = self._compute_from(chunk)
        return logits[chunk.start - self._start : chunk.stop - self._start]

    def _compute_from(self, chunk: slice) -> Float[Tensor, "b r c"]:
        """Compute the logits of a chunk and of the chunks after it, up to `ROWS_AHEAD` rows.

        Returns the logits of their samples, which are kept for the next calls of `logits_of`.
        """
        remaining = [c for c in self.chunks if c.start >= chunk.start]
        rows = self.request.rows_per_sample * (chunk.stop - chunk.start)
        ahead = remaining[: max(1, ROWS_AHEAD // rows)]
        part = self.request.take(slice(chunk.start, ahead[-1].stop))
        self._start, self._logits = chunk.start, cross_batch_logits(part, len(ahead))
        return self._logits


@torch.no_grad()
def cross_batch_logits(
    request: GradientRequest,
    chunks: int,
) -> Float[Tensor, "b r c"]:
    """Compute the logits of all rows by plain forward passes over groups other than the chunks.

    A group has one sample of each chunk (every second sample if there is a single chunk), and every
    second row of these samples.

    Args:
        request: the samples of consecutive chunks.
        chunks: the number of these chunks.
    """
    rows, samples = request.rows_per_sample, request.num_samples
    stride = min(samples, max(2, chunks))
    parts: list[Tensor] = []
    for start in range(stride):
        group = slice(start, None, stride)
        members = len(range(samples)[group])
        logits = logits_in_groups(
            request.model, request.rows(group), groups=min(2, rows), period=rows
        )
        parts.append(logits.unflatten(0, (members, rows)))
    return restore_order(parts, strided_groups(samples, stride))


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
        period: dealing to the groups starts again after this many rows; None for never.
    """
    rows = num_samples(model_input.batch)
    dealt = strided_groups(rows, groups, period)
    parts = [forward_logits(model, model_input.take(group)) for group in dealt]
    return restore_order(parts, dealt)


def require_same_across_batches(
    logits: Float[Tensor, "rows c"],
    elsewhere: Float[Tensor, "rows c"],
    precision: torch.dtype,
) -> None:
    """Raise `NotBatchable` if the logits of rows differ from those that they have in other batches.

    Args:
        logits: the logits of the rows in this batch.
        elsewhere: the logits of the same rows in other batches.
        precision: the coarsest float type that the forward pass casts to.
    """
    if not close_logits(elsewhere, logits, precision):
        raise NotBatchable(INFLUENCE)


@torch.no_grad()
def require_same_alone(
    model: nn.Module,
    model_input: ModelInput,
    logits: Float[Tensor, "rows c"],
    every: bool,
    precision: torch.dtype,
) -> None:
    """Raise `NotBatchable` if the logits of rows differ from those of the rows run alone.

    A model that branches on values of tensors, or computes something from all rows at once, such as
    the length of the longest text, may compute other logits for a batch than for each row alone.
    Comparing two batches does not show this if it takes the same branch for both.

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
            raise NotBatchable(INFLUENCE)


# Separation of samples.


@dataclass(frozen=True)
class Separation:
    """Checks that each sample's gradients depend on the cotangent of that sample alone.

    One of the chunk's cotangents v is pulled back again with each sample b scaled by another number
    s_b: the norms of sample b must be s_b times those along v. If the model mixes samples, by an
    index, a list or a matrix, some layer has the gradient of one sample scaled by the number of
    another.

    Attributes:
        scales: s_b for each sample.
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
        """Choose scales from 1 down to 2⁻⁶ (2⁻³ for 16-bit types), evenly spread, in random order.

        Args:
            samples: the number of samples.
            device: the device of the cotangents.
            precision: the coarsest float type that the forward pass casts to.
        """
        octaves = 6 if precision in TOLERANCE else 3
        order = torch.randperm(samples, generator=torch.Generator().manual_seed(0))
        return cls((-octaves * order.double() / samples).exp2().to(device), precision)

    def scale(self, cotangent: Float[Tensor, "rows c"]) -> Float[Tensor, "rows c"]:
        """Multiply the rows of each sample b in a cotangent by s_b."""
        rows_per_sample = len(cotangent) // len(self.scales)
        row_scales = self.scales.repeat_interleave(rows_per_sample)
        return cotangent * row_scales[:, None].to(cotangent)

    def require(
        self,
        plain: dict[str, Float[Tensor, " b"]],
        scaled: dict[str, Float[Tensor, " b"]],
    ) -> None:
        """Raise `NotBatchable` unless norms along the scaled v are s_b times those along v.

        Args:
            plain: the norms along v, by the parameter's name.
            scaled: the norms along the scaled v, by the parameter's name.
        """
        names = list(plain)
        if not names:
            return
        have = torch.stack([scaled[name] for name in names]).double()
        want = torch.stack([plain[name] for name in names]).double() * self.scales
        # A gradient that should be zero consists of rounding errors, which need not scale.
        rounding = 100 * torch.finfo(self.precision).eps * root_of_squares(want.T)
        room = tolerance_of(self.precision) * have.maximum(want) + rounding
        if bool(((have - want).abs() > room).any()):
            raise NotBatchable(MIXTURE)


def require_separate_gradients(pullback: Pullback, precision: torch.dtype) -> None:
    """Raise `NotBatchable` if a sample's gradients depend on the cotangents of other samples.

    This takes two further passes along a random direction; `measure_separate` needs only one.

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
    separation.require(_column(norms, 0), _column(norms, 1))


def measure_separate(
    pullback: Pullback,
    cotangents: Cotangents,
    kind: Kind,
    precision: torch.dtype,
) -> dict[str, Float[Tensor, "b m"]]:
    """Compute what `measure` computes, and check the separation of samples by one further pass.

    Args:
        pullback: the pullback of a traced forward pass.
        cotangents: the directions.
        kind: `l2` or `l1`.
        precision: the coarsest float type that the forward pass casts to.

    Raises:
        NotBatchable: if a sample's gradients depend on the cotangents of other samples.
    """
    samples = pullback.samples
    if samples < 2 or not pullback.factors:
        return measure(pullback, cotangents, kind)
    separation = Separation.of(samples, pullback.logits.device, precision)
    one_more = _OneMoreCotangent(cotangents, separation, samples)
    values = measure(pullback, Cotangents(cotangents.number + 1, one_more.blocks), kind)
    if one_more.number is None:
        require_separate_gradients(pullback, precision)
    else:
        separation.require(_column(values, one_more.number), _column(values, -1))
    return {name: value[:, : cotangents.number] for name, value in values.items()}


@dataclass
class _OneMoreCotangent:
    """Cotangents, followed by a copy of one of them scaled sample by sample (`Separation`).

    Attributes:
        cotangents: the directions.
        separation: scales the copy.
        samples: the number of samples.
        number: the index of the direction that is copied, set while `blocks` runs; None if every
            direction is zero for some sample.
    """

    cotangents: Cotangents
    separation: Separation
    samples: int
    number: int | None = None

    def blocks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the blocks of `cotangents`, [k, rows, c] with scales [k, b], then the scaled copy.

        The first direction that is nonzero for every sample is copied; there is no copy if none is.
        """
        chosen: tuple[Tensor, Tensor] | None = None
        before = 0
        for block, scales in self.cotangents.blocks():
            if chosen is None:
                # A direction serves if it is nonzero for every sample; blocks are scaled, so that
                # all nonzero ones have the same size.
                by_sample = block.unflatten(1, (self.samples, -1)).flatten(2)
                nonzero = by_sample.any(2).all(1).nonzero().flatten().tolist()
                if nonzero:
                    self.number = before + nonzero[0]
                    chosen = block[nonzero[0]].clone(), scales[nonzero[0]]
            before += len(block)
            yield block, scales
        if chosen is not None:
            cotangent, scale = chosen
            yield self.separation.scale(cotangent)[None], scale[None]


def _column(
    values: dict[str, Tensor],
    number: int,
) -> dict[str, Float[Tensor, " b"]]:
    """Select the norms [b] along direction `number`, from norms [b, m] by the parameter's name."""
    return {name: value[:, number] for name, value in values.items()}
