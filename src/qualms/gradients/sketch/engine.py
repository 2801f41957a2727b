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
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn

from qualms.errors import QualmsError
from qualms.gradients.directions import projected
from qualms.gradients.inputs import Batch, count, take, tensors
from qualms.gradients.layers import grouped, layer_weights, select
from qualms.gradients.memory import default_budget
from qualms.gradients.settings import Settings, Sketch
from qualms.gradients.sketch.push import Push, PushProbe, Tangent, checked_pushes
from qualms.gradients.sketch.stable import Law, Sample
from qualms.gradients.smoothing import Rows, Smoothing, rows
from qualms.random import generator

TANGENTS = 1_000_000_007  # sets the draws of tangents apart from those of inputs
LARGEST = 2**24  # bytes of one result
LOOKED_AT = 8  # inputs that tell which parameters the logits depend on


@dataclass(frozen=True)
class Sketched:
    """Estimated norms of the gradients along m directions."""

    norms: Float[Tensor, "b m"]
    samples: list[Sample]  # that they were estimated from, one after the other; empty if they were not to be kept

    def without(self, j: int) -> Float[Tensor, "b m"]:
        """The norms but for what tangent j added to them, to first order."""
        sizes = [sample.projections.shape[1] for sample in self.samples]
        parts = zip(self.samples, self.norms.split(sizes), strict=True)
        return torch.cat([norms - sample.influence(norms, j) for sample, norms in parts])


def sketch_totals(
    model: nn.Module,
    batch: Batch,
    numbers: Sequence[int],
    settings: Settings,
    directions: Sequence[str],
    smoothing: Smoothing | None,
    lam: float | None,
    keep: bool = False,
) -> Sketched:
    """Norms of whole gradients, layers weighted by exp(λ(l - L)); without a λ, plain norms. `keep` the projections.

    `numbers` are the inputs' own, which decide their draws.
    """
    how, l1 = settings.sketch or Sketch(), settings.norm == "l1"
    law: Law = "cauchy" if l1 or (how.combine == "sum" and lam is not None) else "normal"
    work = Work.on(model, batch, numbers, settings, directions, smoothing)
    groups = grouped(model, work.probe.used, settings.layers)
    weights = layer_weights(len(groups), lam or 0.0).tolist()
    group_of = {name: group for group in groups.values() for name in group}
    near = next(iter(groups.values()))
    for name in work.selected:  # one that these rows do not use: with the layer before it, so that L stays as it is
        near = group_of.get(name, near)
        if name not in group_of:
            near.append(name)
    parts = list(zip(groups.values(), weights, strict=True))
    draw = partial(tangent, work.selected, parts, law, l1, settings.seed)
    norms, samples = [], []
    for sample, _ in work.samples(draw, how.tangents, law):
        norms.append(sample.scale)
        if keep:
            samples.append(sample)
    return Sketched(torch.cat(norms), samples)


def sketch_layers(
    model: nn.Module,
    batch: Batch,
    numbers: Sequence[int],
    settings: Settings,
    directions: Sequence[str],
    smoothing: Smoothing | None,
) -> tuple[dict[str, tuple[Tensor, Tensor]], Float[Tensor, "b c"]]:
    """Norms [b, m] of each layer's gradients and their standard errors, from k tangents for every layer."""
    how, l1 = settings.sketch or Sketch(), settings.norm == "l1"
    law: Law = "cauchy" if l1 else "normal"
    work = Work.on(model, batch, numbers, settings, directions, smoothing)
    unused = [name for name in work.selected if name not in work.probe.used]
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for layer, names in grouped(model, work.probe.used + unused, settings.layers).items():
        draw = partial(tangent, work.selected, [(names, 1.0)], law, l1, settings.seed)
        blocks = [(s.scale, s.error(s.scale), z) for s, z in work.samples(draw, how.tangents, law)]
        norms, errors, logits = (torch.cat(parts) for parts in zip(*blocks, strict=True))
        if bool(norms.any()) or not set(names) <= set(unused):
            found[layer] = norms, errors
    return found, logits


