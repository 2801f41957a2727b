"""Traces a forward pass: where each parameter meets the input, and what its gradient is made of.

A function mode sees every operation of the forward pass, so functional calls, modules called twice,
tied weights, attention, recurrent networks and exported graphs all look alike. It knows two kinds
of tensors:

- *params*: a parameter, or something computed from parameters alone (a normalized weight, a slice,
  an expanded token);
- *active*: something that depends on the input.

An operation on params alone is run and its result is one of them. One that takes both kinds is a
*use* of parameters: there a rule (`rules/`) says how the parameter's gradient follows from a
cotangent, and adds a `GradFactor`. What no rule covers is run one row at a time with copies of the
parameter, which is exact for any operation. Where no axis counts the rows, the sample of each entry
is found afterwards (`sample_ids.py`). Where rows cannot be separated at all, `NotBatchable` is
raised; what a function mode cannot see is caught by `require_no_bypass` and by the checks of
`gradients/verify.py`.
"""

import inspect
import types
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from qualms.gradients.batch import NotBatchable
from qualms.gradients.fallback import error_note
from qualms.gradients.function_modes import CallMode, run_function
from qualms.gradients.nested import each_tensor, tensors_in
from qualms.gradients.tracing.factors import GradFactor
from qualms.gradients.tracing.op_call import OpCall
from qualms.gradients.tracing.op_effects import (
    bare_name,
    full_name,
    ignores_shape,
    reads_values,
    shape_depends_on_values,
    without_override_checks,
    writes,
)
from qualms.gradients.tracing.param_use import (
    OpKey,
    ParamUse,
    Reach,
    TracePair,
    UseOrder,
    Weights,
    roots,
)
from qualms.gradients.tracing.rules.table import UNBATCHED_RULES, find_rule
from qualms.gradients.tracing.sample_ids import UnbatchedOp

# An operation's name, and the shapes of what it reads and of its results.
Shapes = tuple[str, tuple[torch.Size, ...], tuple[torch.Size, ...]]


