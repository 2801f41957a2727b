"""Probes the first rows of a batch before it is sketched, and checks Jacobian-vector products.

- For a few rows, v·(J s) must equal ⟨Jᵀv, s⟩, with Jᵀv from plain autograd.
- The J s of a batch must not change when its rows run in other batches. If it does, the rows of the
  batch run one at a time.
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

# Assumed size of a row's largest result where the model cannot be traced.
DEFAULT_RESULT_BYTES = 2**22
# Relative error allowed in a central difference, which is wrong at kinks such as ReLU's; far below
# the noise of a sketch.
DIFFERENCE_TOLERANCE = 1e-3


# Probing the first rows.


@dataclass
class CheckRows:
    """Rows with their gradients along a random direction of the logits, by plain autograd.

    A direction v of the logits has the gradient Jᵀv, to compare with a tangent's product J s.

    Attributes:
        model: the model, inside `preserve_state`.
        rows: the rows, each as a batch of one row.
        selected: the selected parameters, by name.
        gradients: the gradients of each row, by the parameter's name. Empty if they take too much
            memory; then they are computed again in every iteration.
    """

    model: nn.Module
    rows: list[ModelInput]
    selected: dict[str, Tensor]
    gradients: list[dict[str, Float[Tensor, "1 ..."]]]

    def __iter__(self) -> Iterator[tuple[ModelInput, dict[str, Tensor]]]:
        """Iterate over the rows, each with its gradient along a random direction of the logits."""
        for number, row in enumerate(self.rows):
            if self.gradients:
                yield row, self.gradients[number]
                continue
            _, gradient = sample_gradients(self.model, row, self.selected, random_direction)
            release_free_memory()  # memory of the row's graph
            yield row, gradient


@dataclass(frozen=True)
class SketchProbe(ModelProfile):
    """What the first rows show of a model; `ModelProfile` has further attributes.

    Attributes:
        counted: names of the parameters whose layers count in a score.
        compare_alone: whether each row of a batch has to be checked against a pass on that row
            alone. Otherwise passes on two halves of the batch are enough to show whether rows
            influence each other.
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
        model: the model, inside `preserve_state`.
        model_input: a batch of rows.
        selected: the selected parameters, by name.
        room: limit in bytes for keeping the rows' gradients; None for no limit.

    Returns:
        What the rows show of the model, and the rows that products are checked on.

    Raises:
        QualmsError: if the model gives other logits the second time, or uses none of the selected
            parameters.
    """
    first = FirstSample.of(model, model_input, selected)
    others = _other_rows(model_input)
    # One gradient takes as much memory as the parameters.
    gradient_bytes = sum(p.nbytes for p in selected.values())
    keep = room is None or (1 + len(others)) * gradient_bytes <= room
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
    """Select the first row of the middle sample and the very last row, without row 0."""
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
    """Trace the first row to find sizes of results, order of layers, and how to check batches.

    Args:
        first: logits and gradients of the first row, by plain autograd.
        model_input: a batch of rows.
        selected: the selected parameters, by name.
        used: names of the parameters that at least one of the check rows uses.
        model: the model, inside `preserve_state`.

    Returns:
        The probe. If the first row cannot be traced, the probe is conservative: all selected
        parameters count, and each row is compared with a pass on that row alone.
    """
    classes, logits_bytes = first.logits.shape[1], first.logits.nbytes
    trace = partial(record_forward, model, first.rows, selected)
    recorder = attempt("trace the first sample", trace)
    if isinstance(recorder, Fallback):
        largest = max(DEFAULT_RESULT_BYTES, logits_bytes)
        return SketchProbe(
            classes,
            largest,
            channels_last=False,
            precision=first.precision,
            counted=list(selected),
            compare_alone=True,
        )
    largest = max(largest_result(recorder.param_uses), logits_bytes)
    order, shapes = recorder.use_order, recorder.shapes
    del recorder  # frees the graph
    channels_last = _takes_channels_last(model, first, selected)
    compare_alone = not order.fixed or _mixes_rows(model, model_input, shapes, selected)
    counted = order.relevant(used, selected)
    return SketchProbe(classes, largest, channels_last, first.precision, counted, compare_alone)


def _mixes_rows(
    model: nn.Module,
    model_input: ModelInput,
    shapes_of_one: Sequence[Shapes],
    selected: dict[str, Tensor],
) -> bool:
    """Whether the model computes something from several rows at once, such as a maximum.

    The result of such an operation has the same shape in a pass over two rows as in one over one.

    Args:
        model: the model, inside `preserve_state`.
        model_input: a batch of rows, of which the first two are run.
        shapes_of_one: names and shapes of the operations in a pass on one row.
        selected: the selected parameters, by name.

    Returns:
        True also if the pass over two rows cannot be traced.
    """
    if num_samples(model_input.batch) == 1:
        return False
    trace = partial(record_forward, model, model_input.take([0, 1]), selected)
    recorder = attempt("trace two samples", trace)
    return isinstance(recorder, Fallback) or collapses_rows(shapes_of_one, recorder.shapes)


def _takes_channels_last(model: nn.Module, first: FirstSample, selected: dict[str, Tensor]) -> bool:
    """Whether forward mode gives the same logits with the images in channels-last format.

    A model that takes views of a convolution's result may fail in that format.
    """
    if not wants_channels_last(first.rows):
        return False
    # Only the logits are compared, so any tangent will do: the weights are at hand.
    weights = {name: p.detach() for name, p in selected.items()}

    def compare() -> bool:
        """Run the first row in channels-last format, and compare its logits."""
        z, _ = forward_mode(model, in_channels_last(first.rows), weights)
        return close_logits(z, first.logits, first.precision)

    same = attempt("run forward mode in channels-last format", compare)
    return not isinstance(same, Fallback) and same


# Checking Jacobian-vector products before any of them is used.


def find_jvp_function(probe: SketchProbe, check_rows: CheckRows, tangent: Tangent) -> JvpFunction:
    """Choose the first of `JVP_FUNCTIONS` that agrees with plain autograd on all check rows.

    Args:
        probe: what the first rows show of the model.
        check_rows: rows with their gradients by plain autograd.
        tangent: the tangent s to check with.

    Returns:
        The function, which computes J s of a batch.

    Raises:
        QualmsError: if none of the functions agrees.
    """
    reasons: list[str] = []
    for name, function in JVP_FUNCTIONS.items():
        compare = partial(_describe_mismatch, function, probe, check_rows, tangent)
        why = attempt("push a tangent through the model", compare)
        if why is None:
            return function
        reasons.append(f"{name}: {why.reason if isinstance(why, Fallback) else why}")
    raise QualmsError(
        f"engine='sketch' cannot push tangents through this model ({'; '.join(reasons)}); use "
        "engine='exact'."
    )


def _describe_mismatch(
    function: JvpFunction, probe: SketchProbe, check_rows: CheckRows, tangent: Tangent
) -> str | None:
    """Compare v·(J s) with ⟨Jᵀv, s⟩ for all check rows, for a random direction v of the logits.

    Args:
        function: computes J s.
        probe: what the first rows show of the model.
        check_rows: rows with Jᵀv by plain autograd.
        tangent: the tangent s.

    Returns:
        A message with the first two values that differ by more than rounding; None if all agree.
    """
    for row, gradient in check_rows:
        z, dz = function(check_rows.model, probe.reformat(row), tangent)
        have = float((random_direction(z).flatten() * dz.double().flatten()).sum())
        want = square = 0.0
        for name, g in gradient.items():
            if name in tangent:
                terms = g.double().flatten() * tangent[name].double().flatten()
                want += float(terms.sum())
                # Bounds rounding where terms cancel.
                square += float(terms.square().sum())
        tolerance = DIFFERENCE_TOLERANCE
        if function is forward_mode:
            tolerance = tolerance_of(coarser(dz.dtype, probe.precision))
        magnitude = max(square**0.5, abs(want))
        if not abs(have - want) <= tolerance * magnitude:
            return f"it gives {have:.3g}, plain autograd {want:.3g}"
    return None


@dataclass
class CheckedJvp:
    """How to compute J s for one batch, and the products for the first tangent.

    Attributes:
        function: computes J s with all rows at once, or one at a time if rows influence each other.
        first: logits and products with the tangent that the batch was checked with.
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
    """Check each batch, and decide whether its rows can run at once or must run one at a time.

    Args:
        function: computes J s of a batch.
        model: the model, inside `preserve_state`.
        probe: what the first rows show of the model.
        batches: the batches of rows.
        tangent: the tangent s to check with.
        cache: cache that warns the user, once, if rows run one at a time.

    Returns:
        For each batch, how to compute its products, and those with `tangent`.
    """

    def run_together(model_input: ModelInput) -> Jvp:
        """Run the rows at once; raises NotBatchable if they influence each other."""
        together = function(model, model_input, tangent)
        _require_independent_rows(function, model, probe, model_input, tangent, together)
        return together

    one_by_one = _in_groups(function)
    checked: list[CheckedJvp] = []
    for model_input in batches:
        if num_samples(model_input.batch) == 1:
            checked.append(CheckedJvp(function, function(model, model_input, tangent)))
            continue
        together = attempt("push a tangent through a batch", partial(run_together, model_input))
        if isinstance(together, Fallback):
            # If the model itself fails, not the batching, the rows one by one raise its error.
            cache.warn_slow(together)
            first = one_by_one(model, model_input, tangent)
            _require_repeatable_rows(model, model_input)
            checked.append(CheckedJvp(one_by_one, first))
        else:
            checked.append(CheckedJvp(function, together))
    return checked