def tangent(
    like: dict[str, Tensor], layers: Sequence[tuple[Sequence[str], float]], law: Law, l1: bool, seed: int, j: int
) -> Tangent:
    """Tangent number j: s_l for each layer, given by its parameters and its weight a_l. Names decide the draws."""
    drawn: Tangent = {}
    for names, weight in layers:
        scale = weight
        if law == "cauchy":
            common = generator(seed, TANGENTS, j, *_digits(min(names)), 1)
            scale = weight / float(torch.randn((), generator=common, dtype=torch.double))
        for name in names:
            noise, shape = generator(seed, TANGENTS, j, *_digits(name)), like[name].shape
            if l1:
                s = weight * torch.empty(shape, dtype=torch.double).cauchy_(generator=noise)
            else:
                s = torch.randn(shape, generator=noise).mul_(scale)
            drawn[name] = s.to(like[name])
    return drawn


def _digits(name: str) -> tuple[int, ...]:
    """A parameter's name as numbers."""
    return tuple(name.encode())


@dataclass(frozen=True)
class Work:
    """One batch, ready to have tangents pushed through the model."""

    model: nn.Module
    selected: dict[str, Tensor]
    probe: PushProbe
    inputs: int
    rows_for: Callable[[slice], Rows]
    directions: Sequence[str]
    at_once: int  # inputs in one pass
    budget: int

    @classmethod
    def on(
        cls,
        model: nn.Module,
        batch: Batch,
        numbers: Sequence[int],
        settings: Settings,
        directions: Sequence[str],
        smoothing: Smoothing | None,
    ) -> "Work":
        """Looks at the first rows and decides how many inputs run at once."""
        inputs, selected = count(batch), select(model, settings.params)

        def rows_for(part: slice) -> Rows:
            return rows(take(batch, part), smoothing, numbers[part], settings.seed)

        probe = PushProbe.of(model, rows_for(slice(0, LOOKED_AT)), selected)
        budget = settings.budget or default_budget(tensors(batch)[0].device)
        per_input = max(1, probe.largest_result) * (smoothing.draws + 1 if smoothing else 1)
        # A pass holds a handful of results at a time. Larger ones leave the cache, smaller ones wait for the weights.
        at_once = max(1, min(settings.batch_size or inputs, LARGEST // per_input, budget // (8 * per_input)))
        return cls(model, selected, probe, inputs, rows_for, directions, at_once, budget)

    def samples(
        self, draw: Callable[[int], Tangent], tangents: int, law: Law
    ) -> Iterator[tuple[Sample, Float[Tensor, "b c"]]]:
        """The projections of the gradients along the directions on k tangents, and the logits, block by block."""
        push = self.probe.push(self.model, draw(0))
        for block in self._blocks(tangents):
            projections, logits = self._in_block(block, push, draw, tangents)
            if not bool(torch.isfinite(projections).all()):
                raise QualmsError(
                    "engine='sketch' met numbers too large for the model's precision; use float32, or engine='exact'."
                )
            yield Sample(projections, law), logits

    def _blocks(self, tangents: int) -> Iterator[slice]:
        """Inputs whose rows and projections are held at the same time."""
        row_bytes = sum(t.nbytes for t in tensors(self.rows_for(slice(0, 1)).batch))
        bytes_each = row_bytes + 16 * tangents * self.probe.classes
        size = max(1, self.budget // (2 * bytes_each))
        return (slice(i, min(i + size, self.inputs)) for i in range(0, self.inputs, size))

    def _in_block(
        self, block: slice, push: Push, draw: Callable[[int], Tangent], tangents: int
    ) -> tuple[Tensor, Tensor]:
        chunks = [slice(i, min(i + self.at_once, block.stop)) for i in range(block.start, block.stop, self.at_once)]
        on = [self.probe.formatted(self.rows_for(chunk)) for chunk in chunks]
        s = draw(0)
        pushes, known = zip(*checked_pushes(push, self.model, self.probe, on, s), strict=True)
        kept: list[list[Tensor]] = [[] for _ in chunks]
        for j in range(tangents):
            s = draw(j) if j else s
            for i, chunk in enumerate(on):
                z, dz = pushes[i](self.model, chunk, s) if j else known[i]
                apart = z.unflatten(0, (-1, chunk.per_input)), dz.unflatten(0, (-1, chunk.per_input))
                kept[i].append(projected(self.directions, *apart))
        logits = [z[:: chunk.per_input] for (z, _), chunk in zip(known, on, strict=True)]
        return torch.cat([torch.stack(of_chunk) for of_chunk in kept], dim=1), torch.cat(logits)
