"""Probes the first rows of a batch before it is sketched, and checks Jacobian-vector products J s.

J is the Jacobian of the logits, and a tangent s is a direction in the space of the parameters.

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
from qualms.gradients.batch import (
    SAMPLES_INFLUENCE,
    NotBatchable,
    num_samples,
    restore_order,
    strided_groups,
)
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

# The assumed size of a row's largest result if the model cannot be traced.
DEFAULT_RESULT_BYTES = 2**22
# The relative error that is allowed in a central difference, which is wrong at kinks such as ReLU's.
# The noise of a sketch is far larger.
DIFFERENCE_TOLERANCE = 1e-3


# Probing the first rows.


@dataclass
class CheckRows:
    """Rows with their gradients Jᵀv along a random direction v of the logits, by plain autograd.

    J is the Jacobian of the logits. For a tangent s on the parameters, ⟨Jᵀv, s⟩ must equal v·(J s).

    Attributes:
        model: the model, inside `preserve_state`.
        rows: the rows, each as a batch of one row.
        selected: the selected parameters, by name.
        gradients: for each row its gradient, by the parameter's name. An empty list if gradients
            take too much memory; then they are computed again in every iteration.
    """

    model: nn.Module
    rows: list[ModelInput]
    selected: dict[str, Tensor]
    gradients: list[dict[str, Float[Tensor, "1 ..."]]]

    def __iter__(self) -> Iterator[tuple[ModelInput, dict[str, Tensor]]]:
        """Iterate over the rows, each with its gradient along a random direction of the logits."""
        for i, row in enumerate(self.rows):
            # Empty if the gradients take too much memory to keep.
            if self.gradients:
                yield row, self.gradients[i]
                continue
            _, gradient = sample_gradients(self.model, row, self.selected, random_direction)
            release_free_memory()  # memory of the row's graph
            yield row, gradient


@dataclass(frozen=True)
class SketchProbe(ModelProfile):
    """Facts about a model, measured on its first rows; `ModelProfile` has further attributes.

    Attributes:
        counted: the names of the parameters of all layers that count in a score, layer by layer
            from the input on.
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
    max_kept_bytes: int | None = None,
) -> tuple[SketchProbe, CheckRows]:
    """Run up to three rows of a batch by plain autograd, and trace the first of them.

    Args:
        model: the model, inside `preserve_state`.
        model_input: a batch of rows.
        selected: the selected parameters, by name.
        max_kept_bytes: keep the gradients of the rows if they take at most so many bytes; None for
            no limit.

    Returns:
        Facts about the model; and the rows that were run, with their gradients.

    Raises:
        QualmsError: if a second run of a row gives other logits, or no row can use any of the selected
            parameters.
    """
    first = FirstSample.of(model, model_input, selected)
    other_rows = _select_other_rows(model_input)
    # One gradient takes as much memory as the parameters.
    gradient_bytes = sum(p.nbytes for p in selected.values())
    all_bytes = (1 + len(other_rows)) * gradient_bytes
    keeps_gradients = max_kept_bytes is None or all_bytes <= max_kept_bytes
    used_names = set(first.gradient)
    gradients = [first.gradient] if keeps_gradients else []
    if not keeps_gradients:
        first = replace(first, gradient={})  # frees the gradient
    for row in other_rows:
        logits, gradient = sample_gradients(model, row, selected, random_direction)
        check_repeatable(model, row, logits)
        used_names |= set(gradient)
        if keeps_gradients:
            gradients.append(gradient)
        # Free its memory before the next row runs, unless the list keeps it.
        del gradient
    if not used_names:
        # An error, unless other rows may use some.
        require_uses_that_vary(model, model_input)
    check_rows = CheckRows(model, [first.rows, *other_rows], selected, gradients)
    probe = _trace_first_row(first, model_input, selected, used_names, model)
    return probe, check_rows


