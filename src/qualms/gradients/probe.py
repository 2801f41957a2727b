"""A look at the first rows before the work starts: where rows stand inside the model, what one costs, what to trust."""

import logging
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qualms.errors import QualmsError
from qualms.gradients.combine import Kind, measure
from qualms.gradients.inputs import count, tensors, with_tensors
from qualms.gradients.layout import Unclear
from qualms.gradients.memory import saved_bytes
from qualms.gradients.pieces import Outer, Piece
from qualms.gradients.plain import NO_PATH, row_gradients
from qualms.gradients.record import Plan, Recorder, Weights
from qualms.gradients.smoothing import Rows, logits_of

log = logging.getLogger("qualms")

# How far the pieces may stand from plain autograd before they are distrusted: rounding, nothing more.
TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3}
COARSE = 0.1  # 16-bit numbers
CACHED_BYTES = 2**22


def recorded(model: nn.Module, on: Rows, weights: Weights, plan: Plan | None) -> tuple[Tensor, Recorder]:
    """One watched forward pass."""
    recorder = Recorder(weights, tensors(on.batch), count(on.batch), on.per_input, plan)
    logits = logits_of(model, on, recorder)
    if not logits.requires_grad:
        raise QualmsError(NO_PATH)
    return logits, recorder


@dataclass(frozen=True)
class Probe:
    """What the first rows tell."""

    trusted: bool  # the pieces agree with plain autograd
    plan: Plan | None  # None: only a single row at a time can be run by pieces
    weights: Weights
    first_use: list[str]
    row_bytes: int  # kept by autograd for one row
    largest: int  # numbers in the largest result of one row
    pieces: list[Piece]
    itemsize: int
    classes: int
    channels_last: bool

    @classmethod
    def of(cls, model: nn.Module, on: Rows, selected: dict[str, Tensor]) -> "Probe":
        """Runs the first one or two rows, by plain autograd and watched, and compares."""
        first = on.take(slice(0, 1))
        direction = torch.randn(1, 4096, generator=torch.Generator().manual_seed(0), dtype=torch.double)

        def along(z: Tensor) -> Tensor:
            repeats = -(-z.shape[1] // direction.shape[1])
            return direction.repeat(1, repeats)[None, :, : z.shape[1]].to(z.device)

        logits, truth = row_gradients(model, first, selected, along)
        if not truth:
            raise QualmsError("none of the selected parameters takes part in the forward pass; widen `params`.")
        expected = {name: float(g.square().sum()) for name, g in truth.items()}
        x = tensors(on.batch)[0]
        channels_last = x.ndim == 4 and x.is_floating_point()
        try:
            weights, z, one, kept = _first_row(model, first, selected, channels_last)
        except (QualmsError, RuntimeError):
            # `view` on what a convolution returns needs the plain memory format.
            channels_last = False
            weights, z, one, kept = _first_row(model, first, selected, channels_last)
        largest = max((t.numel() for m in one.meetings for t in m.results), default=0)
        facts = (weights, one.first_use, kept, largest, one.pieces, z.element_size(), z.shape[1], channels_last)
        found = measure(z, along(z), one.pieces, weights, 1, "l2")
        if not _agree(found, expected, logits.dtype):
            return cls(False, None, *facts)
        if count(on.batch) == 1:
            return cls(True, None, *facts)
        second = next((i for i in range(1, count(on.batch)) if _differ(on, 0, i)), None)
        if second is None:
            return cls(True, None, *facts)
        try:
            pair = _formatted(on.take([0, second]), channels_last)
            _, two = recorded(model, pair, weights, None)
            plan = Plan(one.meetings, two.meetings)
            z, both = recorded(model, pair, weights, plan)
            lone = torch.cat([along(z), torch.zeros_like(along(z))], dim=1)
            found = measure(z, lone, both.pieces, weights, 2, "l2")
        except Unclear as reason:
            log.info("%s: the model is run by plain autograd, one row at a time", reason)
            return cls(True, None, *facts)
        row_0 = {name: value[:1] for name, value in found.items()}
        leaked = max((float(value[1].max()) for value in found.values()), default=0.0)
        if not _agree(row_0, expected, logits.dtype) or leaked > 0:
            log.info("the inputs of a batch influence each other: the model is run one row at a time")
            return cls(False, None, *facts)
        return cls(True, plan, *facts)

    def formatted(self, on: Rows) -> Rows:
        """Rows in the memory format that is fastest for this model."""
        return _formatted(on, self.channels_last)

    def inputs_in(self, budget: int, per_input: int, kind: Kind) -> int:
        """How many inputs at once keep the work within `budget` bytes."""
        if self.plan is None:
            return 1
        outers = [p.gradient for p in self.pieces if isinstance(p.gradient, Outer)]
        numels = [p.gradient.numel for p in self.pieces]
        passes = self.classes + 1 if kind == "gram" else 1
        rows = per_input * self.row_bytes * (1 + passes)
        shared = self.itemsize * sum(outer.held(per_input, self.classes) for outer in outers)
        written = self.itemsize * max(numels, default=0) * (self.classes if kind == "gram" else 2)
        affordable = budget // (rows + shared + written)
        if self.weights.device.type == "cpu":  # beyond this size a tensor leaves the cache, and passes get slower
            affordable = min(affordable, CACHED_BYTES // max(1, self.largest * self.itemsize * per_input))
        return max(1, int(affordable))


def _first_row(
    model: nn.Module, first: Rows, selected: dict[str, Tensor], channels_last: bool
) -> tuple[Weights, Tensor, Recorder, int]:
    weights = Weights.of(selected, model.parameters(), channels_last)
    constants = {t.untyped_storage().data_ptr() for t in weights.stand_in.values()}
    with saved_bytes(constants) as total:
        z, recorder = recorded(model, _formatted(first, channels_last), weights, None)
    return weights, z, recorder, total[0]


def _formatted(on: Rows, channels_last: bool) -> Rows:
    if not channels_last:
        return on
    first, *others = tensors(on.batch)
    first = first.contiguous(memory_format=torch.channels_last)
    return Rows(with_tensors(on.batch, [first, *others]), on.per_input, on.embedding_noise)


def _differ(on: Rows, i: int, j: int) -> bool:
    return on.embedding_noise is not None or any(not torch.equal(t[i], t[j]) for t in tensors(on.batch))


def _agree(found: dict[str, Tensor], expected: dict[str, float], dtype: torch.dtype) -> bool:
    """Whether the squared norms of all parameters are what plain autograd says."""
    scale = sum(expected.values())
    tolerance = TOLERANCE.get(dtype, COARSE)
    for name in found.keys() | expected.keys():
        have = float(found[name].sum()) ** 0.5 if name in found else 0.0
        want = expected.get(name, 0.0) ** 0.5
        if abs(have - want) > tolerance * max(have, want) + tolerance * 1e-2 * scale**0.5:
            log.info("%s: the recorded gradient is not plain autograd's", name)
            return False
    return True
