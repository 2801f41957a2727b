"""A look at the first rows before the work starts: where rows stand inside the model, what one costs, what to trust."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from qualms.errors import QualmsError
from qualms.gradients.autograd import NO_PATH, row_gradients
from qualms.gradients.exact.by_features import LastProduct
from qualms.gradients.exact.checks import close_logits, require_no_bypass, same_norms
from qualms.gradients.exact.measure import Kind, measure
from qualms.gradients.guard import all_parameters_differentiable
from qualms.gradients.inputs import count, tensors, with_tensors
from qualms.gradients.memory import saved_bytes
from qualms.gradients.smoothing import Rows, logits_of
from qualms.gradients.watch.layout import Unclear
from qualms.gradients.watch.pieces import Outer, Piece
from qualms.gradients.watch.record import Meeting, Recorder, TwinPasses
from qualms.gradients.watch.weights import Weights

log = logging.getLogger("qualms")
CACHED_BYTES = 2**22
FEWEST = 4  # rows at once: with fewer, a pass costs more for each than it would save
DOUBLE = 8  # bytes of an entry of the cotangents


def recorded(model: nn.Module, on: Rows, weights: Weights, twins: TwinPasses | None) -> tuple[Tensor, Recorder]:
    """One watched forward pass, in which every parameter is known by its stand-in."""
    recorder = Recorder(weights, tensors(on.batch), count(on.batch), on.per_input, twins)
    with all_parameters_differentiable(model):
        logits = logits_of(model, on, recorder)
        if not logits.requires_grad:
            raise QualmsError(NO_PATH)
        require_no_bypass(logits, model.parameters())
    return logits, recorder


@torch.no_grad()
def require_no_randomness(model: nn.Module, first: Rows, logits: Tensor) -> None:
    """The same input must give the same logits twice."""
    if not close_logits(logits_of(model, first), logits):
        raise QualmsError(
            "the model is random in evaluation mode: the same input gave two different logits; "
            "switch its randomness off (dropout called with training=True, sampling layers)."
        )


def first_use(model: nn.Module, on: Rows, selected: dict[str, Tensor]) -> list[str]:
    """The names of the selected parameters in the order in which a forward pass first uses them."""
    try:
        _, recorder = recorded(model, on.take(slice(0, 1)), Weights.of(selected, model.parameters()), None)
    except Exception:  # a model that cannot be watched has its parameters in the order of registration
        return []
    return recorder.first_use


@dataclass(frozen=True)
class Probe:
    """What the first row tells, watched. `twins` is None if there is only one row."""

    twins: TwinPasses | None
    weights: Weights
    first_use: list[str]
    row_bytes: int  # kept by autograd for one row
    largest_result: int  # numbers in the largest result of one row
    pieces: list[Piece]
    itemsize: int
    classes: int
    channels_last: bool
    head: LastProduct | None

    @classmethod
    def of(cls, model: nn.Module, on: Rows, selected: dict[str, Tensor]) -> "Probe | None":
        """Runs the first one or two rows, by plain autograd and watched; None if the two do not agree."""
        first = on.take(slice(0, 1))
        logits, truth = row_gradients(model, first, selected, along)
        if not truth:
            raise QualmsError("none of the selected parameters takes part in the forward pass; widen `params`.")
        require_no_randomness(model, first, logits)
        expected = {name: float(g.square().sum()) for name, g in truth.items()}
        # Whatever goes wrong from here on is the recorder's fault, not the model's: plain autograd has managed.
        try:
            probe, meetings = cls._watch_one(model, first, selected, logits, expected)
            second = next((i for i in range(1, count(on.batch)) if _differ(on, 0, i)), None)
            if count(on.batch) == 1:
                return probe
            if second is None:
                raise Unclear("all inputs are the same")
            pair = probe.formatted(on.take([0, second]))
            _, two = recorded(model, pair, probe.weights, None)
            twins = TwinPasses(meetings, two.meetings)
            z, both = recorded(model, pair, probe.weights, twins)
            lone = torch.cat([along(z), torch.zeros_like(along(z))], dim=1)
            found = measure(z, lone, both.pieces, probe.weights, 2, "l2")
            if not same_norms({name: value[:1] for name, value in found.items()}, expected, logits.dtype):
                raise Unclear("in a batch the first input's gradient is another")
            return replace(probe, twins=twins)
        except Exception as reason:
            log.info("%s: the model is run by plain autograd, one row at a time", reason)
            return None

    @classmethod
    def _watch_one(
        cls, model: nn.Module, first: Rows, selected: dict[str, Tensor], logits: Tensor, expected: dict[str, float]
    ) -> "tuple[Probe, list[Meeting]]":
        channels_last = wants_channels_last(first)
        try:
            weights, z, one, kept = _first_row(model, first, selected, channels_last)
        except Exception:
            # `view` on what a convolution returns needs the plain memory format.
            channels_last = False
            weights, z, one, kept = _first_row(model, first, selected, channels_last)
        found = measure(z, along(z), one.pieces, weights, 1, "l2")
        if not close_logits(z.detach(), logits) or not same_norms(found, expected, logits.dtype):
            raise Unclear("the recorded gradient is not plain autograd's")
        largest = max((t.numel() for m in one.meetings for t in m.results), default=0)
        size, head = z.element_size(), LastProduct.of(z, one.pieces, weights)
        probe = cls(None, weights, one.first_use, kept, largest, one.pieces, size, z.shape[1], channels_last, head)
        return probe, one.meetings

    def formatted(self, on: Rows) -> Rows:
        """Rows in the memory format that is fastest for this model."""
        return in_channels_last(on) if self.channels_last else on

    def by_features(self, budget: int, per_input: int, kind: Kind, directions: Sequence[str]) -> bool:
        """Whether the gradients of all classes come cheaper from those of the last layer's features, and fit."""
        if self.head is None or kind != "l2" or "classes" not in directions or not self.head.pays(per_input):
            return False
        return self._affordable(budget, per_input, kind, True) * per_input >= FEWEST

    def inputs_in(self, budget: int, per_input: int, kind: Kind, by_features: bool = False) -> int:
        """How many inputs at once keep the work within `budget` bytes."""
        affordable = self._affordable(budget, per_input, kind, by_features)
        if self.weights.device.type == "cpu":  # beyond this size a tensor leaves the cache, and passes get slower
            affordable = min(affordable, CACHED_BYTES // max(1, self.largest_result * self.itemsize * per_input))
        return max(1, affordable)

    def _affordable(self, budget: int, per_input: int, kind: Kind, by_features: bool) -> int:
        outers = [p.gradient for p in self.pieces if isinstance(p.gradient, Outer)]
        numels = [p.gradient.numel for p in self.pieces]
        passes = self.classes + 1 if kind == "gram" else 1
        rows = per_input * self.row_bytes * (1 + passes)
        shared = self.itemsize * sum(outer.held(per_input, self.classes) for outer in outers)
        written = self.itemsize * max(numels, default=0) * (self.classes if kind == "gram" else 2)
        if by_features and self.head is not None:
            cotangents = self.itemsize * self.head.held(per_input)
        else:
            cotangents = 2 * DOUBLE * per_input * self.classes**2
        return int(budget // (rows + shared + written + cotangents))


def _first_row(
    model: nn.Module, first: Rows, selected: dict[str, Tensor], channels_last: bool
) -> tuple[Weights, Tensor, Recorder, int]:
    weights = Weights.of(selected, model.parameters(), channels_last)
    constants = {t.untyped_storage().data_ptr() for t in weights.stand_in.values()}
    with saved_bytes(constants) as total:
        z, recorder = recorded(model, in_channels_last(first) if channels_last else first, weights, None)
    return weights, z, recorder, total[0]


def wants_channels_last(on: Rows) -> bool:
    """Images; with a single channel both formats look alike, and torch would go back and forth between them."""
    x = tensors(on.batch)[0]
    return x.ndim == 4 and x.shape[1] > 1 and x.is_floating_point()


def in_channels_last(on: Rows) -> Rows:
    """The same rows in the memory format in which convolutions are fastest."""
    first, *others = tensors(on.batch)
    first = first.contiguous(memory_format=torch.channels_last)
    return Rows(with_tensors(on.batch, [first, *others]), on.per_input, on.embedding_noise)


def _differ(on: Rows, i: int, j: int) -> bool:
    return on.embedding_noise is not None or any(not torch.equal(t[i], t[j]) for t in tensors(on.batch))


def along(logits: Tensor) -> Float[Tensor, "1 1 c"]:
    """A random direction, the same for every model with as many classes."""
    noise = torch.Generator().manual_seed(0)
    return torch.randn(1, 1, logits.shape[1], generator=noise, dtype=torch.double).to(logits.device)