class Recorder(CallMode):
    """A function mode that traces one forward pass.

    Args:
        weights: the parameters, as leaves.
        inputs: the tensors of the batch.
        rows: number of rows of the batch.
        rows_per_sample: how many of them belong to each sample.
        trace_pair: the same pass on one row and on two; None in these passes themselves.

    Attributes:
        factors: what each use of a parameter adds to its gradient.
        unbatched_ops: operations whose entries' samples are still to be found.
        param_uses: all uses of parameters, without a `trace_pair` only.
        shapes: of all operations on something active, without a `trace_pair` only.
        reach: which nodes of the graph may be entered by an operation's result only.
        first_use: names of the parameters in the order of their first use.
        without_rule: names of parameters with a use that no rule covers.
        reads_values: whether something active becomes a Python number or an array.
        shapes_vary: whether the values of something active decide a shape.
    """

    def __init__(
        self,
        weights: Weights,
        inputs: Sequence[Tensor],
        rows: int,
        rows_per_sample: int = 1,
        trace_pair: TracePair | None = None,
    ) -> None:
        """Args: see the class."""
        super().__init__()
        self.weights = weights
        self.rows = rows
        self.rows_per_sample = rows_per_sample
        self.trace_pair = trace_pair
        self.factors: list[GradFactor] = []
        self.unbatched_ops: list[UnbatchedOp] = []
        self.param_uses: list[ParamUse] = []
        self.shapes: list[Shapes] = []
        self.reach = Reach()
        self.first_use: list[str] = []
        self.without_rule: set[str] = set()
        self.reads_values = False
        self.shapes_vary = False
        self._occurrences: Counter[OpKey] = Counter()
        self._params: dict[int, Tensor] = {id(leaf): leaf for leaf in weights.leaves.values()}
        self._active = WeakIdKeyDictionary()
        self._mark_active(inputs)

    @property
    def use_order(self) -> UseOrder:
        """The order in which parameters were used, and whether every other pass would do the same.

        A pass can depend on the values of its input only after it has read one, or made a shape of
        some: up to that point all passes are the same, so they agree on whether it comes.
        """
        return UseOrder(self.first_use, not (self.reads_values or self.shapes_vary))

    def is_param(self, t: Tensor) -> bool:
        """Whether `t` is a selected parameter, or a tensor computed from parameters alone."""
        return id(t) in self._params

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation of the forward pass, and record what it does."""
        stand_in = self.weights.stand_in
        args, kwargs = each_tensor((args, kwargs), lambda t: stand_in.get(id(t), t))
        given = list(tensors_in((args, kwargs)))
        params = [t for t in given if id(t) in self._params]
        active = [t for t in given if t in self._active]
        name = bare_name(func)
        if params and active and name == "getitem" and all(map(_is_index, active)):
            # W[e] with a single e is W[3], say: the input is read, as if by `int(e)`, and W[3] is
            # computed from parameters alone.
            active = []
            self.reads_values = True
        if active:
            self.reads_values |= reads_values(name)
            self.shapes_vary |= shape_depends_on_values(name, args, active)
        if not params or not torch.is_grad_enabled():
            out = run_function(func, args, kwargs)
            if active:
                self._note_result(name, active, out)
                self._mark_active(given[:1] if writes(func) else [])
            return out
        if not active:
            return self._run_on_params(func, args, kwargs, given)
        self._note_use(params)
        if isinstance(func, types.FunctionType):  # of torch, in Python: trace what it calls
            with self:
                return run_function(without_override_checks(func), args, kwargs)
        out = self._run_use(func, args, kwargs, given)
        self._note_result(name, active, out)
        return out

    def _run_on_params(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Tensor]
    ) -> Any:
        """Run an operation that depends on parameters alone, and so do its results.

        Args:
            func: the operation.
            args: its arguments.
            kwargs: its keyword arguments.
            given: all tensors among them.
        """
        params = [t for t in given if self.is_param(t)]
        out = run_function(func, args, kwargs)
        changed = given[:1] if writes(func) else []
        derived = [t for t in (*tensors_in(out), *changed) if t.requires_grad]
        for t in derived:
            self._params[id(t)] = t
        if derived:
            self._note_use(params)
        return out

    def _run_use(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Tensor]
    ) -> Any:
        """Run an operation that takes parameters and something active, and add gradient factors.

        Args:
            func: the operation.
            args: its arguments.
            kwargs: its keyword arguments.
            given: all tensors among them.
        """
        places: set[int] = set()
        names: set[str] = set()
        for i, t in enumerate(given):
            if self.is_param(t):
                places.add(i)
                names |= roots(t, self.weights)
        key = OpKey(full_name(func), frozenset(names))
        use = ParamUse(key, self._occurrences[key], given, param_places=places)
        self._occurrences[key] += 1
        if self.trace_pair is None:
            self.param_uses.append(use)
        out = self._apply_rule(OpCall(self, func, args, kwargs, use), args, kwargs)
        use.results = list(tensors_in(out))
        return out

    def _apply_rule(self, call: OpCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation by its rule, or by the general path that is exact for any operation."""
        number = len(self.factors)
        pair = self.trace_pair
        if pair is None or call.use.key not in pair.unbatched:
            try:
                out = _try_rule(find_rule(call.use.name), call, args, kwargs)
                return call.run_on_copies() if out is NotImplemented else out
            except NotBatchable:
                if pair is None:
                    raise
                pair.unbatched.add(call.use.key)
        del self.factors[number:]
        rule = UNBATCHED_RULES.get(call.use.name.strip("_"))
        out = _try_rule(rule, call, args, kwargs)
        return call.run_unbatched() if out is NotImplemented else out

    def _note_use(self, params: list[Tensor]) -> None:
        for t in params:
            name = self.weights.names.get(id(t))
            if name is not None and name not in self.first_use:
                self.first_use.append(name)

    def _note_result(self, name: str, active: list[Tensor], out: Any) -> None:
        results = list(tensors_in(out))
        if self.trace_pair is None and not ignores_shape(name):
            read = tuple(t.shape for t in active)
            self.shapes.append((name, read, tuple(t.shape for t in results)))
        self._mark_active(results)

    def _mark_active(self, tensors: Iterable[Tensor]) -> None:
        for t in tensors:
            self._active[t] = True
            if t._is_view() and t._base is not None:
                self._active[t._base] = True


def _is_index(t: Tensor) -> bool:
    return t.ndim == 0 and not t.is_floating_point()


def _try_rule(
    rule: Callable[..., Any] | None, call: OpCall, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Apply a rule.

    Args:
        rule: the function, or None if the operation has none.
        call: the operation.
        args: its arguments.
        kwargs: its keyword arguments.

    Returns:
        The operation's result; or NotImplemented if there is no rule, or none for such arguments.
    """
    if rule is None:
        return NotImplemented
    try:
        inspect.signature(rule).bind(call, *args, **kwargs)
    except TypeError:
        return NotImplemented
    with error_note(f"the rule for {call.use.name}"):
        return rule(call, *args, **kwargs)


def collapses_rows(one: Sequence[Shapes], two: Sequence[Shapes]) -> bool:
    """Whether an operation returns for two rows what it returns for one: the longest length, say.

    Args:
        one: the shapes that a recorder saw on one row.
        two: those on two rows. If the operations themselves differ, some may collapse rows.
    """
    if [name for name, _, _ in one] != [name for name, _, _ in two]:
        return True
    for (_, read_one, out_one), (_, read_two, out_two) in zip(one, two, strict=True):
        if read_one != read_two and out_one and out_one == out_two:
            return True
    return False
