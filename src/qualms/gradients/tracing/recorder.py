"""Traces a forward pass: which operations combine parameters with the input, and their gradients.

A function mode sees every operation of the forward pass, so functional calls, modules called twice,
tied weights, attention, recurrent networks and exported graphs all look alike. It knows two kinds
of tensors:

- *params*: a parameter, or something computed from parameters alone (a normalized weight, a slice,
  an expanded token);
- *active*: something that depends on the input.

The result of an operation on params alone is again one of the params. An operation that takes both
kinds is a *use* of parameters: a rule (`rules/`) runs it and adds a `GradFactor`, which says how
the parameter's gradient follows from a cotangent. Operations without a rule are run one row at a
time with copies of the parameter, which is exact for any operation. Where no axis counts the rows,
the sample of each entry is found afterwards (`sample_ids.py`). Where rows cannot be separated at
all, `NotBatchable` is raised. Uses that a function mode cannot see are caught by
`require_no_bypass` and by the checks of `gradients/verify.py`.
"""

import inspect
import types
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from qualms.gradients.batch import NotBatchable, map_tensors, tensors_in
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

# An operation's name, the shapes of its active arguments, and the shapes of its results.
Shapes = tuple[str, tuple[torch.Size, ...], tuple[torch.Size, ...]]


class Recorder(CallMode):
    """A function mode that traces one forward pass.

    Args:
        weights: the leaves that replace the parameters.
        inputs: the tensors of the batch.
        rows: number of rows of the batch.
        rows_per_sample: number of rows that belong to each sample.
        trace_pair: the same pass traced on one row and on two; None for a single row, and while
            these two are traced.

    Attributes:
        factors: for each use of a parameter, how it contributes to the parameter's gradient.
        unbatched_ops: operations in whose results the sample of each entry is not known yet.
        param_uses: all uses of parameters; recorded without a `trace_pair` only.
        shapes: name and shapes of all operations on active tensors; recorded without a `trace_pair`
            only.
        reach: graph nodes that a backward pass may enter only through their operation's result.
        first_use: names of the parameters in the order of their first use.
        without_rule: names of parameters with a use that no rule covers.
        reads_values: whether an active tensor is turned into a Python number or an array.
        shapes_vary: whether the values of an active tensor decide a shape.
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
        # How often each key was used so far.
        self._occurrences: Counter[OpKey] = Counter()
        # Params by id. Holding them keeps their ids from being reused.
        self._params: dict[int, Tensor] = {id(leaf): leaf for leaf in weights.leaves.values()}
        # Tensors that depend on the input, as keys.
        self._active = WeakIdKeyDictionary()
        self._mark_active(inputs)

    @property
    def use_order(self) -> UseOrder:
        """The order in which parameters were used, and whether every other pass has the same order.

        Control flow can depend on the values of the input only after a value is read, or decides a
        shape. Up to the first such operation all passes are the same, so one pass shows whether
        there is any.
        """
        return UseOrder(self.first_use, not (self.reads_values or self.shapes_vary))

    def is_param(self, t: Tensor) -> bool:
        """Whether `t` is a selected parameter, or a tensor computed from parameters alone."""
        return id(t) in self._params

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation of the forward pass; note params and active tensors, record uses.

        Params are tensors computed from parameters alone, active ones depend on the input. An
        operation on both is a use, whose gradient a rule or a general path provides.

        Args:
            func: the operation, a function of torch.
            args: the operation's positional arguments.
            kwargs: the operation's keyword arguments.

        Returns:
            The operation's result.
        """
        # What replaces the model's parameters.
        stand_in = self.weights.stand_in
        args, kwargs = map_tensors((args, kwargs), lambda t: stand_in.get(id(t), t))
        tensors = list(tensors_in((args, kwargs)))
        params = [t for t in tensors if id(t) in self._params]
        active = [t for t in tensors if t in self._active]
        written = tensors[:1] if writes(func) else []
        name = bare_name(func)
        if params and active and name == "getitem" and all(map(_is_index, active)):
            # W[e] with a single index e is treated as W[int(e)]: a value of the input is read, and
            # the slice of W is computed from parameters alone.
            active = []
            self.reads_values = True
        if active:
            self.reads_values |= name in READING_VALUES
            self.shapes_vary |= shape_depends_on_values(name, args, active)
        if not params or not torch.is_grad_enabled():
            out = run_function(func, args, kwargs)
            if active:
                self._note_result(name, active, out)
                self._mark_active(written)
            return out
        if not active:  # params alone: so are the results
            out = run_function(func, args, kwargs)
            self._note_derived(params, [*tensors_in(out), *written])
            return out
        self._note_use(params)
        # Written in Python: trace the calls inside.
        if isinstance(func, types.FunctionType):
            with self:
                return run_function(without_override_checks(func), args, kwargs)
        out = self._run_use(func, args, kwargs, tensors)
        self._note_result(name, active, out)
        return out

    def _run_use(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]
    ) -> Any:
        """Run an operation that takes both params and active tensors, and add gradient factors.

        Args:
            func: the operation, a function of torch.
            args: the operation's positional arguments.
            kwargs: the operation's keyword arguments.
            tensors: all tensors among `args` and `kwargs`.

        Returns:
            The operation's result.
        """
        places: set[int] = set()
        names: set[str] = set()
        for i, t in enumerate(tensors):
            if self.is_param(t):
                places.add(i)
                names |= roots(t, self.weights)
        key = OpKey(full_name(func), frozenset(names))
        use = ParamUse(key, self._occurrences[key], tensors, param_places=places)
        self._occurrences[key] += 1
        if self.trace_pair is None:
            self.param_uses.append(use)
        out = self._apply_rule(OpCall(self, func, args, kwargs, use))
        use.results = list(tensors_in(out))
        return out

    def _apply_rule(self, call: OpCall) -> Any:
        """Run an operation by its rule, or by the general path that is exact for any operation.

        If the rows turn out not to be on an axis, the factors that this call added are dropped, and
        the operation is run as an unbatched one, in this and all later passes.
        """
        num_factors = len(self.factors)
        pair = self.trace_pair
        if pair is None or call.use.key not in pair.unbatched:
            try:
                out = _try_rule(find_rule(call.use.name), call)
                return call.run_on_copies() if out is NotImplemented else out
            except NotBatchable:
                if pair is None:
                    raise
                pair.unbatched.add(call.use.key)
        del self.factors[num_factors:]
        out = _try_rule(UNBATCHED_RULES.get(call.use.name.strip("_")), call)
        return call.run_unbatched() if out is NotImplemented else out

    def _note_use(self, params: list[Tensor]) -> None:
        """Add the names of leaves that are used for the first time to `first_use`."""
        for t in params:
            name = self.weights.names.get(id(t))
            if name is not None and name not in self.first_use:
                self.first_use.append(name)

    def _note_derived(self, params: list[Tensor], results: list[Tensor]) -> None:
        """Note results computed from `params` alone, so that they count as params too.

        Results without a gradient, such as a comparison, are constants.
        """
        derived = [t for t in results if t.requires_grad]
        for t in derived:
            self._params[id(t)] = t
        if derived:
            self._note_use(params)

    def _note_result(self, name: str, active: list[Tensor], out: Any) -> None:
        """Mark the results of an operation on active tensors as active, and record the shapes."""
        results = list(tensors_in(out))
        if self.trace_pair is None and name not in TAKING_TYPE_OR_DEVICE:
            read = tuple(t.shape for t in active)
            self.shapes.append((name, read, tuple(t.shape for t in results)))
        self._mark_active(results)

    def _mark_active(self, tensors: Iterable[Tensor]) -> None:
        """Mark tensors that depend on the input, and the tensors that they are views of."""
        for t in tensors:
            self._active[t] = True
            if t._is_view() and t._base is not None:
                self._active[t._base] = True


