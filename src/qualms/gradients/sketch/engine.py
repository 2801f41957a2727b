"""The sketch engine: norms of all class gradients from k random tangents on the weights, whatever the class count.

For a tangent s on the weights one forward-mode pass over a batch gives J s, and v·(J s) = ⟨Jᵀv, s⟩ for every direction
v: the projections of all class gradients on s at once. The same k tangents serve all inputs, so most of their noise is
common to all and leaves the ranking alone. The weights a_l of the layers are folded into the tangents:

- *quadrature*: s_l = a_l ξ_l with ξ_l normal. A projection is normal with variance Σ_l a_l² ‖g_l‖².
- *sum*, the paper's form: s_l = a_l ξ_l / ζ_l with ζ_l one normal number for each layer. A layer's projection is Cauchy
  with scale a_l ‖g_l‖, and scales of independent Cauchy variables add up: Σ_l a_l ‖g_l‖, with no tangent of its own for
  any layer.
- L1 norms: every entry of s_l is a_l times a Cauchy number, and the scale is Σ_l a_l ‖g_l‖₁.

Smoothing averages the projections of an input's rows, which is averaging gradients before the norm is taken. Before a
tangent is believed, v·(J s) of the first row is compared with ⟨Jᵀv, s⟩ from plain autograd, and the rows' J s with what
they give in other company.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from qualms.errors import QualmsError
from qualms.gradients.directions import projected
from qualms.gradients.inputs import tensors
from qualms.gradients.job import Job
from qualms.gradients.layers import grouped, layer_weights
from qualms.gradients.learnt import Key, Learnt
from qualms.gradients.settings import Sketch
from qualms.gradients.sketch.push import Push, PushProbe, RowGradient, Tangent, checked_pushes, working_push
from qualms.gradients.sketch.stable import Law, Sample
from qualms.random import generator

TANGENT_STREAM = 1_000_000_007  # sets the draws of tangents apart from those of inputs
MOST_BYTES = 2**24  # of one result
LOOKED_AT = 8  # inputs that tell which parameters the logits depend on
Layer = tuple[Sequence[str], float]  # its parameters and its weight a_l


def sketch_totals(job: Job, lam: float | None, learnt: Learnt) -> Iterator[tuple[Sample, Float[Tensor, "b c"]]]:
    """Projections of whole gradients, and the logits, block by block; with a λ, layers weighted by exp(λ(l - L))."""
    work = SketchRun.on(job, learnt)
    groups = grouped(job.model, work.probe.counted, job.settings.granularity)
    weights = layer_weights(len(groups), lam or 0.0).tolist()
    sums = work.how.combine == "sum" and lam is not None
    parts = list(zip(groups.values(), weights, strict=True))
    key = ("tangents", lam, tuple(work.probe.counted))
    kept = sum(other.size for other in learnt.found.values() if isinstance(other, Tangents))
    tangents = learnt.once(key, lambda: work.tangents(parts, sums, max(0, job.budget // 4 - kept)))
    return work.samples(tangents)


def sketch_layers(job: Job, learnt: Learnt) -> tuple[dict[str, tuple[Tensor, Tensor]], Float[Tensor, "b c"]]:
    """Norms [b, m] of each layer's gradients and their standard errors, from k tangents for every layer."""
    work = SketchRun.on(job, learnt)
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for layer, names in grouped(job.model, work.probe.counted, job.settings.granularity).items():
        blocks = [(s.scale, s.error(s.scale), z) for s, z in work.samples(work.tangents([(names, 1.0)]))]
        norms, errors, logits = (torch.cat(parts) for parts in zip(*blocks, strict=True))
        found[layer] = norms, errors
    return found, logits


@dataclass
class Tangents:
    """k random tangents, drawn when they are asked for; as many as fit into `room` bytes are kept."""

    draw: Callable[[int], Tangent]
    law: Law
    room: int = 0
    kept: dict[int, Tangent] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Bytes of those that are kept."""
        return sum(s.nbytes for tangent in self.kept.values() for s in tangent.values())

    def __getitem__(self, j: int) -> Tangent:
        if j in self.kept:
            return self.kept[j]
        drawn = self.draw(j)
        if self.size + sum(s.nbytes for s in drawn.values()) <= self.room:
            self.kept[j] = drawn
        return drawn


def tangent(like: dict[str, Tensor], layers: Sequence[Layer], law: Law, l1: bool, seed: int, j: int) -> Tangent:
    """Tangent number j: s_l for each layer, given by its parameters and its weight a_l. Names decide the draws."""
    drawn: Tangent = {}
    for names, weight in layers:
        scale = weight
        if law == "cauchy":
            common = generator(seed, TANGENT_STREAM, j, *_digits(min(names)), 1)
            scale = weight / float(torch.randn((), generator=common, dtype=torch.double))
        for name in names:
            noise, shape = generator(seed, TANGENT_STREAM, j, *_digits(name)), like[name].shape
            if l1:
                s = weight * torch.empty(shape, dtype=torch.double).cauchy_(generator=noise)
            else:
                s = torch.randn(shape, generator=noise).mul_(scale)
            drawn[name] = s.to(like[name])
    return drawn


def _digits(name: str) -> tuple[int, ...]:
    """A parameter's name as numbers."""
    return tuple(name.encode())