def _select_other_rows(model_input: ModelInput) -> list[ModelInput]:
    """Select two more rows to probe besides row 0: the middle sample's first row, and the last row.

    Fewer if these are row 0 or the same row.
    """
    num_rows = num_samples(model_input.batch)
    first_rows = range(0, num_rows, model_input.rows_per_sample)  # of each sample
    middle = first_rows[len(first_rows) // 2]
    indices = {middle, num_rows - 1} - {0}
    return [model_input.take([index]) for index in sorted(indices)]


def _trace_first_row(
    first: FirstSample,
    model_input: ModelInput,
    selected: dict[str, Tensor],
    used_names: set[str],
    model: nn.Module,
) -> SketchProbe:
    """Trace the first row to find sizes of results, order of layers, and how to check batches.

    Args:
        first: the first row of the batch, with its logits by plain autograd.
        model_input: a batch of rows.
        selected: the selected parameters, by name.
        used_names: the names of the parameters that at least one of the probed rows uses.
        model: the model, inside `preserve_state`.

    Returns:
        The probe. If the first row cannot be traced, the probe is conservative: all selected
        parameters count, and each row is compared with a pass on that row alone.
    """
    num_classes, logits_bytes = first.logits.shape[1], first.logits.nbytes
    trace = partial(record_forward, model, first.rows, selected)
    recorder = attempt("trace the first sample", trace)
    if isinstance(recorder, Fallback):
        return SketchProbe(
            num_classes,
            largest_result=max(DEFAULT_RESULT_BYTES, logits_bytes),
            channels_last=False,
            precision=first.precision,
            counted=list(selected),
            compare_alone=True,
        )
    largest = max(largest_result(recorder.param_uses), logits_bytes)
    order, shapes = recorder.use_order, recorder.shapes
    del recorder  # frees the graph
    return SketchProbe(
        num_classes,
        largest_result=largest,
        channels_last=_can_use_channels_last(model, first, selected),
        precision=first.precision,
        counted=order.relevant(used_names, selected),
        compare_alone=not order.fixed or _mixes_rows(model, model_input, shapes, selected),
    )


def _mixes_rows(
    model: nn.Module,
    model_input: ModelInput,
    shapes_of_one_row: Sequence[Shapes],
    selected: dict[str, Tensor],
) -> bool:
    """Whether the model computes something from several rows at once, such as a maximum over rows.

    The result of such an operation has the same shape in a pass over two rows as over one row.

    Args:
        model: the model, inside `preserve_state`.
        model_input: a batch of rows, of which the first two are run.
        shapes_of_one_row: the names and shapes of the operations in a pass over one row.
        selected: the selected parameters, by name.

    Returns:
        False for a batch of a single row; True if the pass over two rows cannot be traced.
    """
    if num_samples(model_input.batch) == 1:
        return False
    trace = partial(record_forward, model, model_input.take([0, 1]), selected)
    recorder = attempt("trace two samples", trace)
    return isinstance(recorder, Fallback) or collapses_rows(shapes_of_one_row, recorder.shapes)


def _can_use_channels_last(
    model: nn.Module, first: FirstSample, selected: dict[str, Tensor]
) -> bool:
    """Whether forward mode gives the same logits with the images in channels-last format.

    A model that takes views of a convolution's result may fail in that format.

    Args:
        model: the model, inside `preserve_state`.
        first: the first row of a batch, with its logits by plain autograd.
        selected: the selected parameters, by name.
    """
    if not wants_channels_last(first.rows):
        return False
    # Only the logits are compared, so the tangent does not matter; the weights serve as one.
    any_tangent = {name: p.detach() for name, p in selected.items()}

    def compare() -> bool:
        """Run the first row in channels-last format, and compare its logits."""
        z, _ = forward_mode(model, in_channels_last(first.rows), any_tangent)
        return close_logits(z, first.logits, first.precision)

    is_same = attempt("run forward mode in channels-last format", compare)
    return not isinstance(is_same, Fallback) and is_same


# Checking Jacobian-vector products before any of them is used.


def find_jvp_function(probe: SketchProbe, check_rows: CheckRows, tangent: Tangent) -> JvpFunction:
    """Choose the first of `JVP_FUNCTIONS` that agrees with plain autograd on all check rows.

    Args:
        probe: facts about the model, measured on its first rows.
        check_rows: rows with their gradients by plain autograd.
        tangent: the tangent s to check with.

    Returns:
        The function, which computes J s of a batch, with J the Jacobian of the logits.

    Raises:
        QualmsError: if none of the functions agrees.
    """
    reasons: list[str] = []
    for name, function in JVP_FUNCTIONS.items():
        compare = partial(_describe_mismatch, function, probe, check_rows, tangent)
        mismatch = attempt("push a tangent through the model", compare)
        if mismatch is None:
            return function
        reason = mismatch.reason if isinstance(mismatch, Fallback) else mismatch
        reasons.append(f"{name}: {reason}")
    raise QualmsError(
        f"engine='sketch' cannot push tangents through this model ({'; '.join(reasons)}); use "
        "engine='exact'."
    )


def _describe_mismatch(
    function: JvpFunction, probe: SketchProbe, check_rows: CheckRows, tangent: Tangent
) -> str | None:
    """Compare v·(J s) with ⟨Jᵀv, s⟩ for all check rows, for a random direction v of the logits.

    J is the Jacobian of the logits.

    Args:
        function: computes J s.
        probe: facts about the model, measured on its first rows.
        check_rows: rows with Jᵀv by plain autograd.
        tangent: the tangent s.

    Returns:
        A message with the first two values that differ by more than rounding; None if all agree.
    """
    for row, gradient in check_rows:
        z, dz = function(check_rows.model, probe.reformat(row), tangent)
        # `random_direction` gives the v that the gradients of the check rows belong to.
        have = float((random_direction(z).flatten() * dz.double().flatten()).sum())
        want = sum_of_squares = 0.0
        for name, g in gradient.items():
            if name in tangent:
                terms = g.double().flatten() * tangent[name].double().flatten()
                want += float(terms.sum())
                sum_of_squares += float(terms.square().sum())
        is_exact = function is forward_mode
        precision = coarser(dz.dtype, probe.precision)
        tolerance = tolerance_of(precision) if is_exact else DIFFERENCE_TOLERANCE
        # Where terms cancel, rounding errors are relative to the terms, not to their sum.
        magnitude = max(sum_of_squares**0.5, abs(want))
        # `not <=`: NaN counts as a mismatch.
        if not abs(have - want) <= tolerance * magnitude:
            return f"it gives {have:.3g}, plain autograd {want:.3g}"
    return None


@dataclass
class CheckedJvp:
    """How to compute the products J s for one batch, and those with the first tangent s.

    J is the Jacobian of the logits.

    Attributes:
        function: computes J s with all rows at once, or one at a time if rows influence each other.
        first: the logits, and J s for the tangent that the batch was checked with.
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
        function: computes J s of a batch, with J the Jacobian of the logits.
        model: the model, inside `preserve_state`.
        probe: facts about the model, measured on its first rows.
        batches: the batches of rows.
        tangent: the tangent s to check with.
        cache: the cache of the model, which warns the user, once, if rows run one at a time.

    Returns:
        For each batch, how to compute its products J s, and those with `tangent`.
    """

    def run_together(model_input: ModelInput) -> Jvp:
        """Run the rows at once; raise `NotBatchable` if they influence each other."""
        together = function(model, model_input, tangent)
        _require_independent_rows(function, model, probe, model_input, tangent, together)
        return together

    one_by_one = _wrap_in_groups(function, num_groups=None)
    checked: list[CheckedJvp] = []
    for model_input in batches:
        if num_samples(model_input.batch) == 1:
            product = function(model, model_input, tangent)
            checked.append(CheckedJvp(function, product))
            continue
        together = attempt("push a tangent through a batch", partial(run_together, model_input))
        if isinstance(together, Fallback):
            cache.warn_slow(together)
            # If the model itself fails, not the batching, this raises its error.
            product = one_by_one(model, model_input, tangent)
            _require_repeatable_rows(model, model_input)
            checked.append(CheckedJvp(one_by_one, product))
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

    J is the Jacobian of the logits.

    Args:
        function: computes J s of a batch.
        model: the model, inside `preserve_state`.
        probe: facts about the model, measured on its first rows.
        model_input: the batch of rows.
        tangent: the tangent s.
        together: the logits and J s of all rows in one batch.
    """
    precision = together.logits.dtype
    # The model may cast to a coarser dtype than that of its logits.
    if function is forward_mode:
        precision = coarser(precision, probe.precision)
    # One row at a time, or two halves of the batch.
    num_groups = None if probe.compare_alone else 2
    run_in_groups = _wrap_in_groups(function, num_groups)
    in_groups = run_in_groups(model, model_input, tangent)
    # If a row changes from run to run, the other rows are not to blame.
    if probe.compare_alone:
        _require_repeatable_rows(model, model_input)
    is_same = same_products(in_groups, together, precision)
    for i in rows_to_run_alone(num_samples(model_input.batch)):
        alone = function(model, model_input.take([i]), tangent)
        # Slices, as `alone` has an axis of rows.
        in_batch = Jvp(together.logits[i : i + 1], together.derivative[i : i + 1])
        is_same = is_same and same_products(alone, in_batch, precision)
    if not is_same:
        raise NotBatchable(SAMPLES_INFLUENCE)


def same_products(have: Jvp, want: Jvp, precision: torch.dtype) -> bool:
    """Whether two results have equal logits and derivatives, up to rounding in dtype `precision`."""
    if not close_logits(have.logits, want.logits, precision):
        return False
    return close(have.derivative, want.derivative, precision)


def _require_repeatable_rows(model: nn.Module, model_input: ModelInput) -> None:
    """Run each row twice, alone, and raise a QualmsError if the logits differ."""
    for index in range(num_samples(model_input.batch)):
        row = model_input.take([index])
        check_repeatable(model, row, forward_logits(model, row))


def _wrap_in_groups(function: JvpFunction, num_groups: int | None) -> JvpFunction:
    """Wrap a function so that it runs the rows of a batch in several smaller batches.

    Args:
        function: computes the logits of a batch and their derivative along a tangent.
        num_groups: the number of smaller batches; None for one row per batch.
    """

    def run_in_groups(model: nn.Module, model_input: ModelInput, tangent: Tangent) -> Jvp:
        """Run the smaller batches, and put the results back in the order of the rows."""
        num_rows = num_samples(model_input.batch)
        groups = strided_groups(num_rows, num_groups or num_rows)
        products = [function(model, model_input.take(group), tangent) for group in groups]
        logits = restore_order([product.logits for product in products], groups)
        derivative = restore_order([product.derivative for product in products], groups)
        return Jvp(logits, derivative)

    return run_in_groups
