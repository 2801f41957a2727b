"""What the first samples of a batch show before it is sketched, and what its products must pass.

- For a few rows v·(J s) must be ⟨Jᵀv, s⟩, with Jᵀv from plain autograd.
- The J s of a batch must not change when its rows run in other batches. Batches that fail run one
  row at a time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn

from qualms.errors import QualmsError
from qualms.gradients.batch import NotBatchable, num_samples, restore_order, strided_groups
from qualms.gradients.fallback import Fallback, attempt
from qualms.gradients.memory import release_free_memory
from qualms.gradients.model_input import (
    ModelInput,
    forward_logits,
    in_channels_last,
    rows_to_run_alone,
    wants_channels_last,
)
from qualms.gradients.plan_cache import PlanCache
from qualms.gradients.precision import close, close_logits, coarser, tolerance_of
from qualms.gradients.single_sample import (
    FirstSample,
    ModelProfile,
    check_repeatable,
    random_direction,
    sample_gradients,
)
from qualms.gradients.sketching.jvp import JVP_FUNCTIONS, Jvp, JvpFunction, forward_mode
from qualms.gradients.sketching.tangents import Tangent
from qualms.gradients.tracing.param_use import largest_result
from qualms.gradients.tracing.recorder import Shapes, collapses_rows
from qualms.gradients.tracing.traced_forward import record_forward, require_uses_that_vary

# Taken for the size of the largest result of a row where no result can be seen.
DEFAULT_RESULT_BYTES = 2**22
# Relative error allowed to a central difference, which steps over kinks: far below the noise of a
# sketch.
DIFFERENCE_TOLERANCE = 1e-3


# What the first samples show.


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

    def __iter__(self) -> Iterator[tuple[ModelInput, dict[str, Tensor]]]:
        """Each row, with its gradient along a random direction."""
        for number, row in enumerate(self.rows):
            if self.gradients:
                yield row, self.gradients[number]
                continue
            _, gradient = sample_gradients(self.model, row, self.selected, random_direction)
            release_free_memory()  # that of its graph
            yield row, gradient


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
        check_repeatable(model, row, logits)
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
    classes, logits_bytes = first.logits.shape[1], first.logits.nbytes
    trace = partial(record_forward, model, first.rows, selected)
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
    trace = partial(record_forward, model, model_input.take([0, 1]), selected)
    recorder = attempt("trace two samples", trace)
    return isinstance(recorder, Fallback) or collapses_rows(shapes_of_one, recorder.shapes)


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


# Checks of Jacobian-vector products, before any of them is trusted.


def find_jvp_function(probe: SketchProbe, check_rows: CheckRows, tangent: Tangent) -> JvpFunction:
    """The first function that gives plain autograd's derivative for all check rows.

    Args:
        probe: what is known of the model.
        check_rows: rows with their gradients.
        tangent: whose products are compared.

    Raises:
        QualmsError: if none does.
    """
    reasons: list[str] = []
    for name, function in JVP_FUNCTIONS.items():
        compare = partial(_difference, function, probe, check_rows, tangent)
        why = attempt("push a tangent through the model", compare)
        if why is None:
            return function
        reasons.append(f"{name}: {why.reason if isinstance(why, Fallback) else why}")
    raise QualmsError(
        f"engine='sketch' cannot push tangents through this model ({'; '.join(reasons)}); use "
        "engine='exact'."
    )


def _difference(
    function: JvpFunction, probe: SketchProbe, check_rows: CheckRows, tangent: Tangent
) -> str | None:
    """How v·(J s) of a row differs from ⟨Jᵀv, s⟩, or None if they agree for all check rows.

    Args:
        function: gives J s.
        probe: what is known of the model.
        check_rows: rows with Jᵀv by plain autograd.
        tangent: s.
    """
    for row, gradient in check_rows:
        z, dz = function(check_rows.model, probe.reformat(row), tangent)
        have = float((random_direction(z).flatten() * dz.double().flatten()).sum())
        want = square = 0.0
        for name, g in gradient.items():
            if name in tangent:
                terms = g.double().flatten() * tangent[name].double().flatten()
                want += float(terms.sum())
                square += float(terms.square().sum())
        tolerance = DIFFERENCE_TOLERANCE
        if function is forward_mode:
            tolerance = tolerance_of(coarser(dz.dtype, probe.precision))
        size = max(square**0.5, abs(want))
        if not abs(have - want) <= tolerance * size:
            return f"{have:.3g} where plain autograd gives {want:.3g}"
    return None


@dataclass
class CheckedJvp:
    """A function that serves the rows of one batch, and what it gives for the first tangent.

    Attributes:
        function: takes all rows at once, or one at a time where they influence each other.
        first: the products with the tangent that they were checked with.
    """

    function: JvpFunction
    first: Jvp


def check_batches(
    function: JvpFunction,
    model: nn.Module,
    probe: SketchProbe,
    batches: Sequence[ModelInput],
    tangent: Tangent,
    cache: PlanCache,
) -> list[CheckedJvp]:
    """How each batch gets its products: all rows at once, unless they influence each other.

    Args:
        function: gives the products of a batch.
        model: inside `preserve_state`.
        probe: what is known of the model.
        batches: the rows that run together.
        tangent: what they are checked with.
        cache: where the user is warned that rows run one at a time.
    """

    def run_together(model_input: ModelInput) -> Jvp:
        together = function(model, model_input, tangent)
        _require_independent_rows(function, model, probe, model_input, tangent, together)
        return together

    one_by_one = _in_groups(function)
    checked: list[CheckedJvp] = []
    for model_input in batches:
        if num_samples(model_input.batch) == 1:
            checked.append(CheckedJvp(function, function(model, model_input, tangent)))
            continue
        found = attempt("push a tangent through a batch", partial(run_together, model_input))
        if isinstance(found, Fallback):
            # If the model itself is at fault, a row on its own will show it.
            cache.warn_slow(found)
            first = one_by_one(model, model_input, tangent)
            _require_repeatable_rows(model, model_input)
            checked.append(CheckedJvp(one_by_one, first))
        else:
            checked.append(CheckedJvp(function, found))
    return checked


def _require_independent_rows(
    function: JvpFunction,
    model: nn.Module,
    probe: SketchProbe,
    model_input: ModelInput,
    tangent: Tangent,
    together: Jvp,
) -> None:
    """Raise `NotBatchable` if rows give something else in other batches than all together.

    Args:
        function: gives the products of a batch.
        model: inside `preserve_state`.
        probe: what is known of the model.
        model_input: the rows.
        tangent: s.
        together: the products of all rows in one batch.
    """
    precision = together.logits.dtype
    if function is forward_mode:
        precision = coarser(precision, probe.precision)
    groups = None if probe.compare_alone else 2
    apart = _in_groups(function, groups)(model, model_input, tangent)
    if probe.compare_alone:
        _require_repeatable_rows(model, model_input)
    same = same_products(apart, together, precision)
    for row in rows_to_run_alone(num_samples(model_input.batch)):
        alone = function(model, model_input.take([row]), tangent)
        of_row = Jvp(together.logits[row : row + 1], together.derivative[row : row + 1])
        same = same and same_products(alone, of_row, precision)
    if not same:
        raise NotBatchable("the inputs of a batch influence each other")


def same_products(have: Jvp, want: Jvp, precision: torch.dtype) -> bool:
    """Whether logits and products are the same but for rounding in a type of this precision."""
    if not close_logits(have.logits, want.logits, precision):
        return False
    return close(have.derivative, want.derivative, precision)


def _require_repeatable_rows(model: nn.Module, model_input: ModelInput) -> None:
    """Raise an error if a row on its own gives other logits the second time."""
    for number in range(num_samples(model_input.batch)):
        row = model_input.take([number])
        check_repeatable(model, row, forward_logits(model, row))


def _in_groups(function: JvpFunction, groups: int | None = None) -> JvpFunction:
    """The same products, rows dealt into several batches.

    Args:
        function: gives the products of a batch.
        groups: how many batches; None for each row on its own.
    """

    def run(model: nn.Module, model_input: ModelInput, tangent: Tangent) -> Jvp:
        rows = num_samples(model_input.batch)
        dealt = strided_groups(rows, groups or rows)
        parts = [function(model, model_input.take(group), tangent) for group in dealt]
        logits = restore_order([part.logits for part in parts], dealt)
        return Jvp(logits, restore_order([part.derivative for part in parts], dealt))

    return run
