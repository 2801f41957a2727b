"""Whose is an entry of an operation's result, where no axis of it counts the rows?

Experts that take the words meant for them, texts without their padding, inputs sorted by length:
the values decide what stands where. Still each entry belongs to one input, and the cotangents tell
to which. If the logits' cotangent is doubled for some inputs, that of an entry doubles if it is
theirs, and else stays; an entry for which neither holds mixes inputs. One pass for each binary
digit of an input's number tells the number.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.graph import GradientEdge

from qualms.gradients.batch import NotBatchable
from qualms.gradients.isolation import interrupts
from qualms.gradients.precision import at_least_float32
from qualms.gradients.tracing.factors import GradFactor, Outer, Summed

NOBODY = -1  # owns what the logits do not depend on


@dataclass(frozen=True)
class UnbatchedOp:
    """Results whose entries belong to inputs that are not known yet, and the gradients that follow
    once they are.
    """

    results: Sequence[Tensor]
    edges: tuple[GradientEdge, ...]
    gradients: Sequence[tuple[Tensor, Callable[["SampleIds"], Outer | Summed]]]  # by target


def resolve_sample_ids(
    scattered: Sequence[UnbatchedOp], logits: Float[Tensor, "rows c"], inputs: int
) -> list[GradFactor]:
    """The pieces of scattered results, each entry with its owner."""
    edges = list(dict.fromkeys(edge for one in scattered for edge in one.edges))
    found = dict(zip(edges, owners(logits, edges, inputs), strict=True)) if edges else {}
    pieces: list[GradFactor] = []
    for one in scattered:
        reached = [
            (r, e, n)
            for r, e in zip(one.results, one.edges, strict=True)
            if (n := found[e]) is not None
        ]
        if reached:
            results, own, numbers = zip(*reached, strict=True)
            whose = SampleIds(results, own, numbers, inputs)
            pieces += [
                GradFactor(target, own, gradient(whose)) for target, gradient in one.gradients
            ]
    return pieces


def owners(
    logits: Float[Tensor, "rows c"], edges: Sequence[GradientEdge], inputs: int
) -> list[Int[Tensor, "..."] | None]:
    """The number of the input that each entry at these edges belongs to; None where the logits do
    not depend on any.
    """
    noise = torch.randn(
        logits.shape, generator=torch.Generator().manual_seed(0), dtype=torch.double
    ).to(logits)
    number = torch.arange(inputs, device=logits.device).repeat_interleave(len(logits) // inputs)

    def cotangents(factor: Tensor) -> tuple[Tensor | None, ...]:
        interrupts.deliver()
        return torch.autograd.grad(
            logits, edges, noise * factor[:, None], retain_graph=True, allow_unused=True
        )

    plain = cotangents(torch.ones_like(number))
    found = [None if d is None else torch.zeros_like(d, dtype=torch.long) for d in plain]
    for digit in range((inputs - 1).bit_length()):
        doubled = cotangents(1 + (number >> digit & 1))
        for d, twice, owner in zip(plain, doubled, found, strict=True):
            if d is not None and twice is not None and owner is not None:
                theirs = twice.abs() > 1.5 * d.abs()
                _require_one_owner(twice, torch.where(theirs, 2 * d, d))
                owner += theirs.long() << digit
    for d, owner in zip(plain, found, strict=True):
        if d is not None and owner is not None:
            owner[d == 0] = NOBODY
    return found


def _require_one_owner(have: Tensor, want: Tensor) -> None:
    # Doubling is exact in floating point, so what is left is the order of sums, on devices where
    # that varies.
    room = torch.finfo(want.dtype).eps * (1000 * want.abs() + 100 * torch.linalg.vector_norm(want))
    if bool(((have - want).abs() > room).any()):
        raise NotBatchable("the inputs of a batch influence each other")


@dataclass(frozen=True)
class SampleIds:
    """Which input each entry of an operation's results belongs to."""

    results: Sequence[Tensor]
    edges: Sequence[GradientEdge]  # of the results as the operation gave them
    numbers: Sequence[Int[Tensor, "..."]]  # of that input, in the shape of each result
    inputs: int

    def by_autograd(self, copy: Tensor) -> Summed:
        """The gradient of any argument, a leaf: for each input the operation's own, at the entries
        it owns.
        """

        def write(cotangents: list[Tensor | None]) -> Tensor:
            # From the edges: the results themselves may have been changed in place since.
            known = [
                (e, d, o)
                for e, d, o in zip(self.edges, cotangents, self.numbers, strict=True)
                if d is not None
            ]
            of_inputs: list[Tensor] = []
            for b in range(self.inputs):
                masked = [d * (owner == b) for _, d, owner in known]
                (g,) = torch.autograd.grad(
                    [e for e, _, _ in known], [copy], masked, retain_graph=True
                )
                of_inputs.append(at_least_float32(g))
            return torch.stack(of_inputs)

        return Summed(write, copy.numel())

    def product(self, a: Float[Tensor, "*t f"], arrange: Callable[[Tensor], Tensor]) -> Outer:
        """The gradient of a matrix that a [..., f] was multiplied with: every axis but the last
        counts positions.
        """
        places = self._places()
        sizes = (places.shape[1], self.results[0].shape[-1], a.shape[-1], 1)
        return Outer(
            lambda d: _gathered(d, places),
            lambda: _gathered(a, places),
            arrange,
            self.inputs,
            sizes,
        )

    def total(self, like: Tensor) -> Summed:
        """The gradient of what was added at every position: the sum of the cotangents there, [b,
        *like.shape].
        """
        places = self._places()

        def write(cotangents: list[Tensor | None]) -> Tensor:
            (d,) = cotangents
            assert d is not None
            return at_least_float32(_gathered(d, places)).sum(1).reshape(self.inputs, *like.shape)

        return Summed(write, like.numel())

    def _places(self) -> Int[Tensor, "b t"]:
        """For each input the numbers of the positions that it owns, filled up with one that is
        beyond them all.
        """
        (numbers,) = self.numbers
        numbers = numbers.reshape(-1, numbers.shape[-1])
        owner = numbers.amax(1)
        if bool(((numbers != NOBODY) & (numbers != owner[:, None])).any()):
            raise NotBatchable("the inputs of a batch influence each other")
        own = owner == torch.arange(self.inputs, device=owner.device)[:, None]  # [b, positions]
        most = max(1, int(own.sum(1).max()))
        first = own.byte().argsort(dim=1, descending=True, stable=True)[:, :most]
        return torch.where(own.gather(1, first), first, len(owner))


def _gathered(t: Float[Tensor, "*t f"], places: Int[Tensor, "b n"]) -> Float[Tensor, "b n 1 f"]:
    """What stands at some positions; zero beyond the last one."""
    flat = t.reshape(-1, t.shape[-1])
    return torch.cat([flat, flat.new_zeros(1, flat.shape[1])])[places].unsqueeze(2)
