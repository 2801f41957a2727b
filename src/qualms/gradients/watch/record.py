"""One forward pass, watched: where each parameter meets the input, and what its gradient is made of.

A function mode sees every operation of the forward pass, so functional calls, modules called twice, tied weights,
attention, recurrent networks and exported graphs all look alike. It knows two kinds of tensors:

- *tracked*: a parameter, or something computed from parameters alone (a normalised weight, a slice, an expanded token);
- *active*: something that depends on the input.

An operation on tracked tensors alone is carried out and its result is tracked. One that brings a tracked and an active
tensor together is a *meeting*: there a rule (`rules.py`) says how the parameter's gradient follows from a cotangent,
and leaves a `Piece`. What no rule covers is carried out one row at a time with copies of the parameter, which is exact
for any operation. Where the rows of a batch cannot be told apart, `Unclear` is raised; what a function mode cannot see
is caught by the tests of `trust.py`.
"""

import inspect
import itertools
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from qualms.gradients.inputs import Unclear
from qualms.gradients.nested import each_tensor, tensors_in
from qualms.gradients.watch.layout import Layout, infer
from qualms.gradients.watch.pieces import Piece, Summed
from qualms.gradients.watch.rules import find_rule
from qualms.gradients.watch.weights import Weights, roots


@dataclass
class Meeting:
    """An operation that brought parameters and input together: its name, tensor arguments and tensor results."""

    name: str
    arguments: list[Tensor]
    results: list[Tensor] = field(default_factory=list)


def largest_result(meetings: Iterable[Meeting]) -> int:
    """Bytes of the largest result among them."""
    return max((t.numel() * t.element_size() for meeting in meetings for t in meeting.results), default=0)


@dataclass(frozen=True)
class TwinPasses:
    """The same forward pass on one row and on two: comparing them tells which axis counts the rows."""

    one: list[Meeting]
    two: list[Meeting]


class Recorder(TorchFunctionMode):
    """Watches one forward pass over `rows` rows, `per_input` of them for each input."""

    def __init__(
        self, weights: Weights, inputs: Sequence[Tensor], rows: int, per_input: int = 1, twins: TwinPasses | None = None
    ) -> None:
        super().__init__()
        self.weights, self.rows, self.per_input, self.twins = weights, rows, per_input, twins
        self.pieces: list[Piece] = []
        self.meetings: list[Meeting] = []
        self.count = 0  # of meetings so far
        self.first_use: list[str] = []
        self.one_by_one: set[str] = set()  # parameters that no rule covered
        self.picks_rows = False  # an index or mask that depends on the input picks or places entries
        self.reads_values = False  # something that depends on the input becomes a Python number or an array
        self._tracked: dict[int, Tensor] = {id(leaf): leaf for leaf in weights.leaves.values()}
        self._active = WeakIdKeyDictionary()
        self._mark(inputs)

    def __torch_function__(
        self, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        args, kwargs = each_tensor((args, kwargs), lambda t: self.weights.stand_in.get(id(t), t))
        given = list(tensors_in((args, kwargs)))
        tracked = [t for t in given if id(t) in self._tracked]
        active = any(t in self._active for t in given)
        if active:
            name = _bare_name(func)
            self.reads_values |= name in _READING
            self.picks_rows |= name in _PICKING and any(_is_index(t) for t in given if t in self._active)
        if not tracked or not torch.is_grad_enabled():
            out = func(*args, **kwargs)
            if active:
                self._mark(tensors_in(out))
                if func in _WRITES or getattr(func, "__name__", "").endswith("_"):
                    self._mark(given[:1])
            return out
        if not active:
            out = func(*args, **kwargs)
            derived = {id(t): t for t in tensors_in(out) if t.requires_grad}
            self._tracked |= derived
            if derived:
                self._used(tracked)
            return out
        self._used(tracked)
        if isinstance(func, types.FunctionType):  # a Python function of torch: look at what it calls
            with self:
                return _without_override_checks(func)(*args, **kwargs)
        out = self._meet(func, args, kwargs, given)
        self._mark(tensors_in(out))
        return out

    def _meet(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Tensor]) -> Any:
        name = str(getattr(func, "__name__", func)).split(".")[0]
        meeting = Meeting(name, given)
        self.count += 1
        if self.twins is None:  # a first look, to be compared with another; later ones need not be remembered
            self.meetings.append(meeting)
        call = Call(self, func, args, kwargs, meeting)
        rule = find_rule(name)
        out = rule(call, *args, **kwargs) if rule and _fits(rule, call, args, kwargs) else NotImplemented
        if out is NotImplemented:
            out = call.with_copies()
        meeting.results = list(tensors_in(out))
        return out

    def _used(self, tracked: list[Tensor]) -> None:
        names = (self.weights.names.get(id(t)) for t in tracked)
        self.first_use += [name for name in names if name is not None and name not in self.first_use]

    def _mark(self, some: Iterable[Tensor]) -> None:
        for t in some:
            self._active[t] = True
            if t._is_view() and t._base is not None:
                self._active[t._base] = True