def _is_index(t: Tensor) -> bool:
    """Whether a tensor is a single integer, as in `W[e]`."""
    return t.ndim == 0 and not t.is_floating_point()


def _try_rule(rule: Callable[..., Any] | None, call: OpCall) -> Any:
    """Run an operation by a rule.

    Args:
        rule: the rule; None if there is none for this operation.
        call: the operation.

    Returns:
        The operation's result; NotImplemented if there is no rule, or the rule does not cover the
        arguments.
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
    """Whether an operation reduces over the rows: its result has the same shape for two as for one.

    An example is the length of the longest text of a batch.

    Args:
        one: names and shapes of the operations in a pass on one row.
        two: names and shapes of the operations in a pass on two rows.

    Returns:
        True also if the two passes run different operations.
    """
    if [name for name, _, _ in one] != [name for name, _, _ in two]:
        return True
    for (_, read_one, out_one), (_, read_two, out_two) in zip(one, two, strict=True):
        if read_one != read_two and out_one and out_one == out_two:
            return True
    return False


# Names of operations that write, read values, or let values decide a shape.

WRITING = (Tensor.__setitem__, torch.ops.aten.copy_.default)
# Turn a tensor into something that is not traced, such as a number or an array.
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
# The shape of the result depends on the values of the arguments.
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
# Use only the type or device of some of their arguments.
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
    """Return the name of an operation without its overload: `add_` for `add_.Tensor`."""
    return str(getattr(func, "__name__", func)).split(".")[0]


def bare_name(func: Any) -> str:
    """Return the bare name of an operation: `add` for `add_`, `__add__` and `add.Tensor`."""
    return full_name(func).strip("_")


def writes(func: Any) -> bool:
    """Whether the operation changes its first argument in place, as `add_` does."""
    name = getattr(func, "__name__", "")
    return func in WRITING or (name.endswith("_") and not name.endswith("__"))


def shape_depends_on_values(name: str, args: tuple[Any, ...], active: list[Tensor]) -> bool:
    """Whether the values of active tensors decide the shape of an operation's result.

    Args:
        name: name of the operation, from `bare_name`.
        args: the operation's positional arguments.
        active: the tensors among the arguments that depend on the input.
    """
    if name in ("getitem", "index"):
        return any(t.dtype in (torch.bool, torch.uint8) for t in active)
    if name == "repeat_interleave":
        return any(not t.is_floating_point() for t in active)
    return name in COUNTING_VALUES or (name == "where" and len(args) == 1)


def _never(*_: Any) -> bool:
    """Return False: replaces torch's checks for function modes (`without_override_checks`)."""
    return False


def without_override_checks(func: types.FunctionType) -> Callable[..., Any]:
    """Copy a Python function of torch without its check for function modes.

    torch's Python functions first check for a mode, and pass the whole call to it. In the globals
    of the copy these checks return False, so that its body runs, and each call inside reaches the
    mode instead.
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
