"""What the first samples of a batch show before it is sketched."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxtyping import Float
from torch import Tensor, nn

from qualms.gradients.batch import num_samples
from qualms.gradients.fallback import Fallback, attempt
from qualms.gradients.memory import release_free_memory
from qualms.gradients.model_input import ModelInput, in_channels_last, wants_channels_last
from qualms.gradients.precision import close_logits
from qualms.gradients.single_sample import (
    FirstSample,
    ModelProfile,
    random_direction,
    require_repeatable,
    sample_gradients,
)
from qualms.gradients.sketching.jvp import forward_mode
from qualms.gradients.tracing.param_use import Weights, largest_result
from qualms.gradients.tracing.recorder import Recorder, Shapes, collapses_rows
from qualms.gradients.tracing.traced_forward import require_uses_that_vary, trace_forward

# Taken for the size of the largest result of a row where no result can be seen.
DEFAULT_RESULT_BYTES = 2**22


@dataclass
class CheckRows:
    """Rows whose gradients along a random direction are known from plain autograd.

    Attributes:
        model: inside `preserve_state`.
        rows: the rows, each on its own.
        selected: the parameters that count, by name.
        gradients: of each row, by the parameter's name; empty if they take too much memory, and
            are computed again whenever they are asked for.
    """

    model: nn.Module
    rows: list[ModelInput]
    selected: dict[str, Tensor]
    gradients: list[dict[str, Float[Tensor, "1 ..."]]]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> tuple[ModelInput, dict[str, Tensor]]:
        """A row, and its gradient along a random direction."""
        row = self.rows[i]
        if self.gradients:
            return row, self.gradients[i]
        _, gradient = sample_gradients(self.model, row, self.selected, random_direction)
        release_free_memory()  # that of its graph
        return row, gradient


@dataclass(frozen=True)
class SketchProbe(ModelProfile):
    """What the first rows show of a model.

    Attributes:
        counted: the parameters whose layers count, in the model's order.
        compare_alone: whether the rows of a batch have to be compared with what each gives alone,
            since what they give in halves of the batch may hide that they influence each other.
    """

    counted: list[str]
    compare_alone: bool


def probe_rows(
    model: nn.Module,
    model_input: ModelInput,
    selected: dict[str, Tensor],
    room: int | None = None,
) -> tuple[SketchProbe, CheckRows]:
    """Run a few rows by plain autograd, and trace the first of them.

    Args:
        model: inside `preserve_state`.
        model_input: some rows.
        selected: the parameters that count, by name.
        room: bytes that the gradients of rows may take to be kept; None to keep them.

    Raises:
        QualmsError: if the model is random, or uses none of the selected parameters.
    """
    first = FirstSample.of(model, model_input, selected)
    others = _other_rows(model_input)
    size = sum(p.nbytes for p in selected.values())
    keep = room is None or (1 + len(others)) * size <= room
    used = set(first.gradient)
    gradients = [first.gradient] if keep else []
    if not keep:
        first = replace(first, gradient={})
    for row in others:
        logits, gradient = sample_gradients(model, row, selected, random_direction)
        require_repeatable(model, row, logits)
        used |= set(gradient)
        if keep:
            gradients.append(gradient)
        del gradient
    if not used:
        require_uses_that_vary(model, model_input)
    check_rows = CheckRows(model, [first.rows, *others], selected, gradients)
    return _trace_first(first, model_input, selected, used, model), check_rows


def _other_rows(model_input: ModelInput) -> list[ModelInput]:
    """The sample in the middle and the very last row, each on its own."""
    rows = num_samples(model_input.batch)
    samples = list(range(0, rows, model_input.rows_per_sample))
    numbers = {samples[len(samples) // 2], rows - 1} - {0}
    return [model_input.take([number]) for number in sorted(numbers)]


def _trace_first(
    first: FirstSample,
    model_input: ModelInput,
    selected: dict[str, Tensor],
    used: set[str],
    model: nn.Module,
) -> SketchProbe:
    """Trace the first row: sizes of results, order of layers, and how batches have to be checked.

    Args:
        first: the first row, by plain autograd.
        model_input: some rows.
        selected: the parameters that count, by name.
        used: those that some row uses.
        model: inside `preserve_state`.
    """

    def trace() -> Recorder:
        weights = Weights.of(selected, model.parameters())
        return trace_forward(model, first.rows, weights, None)[1]

    classes, logits_bytes = first.logits.shape[1], first.logits.nbytes
    recorder = attempt("trace the first sample", trace)
    if isinstance(recorder, Fallback):
        largest = max(DEFAULT_RESULT_BYTES, logits_bytes)
        return SketchProbe(classes, largest, False, first.precision, list(selected), True)
    largest = max(largest_result(recorder.param_uses), logits_bytes)
    order, shapes = recorder.use_order, recorder.shapes
    del recorder  # and the graph
    channels_last = _takes_channels_last(model, first, selected)
    alone = not order.fixed or _mixes_rows(model, model_input, shapes, selected)
    counted = order.relevant(used, selected)
    return SketchProbe(classes, largest, channels_last, first.precision, counted, alone)


def _mixes_rows(
    model: nn.Module,
    model_input: ModelInput,
    shapes_of_one: Sequence[Shapes],
    selected: dict[str, Tensor],
) -> bool:
    """Whether the model computes something from several rows at once.

    It shows in the shapes of a pass over two rows beside those of a pass over one.

    Args:
        model: inside `preserve_state`.
        model_input: some rows.
        shapes_of_one: of the operations on one row.
        selected: the parameters that count, by name.
    """
    if num_samples(model_input.batch) == 1:
        return False

    def compare() -> bool:
        weights = Weights.of(selected, model.parameters())
        _, recorder = trace_forward(model, model_input.take([0, 1]), weights, None)
        return collapses_rows(shapes_of_one, recorder.shapes)

    mixes = attempt("trace two samples", compare)
    return isinstance(mixes, Fallback) or mixes


def _takes_channels_last(model: nn.Module, first: FirstSample, selected: dict[str, Tensor]) -> bool:
    """Whether forward mode runs these images in channels-last format, with the same logits.

    Views of what a convolution returns may fail in it.
    """
    if not wants_channels_last(first.rows):
        return False
    weights = {name: p.detach() for name, p in selected.items()}

    def compare() -> bool:
        z, _ = forward_mode(model, in_channels_last(first.rows), weights)
        return close_logits(z, first.logits, first.precision)

    same = attempt("run forward mode in channels-last format", compare)
    return not isinstance(same, Fallback) and same