@dataclass
class SketchRun:
    """One job, ready to have tangents pushed through the model."""

    job: Job
    how: Sketch
    learnt: Learnt
    probe: PushProbe
    row_gradients: list[RowGradient]  # rows with their gradients; empty if the look was taken on another batch
    at_once: int  # inputs in one pass

    @classmethod
    def on(cls, job: Job, learnt: Learnt) -> "SketchRun":
        """Looks at the first rows, unless such rows were seen before; decides how many inputs run at once."""
        key, gradients = ("push probe", job.shapes, tuple(job.selected)), list[RowGradient]()
        probe: PushProbe | None = learnt.get(key)
        if probe is None:
            probe, gradients = PushProbe.of(job.model, job.rows(slice(0, LOOKED_AT)), job.selected)
            learnt.keep(key, probe)
        per_input = max(1, probe.largest_result) * job.per_input
        # A pass holds a handful of results at a time. Larger ones leave the cache, smaller ones wait for the weights.
        most = min(MOST_BYTES // per_input, job.budget // (8 * per_input))
        at_once = max(1, min(job.settings.batch_size or job.inputs, most))
        return cls(job, job.settings.sketch or Sketch(), learnt, probe, gradients, at_once)

    def tangents(self, layers: Sequence[Layer], sums: bool = False, room: int = 0) -> Tangents:
        """Tangents on these layers whose projections add up layers in quadrature, or as the `sums` of their norms."""
        l1 = self.job.settings.norm == "l1"
        law: Law = "cauchy" if l1 or sums else "normal"
        return Tangents(partial(tangent, self.job.selected, layers, law, l1, self.job.settings.seed), law, room)

    def samples(self, tangents: Tangents) -> Iterator[tuple[Sample, Float[Tensor, "b c"]]]:
        """The projections of the gradients along the directions on k tangents, and the logits, block by block."""
        push = self.push(tangents)
        for block in self._blocks():
            try:
                projections, logits = self._in_block(block, push, tangents)
            except QualmsError:
                if self.row_gradients:
                    raise
                del self.learnt.found[self._way(tangents)]  # found on other inputs: look for one again
                push = self.push(tangents)
                projections, logits = self._in_block(block, push, tangents)
            if not bool(torch.isfinite(projections).all()):
                raise QualmsError(
                    "engine='sketch' met numbers too large for the model's precision; use float32, or engine='exact'."
                )
            yield Sample(projections, tangents.law), logits

    def push(self, tangents: Tangents) -> Push:
        """The way of pushing tangents that plain autograd confirms on the first rows, found once for each kind."""

        def find() -> Push:
            if not self.row_gradients:
                _, self.row_gradients = PushProbe.of(
                    self.job.model, self.job.rows(slice(0, LOOKED_AT)), self.job.selected
                )
            return working_push(self.job.model, self.probe, self.row_gradients, tangents[0])

        return self.learnt.once(self._way(tangents), find)

    def _way(self, tangents: Tangents) -> Key:
        return ("push", self.job.shapes, tuple(tangents[0]))

    def _blocks(self) -> Iterator[slice]:
        """Inputs whose rows and projections are held at the same time."""
        row_bytes = sum(t.nbytes for t in tensors(self.job.rows(slice(0, 1)).batch))
        bytes_each = row_bytes + 16 * self.how.tangents * self.probe.classes
        size = max(1, self.job.budget // (2 * bytes_each))
        return (slice(i, min(i + size, self.job.inputs)) for i in range(0, self.job.inputs, size))

    def _in_block(self, block: slice, push: Push, tangents: Tangents) -> tuple[Tensor, Tensor]:
        chunks = [slice(i, min(i + self.at_once, block.stop)) for i in range(block.start, block.stop, self.at_once)]
        on = [self.probe.formatted(self.job.rows(chunk)) for chunk in chunks]
        model = self.job.model
        pushes, first_results = zip(*checked_pushes(push, model, self.probe, on, tangents[0], self.learnt), strict=True)
        kept: list[list[Tensor]] = [[] for _ in chunks]
        for j in range(self.how.tangents):
            s = tangents[j]
            for i, chunk in enumerate(on):
                z, dz = pushes[i](model, chunk, s) if j else first_results[i]
                apart = z.unflatten(0, (-1, chunk.per_input)), dz.unflatten(0, (-1, chunk.per_input))
                kept[i].append(projected(self.job.directions.names, *apart))
        logits = [z[:: chunk.per_input] for (z, _), chunk in zip(first_results, on, strict=True)]
        return torch.cat([torch.stack(of_chunk) for of_chunk in kept], dim=1), torch.cat(logits)
