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

from qualms.gradients.batch import NotBatchable, each_tensor, tensors_in
from qualms.gradients.fallback import error_note
from qualms.gradients.function_modes import CallMode, run_function
from qualms.gradients.tracing.factors import GradFactor
from qualms.gradients.tracing.op_call import OpCall
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
        rows_per_sample: int,
        trace_pair: TracePair | None,
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
        changed = given[:1] if writes(func) else []
        name = bare_name(func)
        if params and active and name == "getitem" and all(map(_is_index, active)):
            # W[e] with a single e is W[3], say: the input is read, as if by `int(e)`, and W[3] is
            # computed from parameters alone.
            active = []
            self.reads_values = True
        if active:
            self.reads_values |= name in READING_VALUES
            self.shapes_vary |= shape_depends_on_values(name, args, active)
        if not params or not torch.is_grad_enabled():
            out = run_function(func, args, kwargs)
            if active:
                self._note_result(name, active, out)
                self._mark_active(changed)
            return out
        if not active:
            out = run_function(func, args, kwargs)
            self._note_derived(params, [*tensors_in(out), *changed])
            return out
        self._note_use(params)
        if isinstance(func, types.FunctionType):  # of torch, in Python: trace what it calls
            with self:
                return run_function(without_override_checks(func), args, kwargs)
        out = self._run_use(func, args, kwargs, given)
        self._note_result(name, active, out)
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
        out = self._apply_rule(OpCall(self, func, args, kwargs, use))
        use.results = list(tensors_in(out))
        return out

    def _apply_rule(self, call: OpCall) -> Any:
        """Run an operation by its rule, or by the general path that is exact for any operation."""
        number = len(self.factors)
        pair = self.trace_pair
        if pair is None or call.use.key not in pair.unbatched:
            try:
                out = _try_rule(find_rule(call.use.name), call)
                return call.run_on_copies() if out is NotImplemented else out
            except NotBatchable:
                if pair is None:
                    raise
                pair.unbatched.add(call.use.key)
        del self.factors[number:]
        out = _try_rule(UNBATCHED_RULES.get(call.use.name.strip("_")), call)
        return call.run_unbatched() if out is NotImplemented else out

    def _note_use(self, params: list[Tensor]) -> None:
        for t in params:
            name = self.weights.names.get(id(t))
            if name is not None and name not in self.first_use:
                self.first_use.append(name)

    def _note_derived(self, params: list[Tensor], results: list[Tensor]) -> None:
        """Note tensors that were computed from parameters alone."""
        derived = [t for t in results if t.requires_grad]
        for t in derived:
            self._params[id(t)] = t
        if derived:
            self._note_use(params)

    def _note_result(self, name: str, active: list[Tensor], out: Any) -> None:
        results = list(tensors_in(out))
        if self.trace_pair is None and name not in TAKING_TYPE_OR_DEVICE:
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


def _try_rule(rule: Callable[..., Any] | None, call: OpCall) -> Any:
    """Run an operation by a rule.

    Returns:
        The operation's result; NotImplemented if there is no rule, or none for such arguments.
    """
    if rule is None:
        return NotImplemented
    try:
        inspect.signature(rule).bind(call, *call.args, **call.kwargs)
    except TypeError:  # arguments that the rule does not know
        return NotImplemented
    with error_note(f"the rule for {call.use.name}"):
        return rule(call, *call.args, **call.kwargs)


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


# What operations do beside computing their results, by their names.

WRITING = (Tensor.__setitem__, torch.ops.aten.copy_.default)
# Turn a tensor into something that is not traced: a number, an array.
READING_VALUES = {
    "allclose",
    "array",
    "bool",
    "complex",
    "contains",
    "dlpack",
    "equal",
    "float",
    "format",
    "index",
    "int",
    "is_nonzero",
    "item",
    "numpy",
    "reduce_ex",
    "repr",
    "tensor_split",
    "tolist",
    "untyped_storage",
}
# Return as many entries as the values of their arguments say.
COUNTING_VALUES = {
    "argwhere",
    "bincount",
    "masked_select",
    "nonzero",
    "pack_padded_sequence",
    "to_sparse",
    "unique",
    "unique_consecutive",
}
# Depend on some of their arguments by type or device alone.
TAKING_TYPE_OR_DEVICE = {
    "get",
    "new_empty",
    "new_full",
    "new_ones",
    "new_tensor",
    "new_zeros",
    "to",
    "type_as",
}


def full_name(func: Any) -> str:
    """The name of an operation without its overload: `add_` for `add_.Tensor`."""
    return str(getattr(func, "__name__", func)).split(".")[0]


def bare_name(func: Any) -> str:
    """The name of an operation: `add` for `add_`, `__add__` and `add.Tensor`."""
    return full_name(func).strip("_")


def writes(func: Any) -> bool:
    """Whether the operation changes its first argument in place."""
    name = getattr(func, "__name__", "")
    return func in WRITING or (name.endswith("_") and not name.endswith("__"))


def shape_depends_on_values(name: str, args: tuple[Any, ...], active: list[Tensor]) -> bool:
    """Whether values decide the result's shape: how many entries are picked, or how often.

    Args:
        name: of the operation, as `bare_name` gives it.
        args: its arguments.
        active: those tensors among its arguments that depend on the input.
    """
    if name in ("getitem", "index"):
        return any(t.dtype in (torch.bool, torch.uint8) for t in active)
    if name == "repeat_interleave":
        return any(not t.is_floating_point() for t in active)
    return name in COUNTING_VALUES or (name == "where" and len(args) == 1)


def _never(*_: Any) -> bool:
    return False


def without_override_checks(func: types.FunctionType) -> Callable[..., Any]:
    """A copy of a Python function of torch that does not ask function modes what to do.

    torch's Python functions hand over to a mode before they do anything. The copy's body runs with
    globals in which those checks say no, so that its inner calls reach the mode one by one.
    """
    checks = dict.fromkeys(
        ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"), _never
    )
    inner = types.FunctionType(
        func.__code__,
        {**func.__globals__, **checks},
        func.__name__,
        func.__defaults__,
        func.__closure__,
    )
    inner.__kwdefaults__ = func.__kwdefaults__
    return inner
