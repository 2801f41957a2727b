"""Checks of Jacobian-vector products, before any of them is trusted.

- For a few rows v·(J s) must be ⟨Jᵀv, s⟩, with Jᵀv from plain autograd.
- The J s of a batch must not change when its rows run in other batches. Batches that fail run one
  row at a time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from qualms.errors import QualmsError
from qualms.gradients.batch import NotBatchable, num_samples
from qualms.gradients.fallback import Fallback, attempt
from qualms.gradients.model_input import ModelInput, forward_logits, some_alone
from qualms.gradients.plan_cache import PlanCache
from qualms.gradients.precision import close, close_logits, coarser, tolerance_of
from qualms.gradients.single_sample import random_direction, require_repeatable
from qualms.gradients.sketching.jvp import JVP_FUNCTIONS, Jvp, JvpFunction, forward_mode
from qualms.gradients.sketching.sketch_probe import CheckRows, SketchProbe
from qualms.gradients.sketching.tangents import Tangent

# Relative error allowed to a central difference, which steps over kinks: far below the noise of a
# sketch.
DIFFERENCE_TOLERANCE = 1e-3


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
        why = _find_difference(function, probe, check_rows, tangent)
        if why is None:
            return function
        reasons.append(f"{name}: {why}")
    raise QualmsError(
        f"engine='sketch' cannot push tangents through this model ({'; '.join(reasons)}); use "
        "engine='exact'."
    )


def _find_difference(
    function: JvpFunction,
    probe: SketchProbe,
    check_rows: CheckRows,
    tangent: Tangent,
) -> str | None:
    """How a function's products differ from plain autograd's, or why it fails; None if they agree.

    Args:
        function: what is checked.
        probe: what is known of the model.
        check_rows: rows with their gradients.
        tangent: whose products are compared.
    """

    def compare() -> str | None:
        for i in range(len(check_rows)):
            why = _difference_of_row(function, probe, check_rows, i, tangent)
            if why is not None:
                return why
        return None

    why = attempt("push a tangent through the model", compare)
    return why.reason if isinstance(why, Fallback) else why


def _difference_of_row(
    function: JvpFunction,
    probe: SketchProbe,
    check_rows: CheckRows,
    i: int,
    tangent: Tangent,
) -> str | None:
    """How v·(J s) of one row differs from ⟨Jᵀv, s⟩, or None.

    Args:
        function: what is checked.
        probe: what is known of the model.
        check_rows: rows with their gradients.
        i: the number of the row.
        tangent: s.
    """
    row, gradient = check_rows[i]
    z, dz = function(check_rows.model, probe.reformat(row), tangent)
    have = float((random_direction(z).flatten() * dz.double().flatten()).sum())
    want = square = 0.0
    for name, g in gradient.items():
        if name not in tangent:
            continue
        terms = g.double().flatten() * tangent[name].double().flatten()
        want += float(terms.sum())
        square += float(terms.square().sum())
    tolerance = DIFFERENCE_TOLERANCE
    if function is forward_mode:
        tolerance = tolerance_of(coarser(dz.dtype, probe.precision))
    size = max(square**0.5, abs(want))
    if abs(have - want) <= tolerance * size:
        return None
    return f"{have:.3g} where plain autograd gives {want:.3g}"


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

    def run_together(model_input: ModelInput) -> CheckedJvp:
        together = function(model, model_input, tangent)
        if num_samples(model_input.batch) > 1:
            _require_independent_rows(function, model, probe, model_input, tangent, together)
        return CheckedJvp(function, together)

    one_by_one = one_row_at_a_time(function)
    checked: list[CheckedJvp] = []
    for model_input in batches:
        if num_samples(model_input.batch) == 1:
            checked.append(run_together(model_input))
            continue
        found = attempt("push a tangent through a batch", partial(run_together, model_input))
        if isinstance(found, Fallback):
            # If the model itself is at fault, a row on its own will show it.
            cache.warn_slow(found)
            first = one_by_one(model, model_input, tangent)
            require_repeatable_rows(model, model_input)
            found = CheckedJvp(one_by_one, first)
        checked.append(found)
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
    if probe.compare_alone:
        apart = one_row_at_a_time(function)(model, model_input, tangent)
        require_repeatable_rows(model, model_input)
    else:
        apart = in_halves(function)(model, model_input, tangent)
    same = same_products(apart, together, precision)
    for row in some_alone(num_samples(model_input.batch)):
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


def require_repeatable_rows(model: nn.Module, model_input: ModelInput) -> None:
    """Raise an error if a row on its own gives other logits the second time."""
    for row in _single_rows(model_input):
        require_repeatable(model, row, forward_logits(model, row))


def one_row_at_a_time(function: JvpFunction) -> JvpFunction:
    """The same products, each row in a batch of its own."""

    def run(model: nn.Module, model_input: ModelInput, tangent: Tangent) -> Jvp:
        found = [function(model, row, tangent) for row in _single_rows(model_input)]
        logits = torch.cat([one.logits for one in found])
        return Jvp(logits, torch.cat([one.derivative for one in found]))

    return run


def in_halves(function: JvpFunction) -> JvpFunction:
    """The same products, every second row in one batch and the others in another."""

    def run(model: nn.Module, model_input: ModelInput, tangent: Tangent) -> Jvp:
        rows = num_samples(model_input.batch)
        whole: Jvp | None = None
        for parity in (0, 1):
            part = model_input.take(list(range(parity, rows, 2)))
            half = function(model, part, tangent)
            if whole is None:
                shape = (rows, half.logits.shape[1])
                whole = Jvp(half.logits.new_empty(shape), half.derivative.new_empty(shape))
            whole.logits[parity::2] = half.logits
            whole.derivative[parity::2] = half.derivative
        assert whole is not None
        return whole

    return run


def _single_rows(model_input: ModelInput) -> Iterator[ModelInput]:
    for row in range(num_samples(model_input.batch)):
        yield model_input.take([row])
