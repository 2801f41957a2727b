"""One forward pass, watched: where each parameter meets the input, and what its gradient is made
of.

A function mode sees every operation of the forward pass, so functional calls, modules called twice,
tied weights, attention, recurrent networks and exported graphs all look alike. It knows two kinds
of tensors:

- *tracked*: a parameter, or something computed from parameters alone (a normalized weight, a slice,
  an expanded token);
- *active*: something that depends on the input.

An operation on tracked tensors alone is carried out and its result is tracked. One that brings a
tracked and an active tensor together is a *meeting*: there a rule (`rules.py`) says how the
parameter's gradient follows from a cotangent, and leaves a `GradFactor`. What no rule covers is
carried out one row at a time with copies of the parameter, which is exact for any operation. Where
no axis counts the rows, the owner of each entry is found afterwards (`owners.py`). Where rows
cannot be told apart at all, `NotBatchable` is raised; what a function mode cannot see is caught by
the checks of `exact/checks.py`.
"""

import inspect
import types
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from qualms.gradients.batch import NotBatchable
from qualms.gradients.nested import each_tensor, tensors_in
from qualms.gradients.tracing.factors import GradFactor
from qualms.gradients.tracing.op_call import Call
from qualms.gradients.tracing.op_trace import OpKey, ParamUse, TracePair
from qualms.gradients.tracing.param_use import Reach, UseOrder, Weights, roots
from qualms.gradients.tracing.rules.table import SCATTERED, find_rule
from qualms.gradients.tracing.sample_ids import UnbatchedOp

Shapes = tuple[
    str, tuple[torch.Size, ...], tuple[torch.Size, ...]
]  # name, of what it reads, of what it gives


