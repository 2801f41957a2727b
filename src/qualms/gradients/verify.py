"""Every check that a traced batch must pass before its gradients are believed.

- The first sample's gradient is also computed by plain autograd (`plan.py`).
- No parameter may reach the logits around its stand-in: the graph itself is searched for it
  (`tracing/traced_forward.py`).
- *Cross-batch influence*: the logits of a chunk must not change when its samples run in other
  batches, or alone.
- *Separation*: each sample's gradients must follow its own cotangent: scaled sample by sample, they
  scale alike, in every layer.

Whatever fails runs by plain autograd, one sample at a time, which is right by definition.
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

ROWS_AHEAD = 2048  # whose logits are computed ahead of the chunks that they are compared with
INFLUENCE = "the inputs of a batch influence each other"
MIXTURE = "the model mixes the inputs of a batch"


# Cross-batch influence.


@dataclass
class CrossBatchCheck:
    """The logits of a request's rows from batches of other samples than their chunks.

    They are known, or computed for some chunks at a time. Of perturbed copies, those that are known
    are the samples themselves, the first row of each, which ran without copies.

    Args:
        request: whose samples run in chunks.
        chunks: the samples that run together.
    """

    request: GradientRequest
    chunks: Sequence[slice]

    def __post_init__(self) -> None:
        self._start = 0  # the first sample whose logits are held
        self._logits: Tensor | None = None

    def logits_of(self, chunk: slice) -> Float[Tensor, "b _ c"]:
        """The logits of the rows of a chunk, or of the first row of each of its samples."""
        known = self.request.known_logits
        if known is not None:
            return known[chunk, None]
        logits = self._logits
        if logits is None or chunk.stop > self._start + len(logits):
            logits = self._compute_from(chunk)
        return logits[chunk.start - self._start : chunk.stop - self._start]

    def _compute_from(self, chunk: slice) -> Float[Tensor, "b r c"]:
        """The logits of a chunk and of those that follow it, as many as run ahead."""
        rest = [c for c in self.chunks if c.start >= chunk.start]
        rows = self.request.rows_per_sample * (chunk.stop - chunk.start)
        ahead = rest[: max(1, ROWS_AHEAD // rows)]
        part = self.request.take(slice(chunk.start, ahead[-1].stop))
        self._start, self._logits = chunk.start, cross_batch_logits(part, len(ahead))
        return self._logits


@torch.no_grad()
def cross_batch_logits(
    request: GradientRequest,
    chunks: int,
) -> Float[Tensor, "b r c"]:
    """The logits of all rows from plain forward passes over other groups than consecutive samples.

    A group takes a sample of each chunk, or every second one if there is a single chunk; and of a
    sample's rows every second one.

    Args:
        request: whose samples are run.
        chunks: how many chunks they make up.
    """
    rows, samples = request.rows_per_sample, request.num_samples
    stride = min(samples, max(2, chunks))
    parts: list[Tensor] = []
    for start in range(stride):
        some = slice(start, None, stride)
        members = len(range(samples)[some])
        logits = logits_in_groups(request.model, request.rows(some), min(2, rows), rows)
        parts.append(logits.unflatten(0, (members, rows)))
    return restore_order(parts, strided_groups(samples, stride))


@torch.no_grad()
def logits_in_groups(
    model: nn.Module,
    model_input: ModelInput,
    groups: int,
    period: int | None = None,
) -> Float[Tensor, "rows c"]:
    """The logits of all rows, each run with others than its neighbors.

    Args:
        model: inside `preserve_state`.
        model_input: the rows.
        groups: into how many groups they are dealt.
        period: dealing starts anew after so many rows; None for all of them.
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
    """Require that rows give the logits that they give in other batches.

    Args:
        logits: of the rows in this batch.
        elsewhere: of the same rows in other batches.
        precision: the type that rounds most on the way to the logits.
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
    """Require that rows give the logits that they give on their own.

    A model that takes values out of tensors, to branch on them or to make shapes of them, or that
    computes something from all rows at once, such as the length of the longest one, may treat a
    whole chunk as it would treat no row of it, and still treat half of it alike.

    Args:
        model: inside `preserve_state`.
        model_input: the rows.
        logits: of all of them together.
        every: whether to run every row; two of them otherwise.
        precision: the type that rounds most on the way to the logits.
    """
    rows = num_samples(model_input.batch)
    for row in range(rows) if every else rows_to_run_alone(rows):
        alone = forward_logits(model, model_input.take([row]))
        if not close_logits(alone, logits[row : row + 1], precision):
            raise NotBatchable(INFLUENCE)


# Separation of samples.


@dataclass(frozen=True)
class Separation:
    """A further cotangent by which a chunk shows that each sample's gradients are its own.

    It is one of the chunk's cotangents v with every sample b scaled by a number s_b of its own, so
    that the norms of the gradients must be s_b times those of v. Where the model mixes samples, by
    an index, a list or a matrix, a layer has the gradient of one sample scaled by the number of
    another.

    Attributes:
        scales: s_b.
        precision: the type that rounds most on the way to the logits.
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
        """Scales from 1 down that differ as much as the precision allows, in a random order.

        Args:
            samples: how many there are.
            device: of the cotangents.
            precision: the type that rounds most on the way to the logits.
        """
        octaves = 6 if precision in TOLERANCE else 3
        order = torch.randperm(samples, generator=torch.Generator().manual_seed(0))
        return cls((-octaves * order.double() / samples).exp2().to(device), precision)

    def scale(self, cotangent: Float[Tensor, "rows c"]) -> Float[Tensor, "rows c"]:
        """The further cotangent."""
        rows_per_sample = len(cotangent) // len(self.scales)
        of_rows = self.scales.repeat_interleave(rows_per_sample)
        return cotangent * of_rows[:, None].to(cotangent)

    def require(
        self,
        plain: dict[str, Float[Tensor, " b"]],
        scaled: dict[str, Float[Tensor, " b"]],
    ) -> None:
        """Require that norms along the scaled v are s_b times those along v.

        Args:
            plain: norms along v, by the parameter's name.
            scaled: norms along the scaled v.
        """
        names = list(plain)
        if not names:
            return
        have = torch.stack([scaled[name] for name in names]).double()
        want = torch.stack([plain[name] for name in names]).double() * self.scales
        # Of a gradient that is zero but for rounding, rounding is all there is.
        rounding = 100 * torch.finfo(self.precision).eps * root_of_squares(want.T)
        room = tolerance_of(self.precision) * have.maximum(want) + rounding
        if bool(((have - want).abs() > room).any()):
            raise NotBatchable(MIXTURE)