def _require_independent_rows(
    function: JvpFunction,
    model: nn.Module,
    probe: SketchProbe,
    model_input: ModelInput,
    tangent: Tangent,
    together: Jvp,
) -> None:
    """Raise `NotBatchable` if logits or J s of a row depend on the batch that the row runs in.

    Args:
        function: computes J s of a batch.
        model: the model, inside `preserve_state`.
        probe: what the first rows show of the model.
        model_input: the batch of rows.
        tangent: the tangent s.
        together: logits and J s of all rows in one batch.
    """
    precision = together.logits.dtype
    if function is forward_mode:
        precision = coarser(precision, probe.precision)
    # One row at a time, or two halves of the batch.
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
        raise NotBatchable("the samples of a batch influence each other")


def same_products(have: Jvp, want: Jvp, precision: torch.dtype) -> bool:
    """Whether logits and J s are equal up to rounding in the type `precision`."""
    if not close_logits(have.logits, want.logits, precision):
        return False
    return close(have.derivative, want.derivative, precision)


def _require_repeatable_rows(model: nn.Module, model_input: ModelInput) -> None:
    """Run each row twice, alone, and raise QualmsError if the logits differ."""
    for number in range(num_samples(model_input.batch)):
        row = model_input.take([number])
        check_repeatable(model, row, forward_logits(model, row))


def _in_groups(function: JvpFunction, groups: int | None = None) -> JvpFunction:
    """Wrap a function so that it runs the rows in several smaller batches.

    Args:
        function: computes J s of a batch.
        groups: number of batches that the rows are split into; None for one row per batch.
    """

    def run(model: nn.Module, model_input: ModelInput, tangent: Tangent) -> Jvp:
        """Run the smaller batches, and put logits and J s back in the order of the rows."""
        rows = num_samples(model_input.batch)
        dealt = strided_groups(rows, groups or rows)
        parts = [function(model, model_input.take(group), tangent) for group in dealt]
        logits = restore_order([part.logits for part in parts], dealt)
        return Jvp(logits, restore_order([part.derivative for part in parts], dealt))

    return run
