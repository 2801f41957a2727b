"""Checks of Jacobian-vector products, before any of them is trusted.

- For a few rows v·(J s) must be ⟨Jᵀv, s⟩, with Jᵀv from plain autograd.
- The J s of a batch must not change when its rows run in other batches. Batches that fail run one
  row at a time."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from qualms.errors import QualmsError
from qualms.gradients.batch import NotBatchable, num_samples, restore_order, strided_groups
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

    def compare(function: JvpFunction) -> str | None:
        for i in range(len(check_rows)):
            row, gradient = check_rows[i]
            why = _difference(function, probe, row, gradient, check_rows.model, tangent)
            if why is not None:
                return why
        return None

    reasons: list[str] = []
    for name, function in JVP_FUNCTIONS.items():
        why = attempt("push a tangent through the model", partial(compare, function))
        if why is None:
            return function
        reasons.append(f"{name}: {why.reason if isinstance(why, Fallback) else why}")
    raise QualmsError(
        f"engine='sketch' cannot push tangents through this model ({'; '.join(reasons)}); use "
        "engine='exact'."
    )


def _difference(
    function: JvpFunction,
    probe: SketchProbe,
    row: ModelInput,
    gradient: Tangent,
    model: nn.Module,
    tangent: Tangent,
) -> str | None:
    """How v·(J s) of one row differs from ⟨Jᵀv, s⟩, or None if they agree.

    Args:
        function: gives J s.
        probe: what is known of the model.
        row: a single row.
        gradient: Jᵀv by plain autograd.
        model: inside `preserve_state`.
        tangent: s.
    """
    z, dz = function(model, probe.reformat(row), tangent)
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

    one_by_one = in_groups(function)
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
    groups = None if probe.compare_alone else 2
    apart = in_groups(function, groups)(model, model_input, tangent)
    if probe.compare_alone:
        require_repeatable_rows(model, model_input)
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
    for number in range(num_samples(model_input.batch)):
        row = model_input.take([number])
        require_repeatable(model, row, forward_logits(model, row))


def in_groups(function: JvpFunction, groups: int | None = None) -> JvpFunction:
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
