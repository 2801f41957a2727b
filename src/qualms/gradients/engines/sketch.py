"""The sketch engine: norms of all class gradients from k random tangents on the weights, whatever
the class count.

For a tangent s on the weights one forward-mode pass over a batch gives J s, and v·(J s) = ⟨Jᵀv, s⟩
for every direction
v: the projections of all class gradients on s at once. The same k tangents serve all inputs, so
most of their noise is common to all and leaves the ranking alone. The weights a_l of the layers are
folded into the tangents:

- *quadrature*: s_l = a_l ξ_l with ξ_l random signs (normal for small parameters). A projection has
  variance Σ_l a_l² ‖g_l‖², and as a sum of many terms it is as good as normal.
- *sum*, the paper's form: s_l = a_l ξ_l / ζ_l with ζ_l one normal number for each layer. A layer's
  projection is Cauchy with scale a_l ‖g_l‖, and scales of independent Cauchy variables add up: Σ_l
  a_l ‖g_l‖, with no tangent of its own for any layer.
- L1 norms: every entry of s_l is a_l times a Cauchy number, and the scale is Σ_l a_l ‖g_l‖₁.

Smoothing averages the projections of an input's rows, which is averaging gradients before the norm
is taken. Before a tangent is believed, v·(J s) of the first row is compared with ⟨Jᵀv, s⟩ from
plain autograd, and the rows' J s with what they give in other company.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from qualms.errors import QualmsError
from qualms.gradients.batch import NotBatchable, batch_tensors, num_samples
from qualms.gradients.directions import project_directions
from qualms.gradients.layers import group_by_layer, layer_weights
from qualms.gradients.memory import release_free_memory, require_room
from qualms.gradients.model_input import ModelInput
from qualms.gradients.plan_cache import Key, PlanCache
from qualms.gradients.precision import close, close_logits
from qualms.gradients.request import GradientRequest
from qualms.gradients.settings import Sketch
from qualms.gradients.sketching.push import (
    KnownRows,
    Push,
    PushProbe,
    Tangent,
    checked_pushes,
    forward_mode,
    working_push,
)
from qualms.gradients.sketching.stable import Law, Sample
from qualms.gradients.sketching.tangents import Layer, Tangents, tangent

log = logging.getLogger("qualms")
MOST_BYTES = 2**24  # of one result
# as large as the largest, which a pass with a tangent holds for a row, kernels' copies included
RESULTS = 24
TANGENT_AND_GRADIENT = "a tangent on the weights and the gradient that it is checked with"
INSTEAD = "select fewer parameters by `params`, or take engine='exact'"
LOOKED_AT = 8  # inputs, of which three are run by plain autograd


def sketch_totals(
    job: GradientRequest, lam: float | None, learnt: PlanCache
) -> Iterator[tuple[Sample, Float[Tensor, "b c"]]]:
    """Projections of whole gradients, and the logits, block by block; with a λ, layers weighted by
    exp(λ(l - L)).
    """
    work = SketchRun.on(job, learnt)
    return work.samples(work.weighted_tangents(lam))


def sketch_layers(
    job: GradientRequest, learnt: PlanCache
) -> tuple[dict[str, tuple[Tensor, Tensor]], Float[Tensor, "b c"]]:
    """Norms [b, m] of each layer's gradients and their standard errors, from k tangents for every
    layer.
    """
    work = SketchRun.on(job, learnt)
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for layer, names in group_by_layer(
        job.model, work.probe.counted, job.settings.granularity
    ).items():
        blocks = [
            (s.scale, s.error(s.scale), z) for s, z in work.samples(work.tangents([(names, 1.0)]))
        ]
        norms, errors, logits = (torch.cat(parts) for parts in zip(*blocks, strict=True))
        found[layer] = norms, errors
    return found, logits


@dataclass
class SketchRun:
    """One job, ready to have tangents pushed through the model."""

    job: GradientRequest
    how: Sketch
    learnt: PlanCache
    probe: PushProbe
    row_gradients: (
        KnownRows | None
    )  # rows with their gradients; None if the look was taken on another batch
    at_once: int  # inputs in one pass

    @classmethod
    def on(cls, job: GradientRequest, learnt: PlanCache) -> "SketchRun":
        """Looks at the first rows, unless such rows were seen before; decides how many inputs run
        at once.
        """
        key, gradients = ("push probe", job.shapes, tuple(job.selected)), None
        probe: PushProbe | None = learnt.get(key)
        weights = sum(p.nbytes for p in job.selected.values())
        if probe is None:
            require_room(2 * weights, job.limit, TANGENT_AND_GRADIENT, INSTEAD)
            probe, gradients = PushProbe.of(
                job.model, job.rows(slice(0, LOOKED_AT)), job.selected, job.budget // 8
            )
            learnt.keep(key, probe)
            release_free_memory()
        of_row = RESULTS * max(1, probe.largest_result)
        # Half of what a row takes are kernels' copies, which come and go.
        require_room(2 * weights + of_row // 2, job.limit, TANGENT_AND_GRADIENT, INSTEAD)
        # Those that are kept take a quarter of the budget, and another one may be drawn beside
        # them.
        kept = min(job.budget // 4, (job.settings.sketch or Sketch()).tangents * weights)
        room = job.budget - kept // max(1, weights) * weights - weights
        # Larger results leave the cache, smaller ones wait for the weights.
        most = (
            min(MOST_BYTES // max(1, probe.largest_result), room // of_row) // job.rows_per_sample
        )
        at_once = max(1, min(job.settings.batch_size or job.inputs, most))
        return cls(job, job.settings.sketch or Sketch(), learnt, probe, gradients, at_once)

    def weighted_tangents(self, lam: float | None) -> Tangents:
        """Tangents on the whole model, made once for each λ; layers weighted by exp(λ(l - L)) if
        there is one.
        """
        groups = group_by_layer(self.job.model, self.probe.counted, self.job.settings.granularity)
        weights = layer_weights(len(groups), lam or 0.0).tolist()
        sums = self.how.combine == "sum" and lam is not None
        parts = list(zip(groups.values(), weights, strict=True))
        kept = sum(
            other.size for other in self.learnt.found.values() if isinstance(other, Tangents)
        )
        room = max(0, self.job.budget // 4 - kept)
        return self.learnt.once(
            ("tangents", lam, tuple(self.probe.counted)), lambda: self.tangents(parts, sums, room)
        )

    def tangents(self, layers: Sequence[Layer], sums: bool = False, room: int = 0) -> Tangents:
        """Tangents on these layers whose projections add up layers in quadrature, or as the `sums`
        of their norms.
        """
        l1 = self.job.settings.norm == "l1"
        law: Law = "cauchy" if l1 or sums else "normal"
        like = {name: self.job.selected[name] for names, _ in layers for name in names}
        return Tangents(
            partial(tangent, like, layers, law, l1, self.job.settings.seed), law, like, room
        )

    def samples(self, tangents: Tangents) -> Iterator[tuple[Sample, Float[Tensor, "b c"]]]:
        """The projections of the gradients along the directions on k tangents, and the logits,
        block by block.
        """
        push = self.push(tangents)
        for block in self._blocks():
            try:
                projections, logits = self._in_block(block, push, tangents)
            except QualmsError:
                if self.row_gradients is not None:
                    raise
                del self.learnt.found[
                    self._way(tangents)
                ]  # found on other inputs: look for one again
                push = self.push(tangents)
                projections, logits = self._in_block(block, push, tangents)
            if not bool(torch.isfinite(projections).all()):
                raise QualmsError(
                    "engine='sketch' met numbers too large for the model's precision; use float32, or engine='exact'."
                )
            yield Sample(projections, tangents.law), logits

    def push(self, tangents: Tangents) -> Push:
        """The way of pushing tangents that plain autograd confirms on the first rows, found once
        for each kind.
        """

        def find() -> Push:
            if self.row_gradients is None:
                rows, room = self.job.rows(slice(0, LOOKED_AT)), self.job.budget // 8
                _, self.row_gradients = PushProbe.of(self.job.model, rows, self.job.selected, room)
            found = working_push(self.probe, self.row_gradients, tangents[0])
            release_free_memory()
            return found

        return self.learnt.once(self._way(tangents), find)

    def _way(self, tangents: Tangents) -> Key:
        return ("push", self.job.shapes, tuple(tangents.like))

    def _blocks(self) -> Iterator[slice]:
        """Inputs whose rows and projections are held at the same time."""
        row_bytes = sum(t.nbytes for t in batch_tensors(self.job.rows(slice(0, 1)).batch))
        bytes_each = row_bytes + 16 * self.how.tangents * self.probe.classes
        size = max(1, self.job.budget // (2 * bytes_each))
        return (slice(i, min(i + size, self.job.inputs)) for i in range(0, self.job.inputs, size))

    def _in_block(self, block: slice, push: Push, tangents: Tangents) -> tuple[Tensor, Tensor]:
        chunks = [
            slice(i, min(i + self.at_once, block.stop))
            for i in range(block.start, block.stop, self.at_once)
        ]
        on = [self.probe.reformat(self.job.rows(chunk)) for chunk in chunks]
        model = self.job.model
        if len(on) == 1 and num_samples(on[0].batch) == 1:
            found = self._several_at_once(self.job.rows(block), push, tangents)
            if found is not None:
                return found
        pushes, first_results = zip(
            *checked_pushes(push, model, self.probe, on, tangents[0], self.learnt), strict=True
        )
        kept: list[list[Tensor]] = [[] for _ in chunks]
        release_free_memory()  # that of the checks
        s: Tangent = {}
        for j in range(self.how.tangents):
            del s  # before the next one is drawn: each is as large as the weights
            s = tangents[j] if j else {}
            for i, chunk in enumerate(on):
                z, dz = pushes[i](model, chunk, s) if j else first_results[i]
                apart = (
                    z.unflatten(0, (-1, chunk.rows_per_sample)),
                    dz.unflatten(0, (-1, chunk.rows_per_sample)),
                )
                kept[i].append(project_directions(self.job.directions.names, *apart))
        logits = [
            z[:: chunk.rows_per_sample] for (z, _), chunk in zip(first_results, on, strict=True)
        ]
        return torch.cat([torch.stack(of_chunk) for of_chunk in kept], dim=1), torch.cat(logits)

    def _several_at_once(
        self, row: ModelInput, push: Push, tangents: Tangents
    ) -> tuple[Tensor, Tensor] | None:
        """For a single row, where a pass waits for weights more than it computes; None where that
        fails.

        The first time it must agree with one tangent at a time. Images keep the plain memory
        format, which is that of the tangents: torch would copy each to that of its weight.
        """
        key = ("several", *self._way(tangents))
        at_once = min(
            tangents.at_once, self.job.budget // (RESULTS * max(1, self.probe.largest_result))
        )
        if push is not forward_mode or at_once < 2 or self.learnt.get(key) is False:
            return None
        model, number, done = self.job.model, self.how.tangents, list[Tensor]()
        try:
            one = push(model, row, tangents[0]) if self.learnt.get(key) is None else None
            for start in range(0, number, at_once):
                stacked = tangents.stacked(start, min(number, start + at_once))
                z, dz = forward_mode(model, row, stacked, several=True)
                done += dz.unbind(0)
            rounds = self.probe.precision
            if one is not None and not (
                close_logits(z[0], one[0], rounds) and close(done[0], one[1], rounds)
            ):
                raise NotBatchable("tangents influence each other")
        except Exception as error:
            log.info("%s: tangents are pushed one at a time", error)
            self.learnt.keep(key, False)
            return None
        self.learnt.keep(key, True)
        names, logits = self.job.directions.names, z[0]
        return torch.stack(
            [project_directions(names, logits[:, None], t[:, None]) for t in done]
        ), logits
