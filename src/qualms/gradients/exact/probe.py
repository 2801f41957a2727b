"""A look at the first rows before the work starts: where rows stand inside the model, what one costs, what to trust."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from qualms.errors import QualmsError
from qualms.gradients.exact.by_features import LastProduct
from qualms.gradients.exact.measure import Kind, measure
from qualms.gradients.first_look import NOTHING_USED, FirstLook, FirstRow, random_direction
from qualms.gradients.inputs import Unclear, count, tensors
from qualms.gradients.memory import saved_bytes
from qualms.gradients.precision import close_logits, same_norms
from qualms.gradients.rows import Rows, in_channels_last, wants_channels_last
from qualms.gradients.watch.forward import recorded
from qualms.gradients.watch.meetings import Meeting, TwinPasses, largest_result
from qualms.gradients.watch.pieces import Outer, Piece
from qualms.gradients.watch.record import Recorder
from qualms.gradients.watch.weights import UseOrder, Weights

CACHED_BYTES = 2**22
FEWEST = 4  # rows at once: with fewer, a pass costs more for each than it would save
DOUBLE = 8  # bytes of an entry of the cotangents


@dataclass(frozen=True)
class Probe(FirstLook):
    """What the first rows tell when they are watched."""

    twins: TwinPasses | None  # None if there was only one row
    weights: Weights
    use_order: UseOrder  # of the parameters, in the first row's forward pass
    row_bytes: int  # kept by autograd for one row
    pieces: list[Piece]
    itemsize: int
    last_product: LastProduct | None

    @classmethod
    def of(cls, model: nn.Module, on: Rows, selected: dict[str, Tensor]) -> "Probe | Exception":
        """Runs the first one or two rows, by plain autograd and watched; the reason if the two do not agree."""
        first = FirstRow.of(model, on, selected)
        if not first.gradient:
            raise QualmsError(NOTHING_USED)
        # Whatever goes wrong from here on is the recorder's fault, not the model's: plain autograd has managed.
        try:
            return cls._watch(model, on, selected, first)
        except Exception as error:
            return error

    @classmethod
    def _watch(cls, model: nn.Module, on: Rows, selected: dict[str, Tensor], first: FirstRow) -> "Probe":
        expected = {name: float(g.square().sum()) for name, g in first.gradient.items()}
        probe, meetings = cls._watch_one(model, first, selected, expected)
        if count(on.batch) == 1:
            return probe
        second = next((i for i in range(1, count(on.batch)) if _differ(on, 0, i)), None)
        if second is None:
            raise Unclear("all inputs are the same")
        pair = probe.formatted(on.take([0, second]))
        _, two = recorded(model, pair, probe.weights, None)
        twins = TwinPasses(meetings, two.meetings)
        z, both = recorded(model, pair, probe.weights, twins)
        lone = torch.cat([random_direction(z), torch.zeros_like(random_direction(z))], dim=1)
        found = measure(z, lone, both.pieces, probe.weights, 2, "l2")
        if not same_norms({name: value[:1] for name, value in found.items()}, expected, probe.precision):
            raise Unclear("an input's gradient depends on what else is in the batch")
        return replace(probe, twins=twins)

    @classmethod
    def _watch_one(
        cls, model: nn.Module, first: FirstRow, selected: dict[str, Tensor], expected: dict[str, float]
    ) -> "tuple[Probe, list[Meeting]]":
        channels_last = wants_channels_last(first.rows)
        try:
            weights, z, one, kept = _first_row(model, first.rows, selected, channels_last)
        except Exception:
            # `view` on what a convolution returns needs the plain memory format.
            channels_last = False
            weights, z, one, kept = _first_row(model, first.rows, selected, channels_last)
        found = measure(z, random_direction(z), one.pieces, weights, 1, "l2")
        same = close_logits(z.detach(), first.logits, first.precision)
        if not same or not same_norms(found, expected, first.precision):
            raise Unclear("the recorded gradient is not plain autograd's")
        probe = cls(
            classes=z.shape[1],
            largest_result=largest_result(one.meetings),
            channels_last=channels_last,
            precision=first.precision,
            twins=None,
            weights=weights,
            use_order=one.use_order,
            row_bytes=kept,
            pieces=one.pieces,
            itemsize=z.element_size(),
            last_product=LastProduct.of(z, one.pieces, weights),
        )
        return probe, one.meetings

    def by_features(self, budget: int, per_input: int, kind: Kind, directions: Sequence[str]) -> bool:
        """Whether the gradients of all classes come cheaper from those of the last layer's features, and fit."""
        last = self.last_product
        if last is None or kind != "l2" or "classes" not in directions or not last.pays(per_input):
            return False
        return self._affordable(budget, per_input, kind, True) * per_input >= FEWEST

    def inputs_in(self, budget: int, per_input: int, kind: Kind, by_features: bool = False) -> int:
        """How many inputs at once keep the work within `budget` bytes."""
        affordable = self._affordable(budget, per_input, kind, by_features)
        if self.weights.device.type == "cpu":  # beyond this size a tensor leaves the cache, and passes get slower
            affordable = min(affordable, CACHED_BYTES // max(1, self.largest_result * per_input))
        return max(1, affordable)

    def _affordable(self, budget: int, per_input: int, kind: Kind, by_features: bool) -> int:
        outers = [p.gradient for p in self.pieces if isinstance(p.gradient, Outer)]
        numels = [p.gradient.numel for p in self.pieces]
        passes = self.classes + 1 if kind == "gram" else 1
        rows = per_input * self.row_bytes * (1 + passes)
        shared = self.itemsize * sum(outer.held(per_input, self.classes) for outer in outers)
        written = self.itemsize * max(numels, default=0) * (self.classes if kind == "gram" else 2)
        if by_features and self.last_product is not None:
            cotangents = self.itemsize * self.last_product.held(per_input)
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


def _differ(on: Rows, i: int, j: int) -> bool:
    return on.embedding_noise is not None or any(not torch.equal(t[i], t[j]) for t in tensors(on.batch))