def require_separate_gradients(pullback: Pullback, precision: torch.dtype) -> None:
    """Require that each sample's gradients are its own, by two passes along a random direction.

    For where none of the passes that are made anyway can serve.

    Args:
        pullback: of a traced forward pass.
        precision: the type that rounds most on the way to the logits.
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
    """What `measure` gives, verified by one further pass along a cotangent scaled by sample.

    Args:
        pullback: of a traced forward pass.
        cotangents: the directions.
        kind: `l2` or `l1`.
        precision: the type that rounds most on the way to the logits.
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
    """Cotangents, followed by one of them scaled by sample.

    Attributes:
        cotangents: the directions.
        separation: scales the further one.
        samples: how many there are.
        number: which of the directions the further one is made of; None if none serves.
    """

    cotangents: Cotangents
    separation: Separation
    samples: int
    number: int | None = None

    def blocks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Blocks of cotangents [k, rows, c] with their scales [k, b]."""
        chosen: tuple[Tensor, Tensor] | None = None
        before = 0
        for block, scales in self.cotangents.blocks():
            if chosen is None:
                # All are of one size, but for those that are zero for some sample.
                of_sample = block.unflatten(1, (self.samples, -1)).flatten(2)
                serves = of_sample.any(2).all(1).nonzero().flatten().tolist()
                if serves:
                    self.number = before + serves[0]
                    chosen = block[serves[0]].clone(), scales[serves[0]]
            before += len(block)
            yield block, scales
        if chosen is not None:
            cotangent, scale = chosen
            yield self.separation.scale(cotangent)[None], scale[None]


def _column(
    values: dict[str, Tensor],
    number: int,
) -> dict[str, Float[Tensor, " b"]]:
    """The norms along one direction."""
    return {name: value[:, number] for name, value in values.items()}