def _fits(rule: Callable[..., Any], call: "Call", args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the operation was called with the arguments that the rule knows."""
    try:
        inspect.signature(rule).bind(call, *args, **kwargs)
    except TypeError:
        return False
    return True


def _bare_name(func: Any) -> str:
    """`add` for `add_`, `__add__` and `add.Tensor`."""
    return str(getattr(func, "__name__", func)).split(".")[0].strip("_")


def _is_index(t: Tensor) -> bool:
    return not t.is_floating_point() and not t.is_complex()


_WRITES = (Tensor.__setitem__, torch.ops.aten.copy_.default)
_READING = frozenset(("bool", "int", "float", "index", "item", "tolist", "numpy", "array", "equal", "allclose"))
_PICKING = frozenset(
    ("getitem", "setitem", "index", "index_select", "index_put", "index_add", "index_copy", "gather", "take", "sort")
) | frozenset(("take_along_dim", "scatter", "scatter_add", "scatter_reduce", "masked_select", "masked_scatter"))


class Call:
    """One meeting as a rule sees it."""

    def __init__(
        self, recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], meeting: Meeting
    ) -> None:
        self.recorder, self.func, self.args, self.kwargs, self.meeting = recorder, func, args, kwargs, meeting
        self.rows, self.inputs = recorder.rows, recorder.rows // recorder.per_input
        self._number = recorder.count - 1

    def run(self) -> Any:
        """Carry the operation out as it is."""
        out = self.func(*self.args, **self.kwargs)
        # A change in place of a view would lead the graph around the edge that a rule takes hold of.
        return out.clone() if out._is_view() else out

    def run_with(self, copies: dict[int, Tensor]) -> Any:
        """Carry the operation out with some of its tensors, known by id, replaced."""
        args, kwargs = each_tensor((self.args, self.kwargs), lambda t: copies.get(id(t), t))
        return self.func(*args, **kwargs)

    def tracked(self, t: Any) -> bool:
        """Whether `t` is a parameter or comes from parameters alone."""
        return isinstance(t, Tensor) and id(t) in self.recorder._tracked

    def leave(self, target: Tensor, edges: Sequence[GradientEdge], gradient: Any) -> None:
        """Note that `gradient` (an `Outer` or a `Summed`) turns the cotangents at `edges` into target's gradient."""
        if id(target) not in self.recorder.weights.names:
            target = self._same_for_all_rows(target)
        self.recorder.pieces.append(Piece(target, tuple(edges), gradient))

    def _same_for_all_rows(self, derived: Tensor) -> Tensor:
        """What stands in for `derived` on one row, if every row of it is just that: else it depends on the input.

        An input's way around the function mode (a script, numpy, a Python number) ends here.
        """
        alone = self.on_one_row(derived)
        layout = self.layout(derived) if self.recorder.twins else None
        parts = [derived] if layout is None else [layout.part(derived, row) for row in range(self.rows)]
        with torch.no_grad():
            if not all(torch.allclose(part, alone, rtol=1e-4, atol=0) for part in parts):
                raise Unclear(f"an argument of {self.meeting.name} depends on the input in a way that was not seen")
        return alone

    # Which part of a tensor belongs to which row.

    def _twin_meetings(self) -> tuple[Meeting, Meeting]:
        twins = self.recorder.twins
        assert twins is not None
        if self._number >= min(len(twins.one), len(twins.two)):
            raise Unclear(f"{self.meeting.name} is not called for every input")
        one, two = twins.one[self._number], twins.two[self._number]
        if not self.meeting.name == one.name == two.name or len(one.arguments) != len(self.meeting.arguments):
            raise Unclear(f"{self.meeting.name} is not called for every input")
        return one, two

    def on_one_row(self, t: Tensor) -> Tensor:
        """The tensor in t's place when the model runs on a single row."""
        if self.recorder.twins is None:
            return t
        place = next(i for i, a in enumerate(self.meeting.arguments) if a is t)
        return self._twin_meetings()[0].arguments[place]

    def layout(self, t: Tensor) -> Layout | None:
        """Where t, an argument of this call, keeps its rows; None if it is the same for all rows."""
        if self.recorder.twins is None:
            return Layout.whole()
        place = next(i for i, a in enumerate(self.meeting.arguments) if a is t)
        one, two = self._twin_meetings()
        return infer(one.arguments[place], two.arguments[place], t.shape, self.rows)

    def result_layout(self, place: int = 0) -> Layout | None:
        """Where the result number `place` keeps its rows."""
        if self.recorder.twins is None:
            return Layout.whole()
        one, two = self._twin_meetings()
        return infer(one.results[place], two.results[place], None, self.rows)

    def result_ndim(self) -> int:
        """How many axes the result has."""
        return self._twin_meetings()[0].results[0].ndim

    # The general paths: exact for any operation.

    def with_copies(self) -> Any:
        """Carry the operation out on copies of its tracked arguments that let one row's gradient be told apart.

        A tracked tensor that was expanded to a batch already has a part of its own for each row. For anything else the
        operation runs one row at a time, each with its own copy.
        """
        used = [t for t in self.meeting.arguments if self.tracked(t)]
        if self.recorder.twins is None or all(self.layout(t) for t in used):
            copies = {id(t): t.detach().requires_grad_() for t in used}
            for t in used:
                layout = self.layout(t)
                assert layout is not None
                shape = self.on_one_row(t).shape
                self.leave(t, [get_gradient_edge(copies[id(t)])], Summed.over_rows(layout, self.inputs, shape))
            return self.run_with(copies)
        return self._one_row_at_a_time(used)

    def _one_row_at_a_time(self, used: list[Tensor]) -> Any:
        if self.meeting.name.endswith("_") and not self.meeting.name.startswith("_"):
            raise Unclear(f"{self.meeting.name} changes its argument in place")
        layouts = {id(t): self.layout(t) for t in self.meeting.arguments}
        copies: dict[int, list[Tensor]] = {id(t): [] for t in used}
        outs: list[Any] = []

        def part_of(row: int) -> Callable[[Tensor], Tensor]:
            def part(t: Tensor) -> Tensor:
                if id(t) in copies:
                    copies[id(t)].append(t.detach().requires_grad_())
                    return copies[id(t)][-1]
                layout = layouts[id(t)]
                return t if layout is None else layout.part(t, row)

            return part

        for row in range(self.rows):
            args, kwargs = each_tensor((self.args, self.kwargs), part_of(row))
            outs.append(self.func(*args, **kwargs))
        for t in used:
            edges = [get_gradient_edge(c) for c in copies[id(t)]]
            self.leave(t, edges, Summed.of_copies(self.inputs, self.on_one_row(t).shape))
            self.recorder.one_by_one |= roots(t, self.recorder.weights)
        return self._join(outs)

    def _join(self, outs: list[Any]) -> Any:
        """The results of all rows, put together where the batched operation would have put them."""
        place = itertools.count()

        def join(parts: list[Any]) -> Any:
            first = parts[0]
            if isinstance(first, Tensor):
                layout = self.result_layout(next(place))
                if layout is None:
                    raise Unclear(f"the result of {self.meeting.name} does not keep the rows apart")
                return layout.join(parts)
            if isinstance(first, (tuple, list)):
                return type(first)([join([p[i] for p in parts]) for i in range(len(first))])
            return first

        return join(outs)


def _never(*_: Any) -> bool:
    return False


def _without_override_checks(func: types.FunctionType) -> Callable[..., Any]:
    """torch's Python functions hand over to a mode before they do anything; this is the same function without that.

    The body runs on a copy of its globals in which the checks say no, so its inner calls reach the mode one by one.
    """
    checks = dict.fromkeys(("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"), _never)
    opened = types.FunctionType(
        func.__code__, {**func.__globals__, **checks}, func.__name__, func.__defaults__, func.__closure__
    )
    opened.__kwdefaults__ = func.__kwdefaults__
    return opened
