"""When may the recorded pieces be believed? Each check compares them, or what they rest on, with
something simpler.

- The first row's gradient is also computed by plain autograd (`probe.py`).
- No parameter may reach the logits around its stand-in: the graph itself is searched for it
  (`watch/forward.py`).
- The logits of a chunk must not change when its rows are run in other company: rows that influence
  each other do.
- Each input's gradients must follow its own cotangent: scaled input by input, they scale alike, in
  every layer.

Whatever fails is run by plain autograd, one row at a time, which is right by definition.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from qualms.gradients.batch import NotBatchable, num_samples, take_samples
from qualms.gradients.directions import Cotangents
from qualms.gradients.measure import measure
from qualms.gradients.model_input import ModelInput, forward_logits, some_alone
from qualms.gradients.precision import TOLERANCE, close_logits, root_of_squares, tolerance_of
from qualms.gradients.request import GradientRequest
from qualms.gradients.tracing.factors import GradFactor
from qualms.gradients.tracing.weights import Weights


@dataclass
class CrossBatchCheck:
    """The logits of a job's rows in other company than in its chunks: known, or computed for some
    chunks at a time.

    Of perturbed copies, those that are known are the inputs themselves, the first row of each: they
    ran without copies.
    """

    job: GradientRequest
    chunks: Sequence[slice]
    known: Float[Tensor, "b c"] | None = None
    _some: tuple[int, Float[Tensor, "b r c"]] | None = None  # from which input on

    def __getitem__(self, chunk: slice) -> Float[Tensor, "b _ c"]:
        if self.known is not None:
            return self.known[chunk, None]
        start, logits = self._some or (0, None)
        if logits is None or chunk.stop > start + len(logits):
            start, rest = chunk.start, [c for c in self.chunks if c.start >= chunk.start]
            some = max(1, SOME_ROWS // (self.job.rows_per_sample * (chunk.stop - start)))
            part = slice(start, rest[:some][-1].stop)
            job = replace(
                self.job, batch=take_samples(self.job.batch, part), numbers=self.job.numbers[part]
            )
            logits = cross_batch_logits(job, len(rest[:some]))
            self._some = start, logits
        return logits[chunk.start - start : chunk.stop - start]


SOME_ROWS = 2048  # whose logits are computed ahead


@torch.no_grad()
def cross_batch_logits(job: GradientRequest, chunks: int) -> Float[Tensor, "b r c"]:
    """The logits of all rows from plain forward passes in other groups than the chunks of
    consecutive inputs.

    A group takes an input of each chunk, or every second one if there is a single chunk; and of an
    input's rows every second one.
    """
    step = min(job.inputs, max(2, chunks))
    logits: Tensor | None = None
    for start in range(step):
        on = job.rows(slice(start, None, step))
        members = num_samples(on.batch) // on.rows_per_sample
        for parity in range(min(2, on.rows_per_sample)):
            group = [
                m * on.rows_per_sample + r
                for m in range(members)
                for r in range(parity, on.rows_per_sample, 2)
            ]
            found = forward_logits(job.model, on.take(group))
            if logits is None:
                logits = found.new_empty(job.inputs, on.rows_per_sample, found.shape[1])
            logits[start::step, parity::2] = found.unflatten(0, (members, -1))
    assert logits is not None
    return logits


def require_same_across_batches(
    logits: Float[Tensor, "rows c"], regrouped: Float[Tensor, "rows c"], precision: torch.dtype
) -> None:
    """Rows must give the logits that they give in other company."""
    if not close_logits(regrouped, logits, precision):
        raise NotBatchable("the inputs of a batch influence each other")


@torch.no_grad()
def require_same_alone(
    model: nn.Module,
    on: ModelInput,
    logits: Float[Tensor, "rows c"],
    every: bool,
    precision: torch.dtype,
) -> None:
    """Rows must give the logits that they give alone: two of them, or every one where that may not
    tell.

    A model that takes values out of tensors, to branch on them or to make shapes of them, or that
    computes something from all rows at once, such as the length of the longest one, may treat a
    whole chunk as it would treat no row of it, and still treat half of it alike.

    Args:
        model: under `untouched`.
        on: the rows.
        logits: of all of them together.
        every: whether two of them may not tell.
        precision: that rounds most on the way to the logits.
    """
    chosen = range(num_samples(on.batch)) if every else some_alone(num_samples(on.batch))
    if not all(
        close_logits(forward_logits(model, on.take([i])), logits[i : i + 1], precision)
        for i in chosen
    ):
        raise NotBatchable("the inputs of a batch influence each other")


@dataclass(frozen=True)
class Separation:
    """A further cotangent by which a chunk shows that each input's gradients are its own.

    It is one of the chunk's cotangents v with every input b scaled by a number s_b of its own, so
    that the norms of the gradients must be s_b times those of v. Where the model moves rows about,
    by an index, a list or a matrix, a layer has the gradient of one input scaled by the number of
    another.
    """

    scales: Float[Tensor, " b"]
    precision: torch.dtype  # that rounds most on the way to the logits

    @classmethod
    def of(cls, inputs: int, device: torch.device, precision: torch.dtype) -> "Separation":
        """Numbers from 1 down that differ as much as the precision allows, in an order that no
        model knows.
        """
        octaves = 6 if precision in TOLERANCE else 3
        order = torch.randperm(inputs, generator=torch.Generator().manual_seed(0))
        return cls((-octaves * order.double() / inputs).exp2().to(device), precision)

    def scaled(self, cotangent: Float[Tensor, "rows c"]) -> Float[Tensor, "rows c"]:
        """The further cotangent."""
        return cotangent * self.scales.repeat_interleave(len(cotangent) // len(self.scales))[
            :, None
        ].to(cotangent)

    def require(
        self, plain: dict[str, Float[Tensor, " b"]], scaled: dict[str, Float[Tensor, " b"]]
    ) -> None:
        """Norms along the scaled v must be s_b times those along v; both come by the parameter's
        name.
        """
        names = list(plain)
        if not names:
            return
        have = torch.stack([scaled[name] for name in names]).double()
        want = torch.stack([plain[name] for name in names]).double() * self.scales
        # Of a gradient that is zero but for rounding, rounding is all there is.
        nothing = 100 * torch.finfo(self.precision).eps * root_of_squares(want.T)
        room = tolerance_of(self.precision) * have.maximum(want) + nothing
        if bool(((have - want).abs() > room).any()):
            raise NotBatchable("the model moves the inputs of a batch about")


def require_separate_gradients(
    logits: Float[Tensor, "rows c"],
    pieces: Sequence[GradFactor],
    weights: Weights,
    inputs: int,
    precision: torch.dtype,
) -> None:
    """Each input's gradients must be its own, shown by two passes along a random direction where no
    other can serve.
    """
    if inputs < 2 or not pieces:
        return
    separation = Separation.of(inputs, logits.device, precision)
    noise = torch.randn(
        logits.shape, generator=torch.Generator().manual_seed(0), dtype=torch.double
    ).to(logits.device)
    norms = measure(
        logits, torch.stack([noise, separation.scaled(noise)]), pieces, weights, inputs, "l2"
    )
    separation.require(*({name: value[:, i] for name, value in norms.items()} for i in (0, 1)))


def measure_separate(
    logits: Float[Tensor, "rows c"],
    cotangents: Cotangents,
    pieces: Sequence[GradFactor],
    weights: Weights,
    inputs: int,
    kind: Literal["l2", "l1"],
    precision: torch.dtype,
) -> dict[str, Float[Tensor, "b m"]]:
    """What `measure` gives, checked by one further pass: along one of the cotangents, scaled input
    by input.
    """
    if inputs < 2 or not pieces:
        return measure(logits, cotangents, pieces, weights, inputs, kind)
    separation = Separation.of(inputs, logits.device, precision)
    chosen: list[tuple[int, Tensor, Tensor]] = []

    def with_one_more() -> Iterator[tuple[Tensor, Tensor]]:
        number = 0
        for block, sizes in cotangents.blocks():
            if not chosen:  # all are of one size, but for those that are zero for some input
                telling = (
                    block.unflatten(1, (inputs, -1))
                    .flatten(2)
                    .any(2)
                    .all(1)
                    .nonzero()
                    .flatten()
                    .tolist()
                )
                chosen.extend((number + i, block[i].clone(), sizes[i]) for i in telling[:1])
            number += len(block)
            yield block, sizes
        for _, cotangent, size in chosen:
            yield separation.scaled(cotangent)[None], size[None]

    also = Cotangents(cotangents.number + 1, with_one_more)
    values = measure(logits, also, pieces, weights, inputs, kind)
    if not chosen:
        require_separate_gradients(logits, pieces, weights, inputs, precision)
    for number, _, _ in chosen:
        separation.require(
            *({name: value[:, i] for name, value in values.items()} for i in (number, -1))
        )
    return {name: value[:, : cotangents.number] for name, value in values.items()}