class Recorder(TorchFunctionMode):
    """Watches one forward pass over `rows` rows, `rows_per_sample` of them for each input."""

    def __init__(
        self,
        weights: Weights,
        inputs: Sequence[Tensor],
        rows: int,
        rows_per_sample: int = 1,
        twins: TracePair | None = None,
    ) -> None:
        super().__init__()
        self.weights, self.rows, self.rows_per_sample, self.twins = (
            weights,
            rows,
            rows_per_sample,
            twins,
        )
        self.pieces: list[GradFactor] = []
        self.reach = Reach()
        self.param_uses: list[ParamUse] = []
        self.scattered: list[UnbatchedOp] = []
        self._times: Counter[OpKey] = Counter()  # how often each meeting took place so far
        self.first_use: list[str] = []
        self.general: set[str] = set()  # parameters that no rule covered
        self.reads_values = (
            False  # something that depends on the input becomes a Python number or an array
        )
        self.shapes_vary = False  # the values of something that depends on the input decide a shape
        self.shapes: list[
            Shapes
        ] = []  # of all operations on something that depends on the input, in a first look
        self._tracked: dict[int, Tensor] = {id(leaf): leaf for leaf in weights.leaves.values()}
        self._active = WeakIdKeyDictionary()
        self._mark(inputs)

    def __torch_function__(
        self,
        func: Any,
        kinds: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        args, kwargs = each_tensor((args, kwargs), lambda t: self.weights.stand_in.get(id(t), t))
        given = list(tensors_in((args, kwargs)))
        tracked = [t for t in given if id(t) in self._tracked]
        active = any(t in self._active for t in given)
        if tracked and active and _bare_name(func) == "getitem":
            # W[e] with a single e is W[3], say: the input is read, as if by `int(e)`, and W[3] is
            # tracked.
            active = any(t in self._active and (t.ndim > 0 or t.is_floating_point()) for t in given)
            self.reads_values |= not active
        if active:
            self.reads_values |= _bare_name(func) in _READING
            self.shapes_vary |= _counts(
                _bare_name(func), args, [t for t in given if t in self._active]
            )
        if not tracked or not torch.is_grad_enabled():
            out = func(*args, **kwargs)
            if active:
                self._note(func, given, out)
                self._mark(tensors_in(out))
                if _writes(func):
                    self._mark(given[:1])
            return out
        if not active:
            out = func(*args, **kwargs)
            written = given[:1] if _writes(func) else []
            derived = {id(t): t for t in (*tensors_in(out), *written) if t.requires_grad}
            self._tracked |= derived
            if derived:
                self._used(tracked)
            return out
        self._used(tracked)
        if isinstance(
            func, types.FunctionType
        ):  # a Python function of torch: look at what it calls
            with self:
                return _without_override_checks(func)(*args, **kwargs)
        out = self._meet(func, args, kwargs, given)
        self._note(func, given, out)
        self._mark(tensors_in(out))
        return out

    def _note(self, func: Any, given: list[Tensor], out: Any) -> None:
        if self.twins is None and _bare_name(func) not in _SHAPED_BY_OTHERS:
            read = tuple(t.shape for t in given if t in self._active)
            self.shapes.append((_bare_name(func), read, tuple(t.shape for t in tensors_in(out))))

    @property
    def use_order(self) -> UseOrder:
        """The order in which parameters were used, and whether every other pass would do the same.

        A pass can depend on the values of its input only after it has read one, or made a shape of
        some: up to that point all passes are the same, so they agree on whether it comes.
        """
        return UseOrder(self.first_use, not (self.reads_values or self.shapes_vary))

    def _meet(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Tensor]
    ) -> Any:
        name = str(getattr(func, "__name__", func)).split(".")[0]
        places = frozenset(i for i, t in enumerate(given) if id(t) in self._tracked)
        behind = [roots(given[i], self.weights) for i in places]
        place = OpKey(name, frozenset[str]().union(*behind))
        meeting = ParamUse(place, self._times[place], given, tracked=places)
        self._times[place] += 1
        if (
            self.twins is None
        ):  # a first look, to be compared with another; later ones need not be remembered
            self.param_uses.append(meeting)
        call = Call(self, func, args, kwargs, meeting)
        out = self._by_layout(call, args, kwargs)
        meeting.results = list(tensors_in(out))
        return out

    def _by_layout(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """By a rule or the general path; where no axis counts the rows, by the owners of entries."""
        left = len(self.pieces)
        try:
            if self.twins is not None and call.meeting.place in self.twins.scattered:
                raise NotBatchable("known not to keep its rows apart")
            out = _by_rule(find_rule(call.meeting.name), call, args, kwargs)
            return call.with_copies() if out is NotImplemented else out
        except (
            NotBatchable,
            RuntimeError,
        ) as error:  # a copy for each row does not fit the shapes at hand
            if self.twins is None or isinstance(error, torch.OutOfMemoryError):
                raise
            del self.pieces[left:]
            self.twins.scattered.add(call.meeting.place)
            out = _by_rule(SCATTERED.get(call.meeting.name.strip("_")), call, args, kwargs)
            return call.with_owners() if out is NotImplemented else out

    def _used(self, tracked: list[Tensor]) -> None:
        """Appends to `first_use` the names of the parameters among these tensors that are not in it
        yet.
        """
        names = (self.weights.names.get(id(t)) for t in tracked)
        self.first_use += [
            name for name in names if name is not None and name not in self.first_use
        ]

    def _mark(self, some: Iterable[Tensor]) -> None:
        for t in some:
            self._active[t] = True
            if t._is_view() and t._base is not None:
                self._active[t._base] = True


def _by_rule(
    rule: Callable[..., Any] | None, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """What the rule says, or NotImplemented if it does not know the arguments that the operation
    was called with.
    """
    if rule is None:
        return NotImplemented
    try:
        inspect.signature(rule).bind(call, *args, **kwargs)
    except TypeError:
        return NotImplemented
    return rule(call, *args, **kwargs)


def _bare_name(func: Any) -> str:
    """`add` for `add_`, `__add__` and `add.Tensor`."""
    return str(getattr(func, "__name__", func)).split(".")[0].strip("_")


def _counts(name: str, args: tuple[Any, ...], active: list[Tensor]) -> bool:
    """Whether the shape of the result depends on values: how many entries are picked, or how often."""
    if name in ("getitem", "index"):
        return any(t.dtype in (torch.bool, torch.uint8) for t in active)
    if name == "repeat_interleave":
        return any(not t.is_floating_point() for t in active)
    return name in _COUNTING or (name == "where" and len(args) == 1)


def collapses_rows(one: Sequence[Shapes], two: Sequence[Shapes]) -> bool:
    """Whether an operation makes of two rows what it makes of one, such as the length of the
    longest text.

    Both are the shapes of a first look, on one row and on two. If they differ in the operations
    themselves, it may.
    """
    if [name for name, _, _ in one] != [name for name, _, _ in two]:
        return True
    pairs = zip(one, two, strict=True)
    return any(
        read != also and given and given == gives for (_, read, given), (_, also, gives) in pairs
    )


def _writes(func: Any) -> bool:
    """Whether the operation changes its first argument."""
    name = getattr(func, "__name__", "")
    return func in _WRITES or (name.endswith("_") and not name.endswith("__"))


_WRITES = (Tensor.__setitem__, torch.ops.aten.copy_.default)
# What they give depends on what they read by its type or device alone.
_SHAPED_BY_OTHERS = frozenset(
    ("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor", "to", "type_as", "get")
)
_READING = frozenset(
    (
        "bool",
        "int",
        "float",
        "complex",
        "index",
        "item",
        "tolist",
        "numpy",
        "array",
        "dlpack",
        "equal",
        "allclose",
    )
) | frozenset(
    ("contains", "is_nonzero", "format", "repr", "tensor_split", "untyped_storage", "reduce_ex")
)
_COUNTING = frozenset(
    (
        "nonzero",
        "argwhere",
        "masked_select",
        "unique",
        "unique_consecutive",
        "bincount",
        "pack_padded_sequence",
        "to_sparse",
    )
)


def _never(*_: Any) -> bool:
    return False


def _without_override_checks(func: types.FunctionType) -> Callable[..., Any]:
    """torch's Python functions hand over to a mode before they do anything; this is the same
    function without that.

    The body runs on a copy of its globals in which the checks say no, so its inner calls reach the
    mode one by one.
    """
    checks = dict.fromkeys(
        ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"), _never
    )
    opened = types.FunctionType(
        func.__code__,
        {**func.__globals__, **checks},
        func.__name__,
        func.__defaults__,
        func.__closure__,
    )
    opened.__kwdefaults__ = func.__kwdefaults__
    return opened
