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
time with copies of the parameter, which is exact for any operation. Without a batch axis, the
sample of each entry is found afterwards (`sample_ids.py`). Where rows cannot be separated at all,
`NotBatchable` is raised. Uses that a function mode cannot see are caught by
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
from qualms.gradients.function_modes import CallMode, name_of, run_function
from qualms.gradients.tracing.factors import GradFactor
from qualms.gradients.tracing.op_call import OpCall
from qualms.gradients.tracing.param_use import (
    InnerNodes,
    OpKey,
    ParamUse,
    TracePair,
    UseOrder,
    Weights,
    roots,
)
from qualms.gradients.tracing.rules.table import UNBATCHED_RULES, find_rule
from qualms.gradients.tracing.sample_ids import UnbatchedOp

# The name of one operation, the shapes of its active arguments, and the shapes of its results.
Shapes = tuple[str, tuple[torch.Size, ...], tuple[torch.Size, ...]]


class Recorder(CallMode):
    """A function mode that traces one forward pass.

    Args:
        weights: the leaves that replace the parameters.
        inputs: the tensors of the batch.
        num_rows: number of rows of the batch.
        rows_per_sample: number of rows that belong to each sample: itself and its perturbed copies.
        trace_pair: the same pass traced on one row and on two; None for a single row, and while
            these two are traced.

    Attributes:
        factors: for each use of a parameter, how it contributes to the parameter's gradient.
        unbatched_ops: operations in whose results the sample of each entry is not known yet.
        param_uses: all uses of parameters; recorded only if there is no `trace_pair`.
        shapes: name and shapes of all operations on active tensors (those that depend on the
            input); recorded only if there is no `trace_pair`.
        inner_nodes: graph nodes that a backward pass may enter only through the result of their
            operation.
        first_use: names of the parameters in the order of their first use.
        without_rule: names of parameters that an operation without a rule uses.
        reads_values: whether an active tensor is turned into a Python number or an array.
        shapes_vary: whether the values of an active tensor decide a shape.
    """

    def __init__(
        self,
        weights: Weights,
        inputs: Sequence[Tensor],
        num_rows: int,
        rows_per_sample: int,
        trace_pair: TracePair | None,
    ) -> None:
        """Start a recording. Args: see the class."""
        super().__init__()
        self.weights = weights
        self.num_rows = num_rows
        self.rows_per_sample = rows_per_sample
        self.trace_pair = trace_pair
        self.factors: list[GradFactor] = []
        self.unbatched_ops: list[UnbatchedOp] = []
        self.param_uses: list[ParamUse] = []
        self.shapes: list[Shapes] = []
        self.inner_nodes = InnerNodes()
        self.first_use: list[str] = []
        self.without_rule: set[str] = set()
        self.reads_values = False
        self.shapes_vary = False
        # The number of uses with each key so far.
        self._occurrences: Counter[OpKey] = Counter()
        # All tensors computed from parameters alone, by id. The references keep the ids from being
        # reused.
        self._params: dict[int, Tensor] = {id(leaf): leaf for leaf in weights.leaves.values()}
        # The tensors that depend on the input are the keys; the values do not matter.
        self._active = WeakIdKeyDictionary()
        self._mark_active(inputs)

    @property
    def use_order(self) -> UseOrder:
        """The order in which this pass used the parameters, and whether every pass has that order.

        The Python code of a model can depend on the values of its input only if it reads a value,
        or if values decide a shape. Up to the first such operation all passes are the same, so one
        pass shows whether there is any.
        """
        is_fixed = not (self.reads_values or self.shapes_vary)
        return UseOrder(self.first_use, fixed=is_fixed)

    def is_param(self, t: Tensor) -> bool:
        """Whether `t` is a selected parameter, or a tensor computed from parameters alone."""
        return id(t) in self._params

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation of the forward pass, and record what it does with parameters.

        Params are tensors computed from parameters alone, active tensors depend on the input. An
        operation on both is a use of parameters, whose gradient factors are added.

        Args:
            func: the operation, a function of torch.
            args: the operation's positional arguments.
            kwargs: the operation's keyword arguments.

        Returns:
            The operation's result.
        """
        # Replace the model's parameters by leaves or constants.
        stand_in = self.weights.stand_in
        args, kwargs = map_tensors((args, kwargs), lambda t: stand_in.get(id(t), t))
        tensors = list(tensors_in((args, kwargs)))
        params = [t for t in tensors if id(t) in self._params]
        active = [t for t in tensors if t in self._active]
        changed_in_place = tensors[:1] if is_in_place(func) else []
        name = bare_name(func)
        if params and active and name == "getitem" and all(map(_is_single_index, active)):
            # W[e] with a single index e is treated as W[int(e)]: a value of the input is read, and
            # the slice of W is computed from parameters alone.
            active = []
            self.reads_values = True
        if active:
            self.reads_values |= name in READING_VALUES
            self.shapes_vary |= shape_depends_on_values(name, args, active)
        # No parameters among the arguments, or no gradients recorded: not a use of parameters.
        if not params or not torch.is_grad_enabled():
            out = run_function(func, args, kwargs)
            if active:
                self._record_result(name, active, out)
                self._mark_active(changed_in_place)
            return out
        # Params alone: their results are params too.
        if not active:
            out = run_function(func, args, kwargs)
            self._add_derived_params(params, [*tensors_in(out), *changed_in_place])
            return out
        self._record_first_use(params)
        # Written in Python: trace the calls inside.
        if isinstance(func, types.FunctionType):
            # torch disables a mode while it handles a call: enable this one again.
            with self:
                return run_function(without_override_checks(func), args, kwargs)
        out = self._run_use(func, args, kwargs, tensors)
        self._record_result(name, active, out)
        return out

    def _run_use(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[Tensor],
    ) -> Any:
        """Run an operation that uses parameters on tensors that depend on the input.

        Adds the gradient factors of the parameters.

        Args:
            func: the operation, a function of torch.
            args: the operation's positional arguments.
            kwargs: the operation's keyword arguments.
            tensors: all tensors among `args` and `kwargs`.

        Returns:
            The operation's result.
        """
        param_indices: set[int] = set()
        names: set[str] = set()
        for i, t in enumerate(tensors):
            if self.is_param(t):
                param_indices.add(i)
                names |= roots(t, self.weights)
        key = OpKey(name_of(func), frozenset(names))
        use = ParamUse(key, self._occurrences[key], tensors, param_indices=param_indices)
        self._occurrences[key] += 1
        # A pass on one row or two: later batches are compared with its uses.
        if self.trace_pair is None:
            self.param_uses.append(use)
        out = self._run_by_rule(OpCall(self, func, args, kwargs, use))
        use.results = list(tensors_in(out))
        return out

    def _run_by_rule(self, call: OpCall) -> Any:
        """Run an operation by its rule, or on copies of its parameters if no rule covers it.

        If a tensor has no batch axis, the factors that this call added are dropped, and the
        operation runs as an unbatched one (see `UnbatchedOp`), in this and all later passes.

        Args:
            call: the operation with its arguments.

        Returns:
            The operation's result.

        Raises:
            NotBatchable: if the rows cannot be separated.
        """
        num_factors = len(self.factors)
        pair = self.trace_pair
        if pair is None or call.use.key not in pair.unbatched:
            try:
                out = _try_rule(find_rule(call.use.name), call)
                return call.run_on_copies() if out is NotImplemented else out
            except NotBatchable:
                # Without a pair no batch axis is looked for: the reason is another one.
                if pair is None:
                    raise
                pair.unbatched.add(call.use.key)
        del self.factors[num_factors:]
        out = _try_rule(UNBATCHED_RULES.get(call.use.name.strip("_")), call)
        return call.run_unbatched() if out is NotImplemented else out

    def _record_first_use(self, params: list[Tensor]) -> None:
        """Add the names of parameters that are used for the first time to `first_use`."""
        for param in params:
            # None for a tensor computed from parameters, which were recorded when it was computed.
            name = self.weights.names.get(id(param))
            if name is not None and name not in self.first_use:
                self.first_use.append(name)

    def _add_derived_params(self, params: list[Tensor], results: list[Tensor]) -> None:
        """Make results that were computed from parameters alone count as params too.

        Results without a gradient, such as that of a comparison, are constants instead.

        Args:
            params: the parameters, and tensors computed from them, that the operation took.
            results: the operation's results, and the tensors that it changed in place.
        """
        derived = [t for t in results if t.requires_grad]
        for t in derived:
            self._params[id(t)] = t
        if derived:
            self._record_first_use(params)

    def _record_result(self, name: str, active: list[Tensor], out: Any) -> None:
        """Mark the results of an operation on active tensors as active, and record the shapes.

        Args:
            name: name of the operation, from `bare_name`.
            active: its arguments that depend on the input.
            out: what it returned: a tensor, or nested tuples, lists and dicts of tensors.
        """
        results = list(tensors_in(out))
        # In a pass on one row or two: `collapses_rows` compares these.
        if self.trace_pair is None and name not in TAKING_TYPE_OR_DEVICE:
            argument_shapes = tuple(t.shape for t in active)
            result_shapes = tuple(t.shape for t in results)
            self.shapes.append((name, argument_shapes, result_shapes))
        self._mark_active(results)

    def _mark_active(self, tensors: Iterable[Tensor]) -> None:
        """Mark tensors as depending on the input, and with a view the tensor that it is a view of.

        A view may have been changed in place, which changes that tensor too.
        """
        for t in tensors:
            self._active[t] = True
            if t._is_view() and t._base is not None:
                self._active[t._base] = True


def _is_single_index(t: Tensor) -> bool:
    """Whether a tensor is a single integer or boolean, as e in `W[e]`."""
    return t.ndim == 0 and not t.is_floating_point()


def _try_rule(rule: Callable[..., Any] | None, call: OpCall) -> Any:
    """Run an operation by a rule, if there is one that covers its arguments.

    Args:
        rule: a function that takes `call` and the operation's arguments; None if there is no rule
            for this operation.
        call: the operation with its arguments.

    Returns:
        The operation's result; NotImplemented if there is no rule, or the rule does not cover the
        arguments.
    """
    if rule is None:
        return NotImplemented
    try:
        inspect.signature(rule).bind(call, *call.args, **call.kwargs)
    # The operation has arguments that the rule does not take.
    except TypeError:
        return NotImplemented
    with error_note(f"the rule for {call.use.name}"):
        return rule(call, *call.args, **call.kwargs)


def collapses_rows(one: Sequence[Shapes], two: Sequence[Shapes]) -> bool:
    """Whether some operation of a pass may mix rows, as it reduces over all rows of the batch.

    An example is the length of the longest text of a batch. The arguments of such an operation have
    other shapes for two rows than for one, its results have the same.

    Args:
        one: names and shapes of the operations in a pass on one row.
        two: names and shapes of the operations in a pass on two rows.

    Returns:
        True if an operation does, or if the passes run different operations and cannot be compared.
    """
    if [name for name, _, _ in one] != [name for name, _, _ in two]:
        return True
    for operation_on_one, operation_on_two in zip(one, two, strict=True):
        _, arguments_one, results_one = operation_on_one
        _, arguments_two, results_two = operation_on_two
        if arguments_one != arguments_two and results_one and results_one == results_two:
            return True
    return False


# Names of operations that write, read values, or let values decide a shape.

# Change their first argument in place, though their names do not end in `_`.
IN_PLACE = (Tensor.__setitem__, torch.ops.aten.copy_.default)
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
SHAPE_FROM_VALUES = {
    "argwhere",
    "bincount",
    "masked_select",
    "nonzero",
    "pack_padded_sequence",
    "to_sparse",
    "unique",
    "unique_consecutive",
}
# Use only the dtype or device of some of their arguments: the shapes of these do not matter.
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


def bare_name(func: Any) -> str:
    """Return the bare name of an operation: `add` for `add_`, `__add__` and `add.Tensor`."""
    return name_of(func).strip("_")


def is_in_place(func: Any) -> bool:
    """Whether an operation of torch changes its first argument in place, as `add_` does."""
    name = getattr(func, "__name__", "")
    return func in IN_PLACE or (name.endswith("_") and not name.endswith("__"))


def shape_depends_on_values(name: str, args: tuple[Any, ...], active: list[Tensor]) -> bool:
    """Whether the values of active tensors decide the shape of an operation's result.

    Args:
        name: name of the operation, from `bare_name`.
        args: the operation's positional arguments.
        active: the tensors among the arguments that depend on the input.
    """
    # x[mask] has as many entries as the mask has nonzero ones.
    if name in ("getitem", "index"):
        return any(t.dtype in (torch.bool, torch.uint8) for t in active)
    # The integers are the numbers of repetitions.
    if name == "repeat_interleave":
        return any(not t.is_floating_point() for t in active)
    # `where(condition)` alone lists the indices at which the condition holds.
    return name in SHAPE_FROM_VALUES or (name == "where" and len(args) == 1)


def _return_false(*_: Any) -> bool:
    """Return False; `without_override_checks` puts this in place of torch's checks for modes."""
    return False


def without_override_checks(func: types.FunctionType) -> Callable[..., Any]:
    """Copy a Python function of torch so that it does not check for function modes.

    Functions such as `F.multi_head_attention_forward` first check for a function mode, and pass the
    whole call to it. In the globals of the copy these checks return False, so that its body runs,
    and the calls inside reach the mode one by one.

    Args:
        func: the function.
    """
    checks = dict.fromkeys(
        ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"),
        _return_false,
    )
    copy = types.FunctionType(
        func.__code__,
        {**func.__globals__, **checks},
        func.__name__,
        func.__defaults__,
        func.__closure__,
    )
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy
