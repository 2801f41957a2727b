"""One meeting of parameters and input as a rule sees it, with the general paths for what no rule
covers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from qualms.gradients.batch import NotBatchable
from qualms.gradients.nested import each_tensor, tensors_in
from qualms.gradients.precision import same_values
from qualms.gradients.tracing.factors import GradFactor, Outer, Summed
from qualms.gradients.tracing.op_trace import ParamUse
from qualms.gradients.tracing.param_use import roots
from qualms.gradients.tracing.sample_axis import Layout, infer
from qualms.gradients.tracing.sample_ids import SampleIds, UnbatchedOp

if TYPE_CHECKING:
    from qualms.gradients.tracing.recorder import Recorder


class Call:
    """One meeting as a rule sees it."""

    def __init__(
        self,
        recorder: Recorder,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        meeting: ParamUse,
    ) -> None:
        self.recorder, self.func, self.args, self.kwargs, self.meeting = (
            recorder,
            func,
            args,
            kwargs,
            meeting,
        )
        self.rows, self.inputs = recorder.rows, recorder.rows // recorder.rows_per_sample

    def run(self) -> Any:
        """Carry the operation out as it is, on copies of its tracked arguments that nothing else
        may use.
        """
        copies, before = self._copies()
        out = self.run_with(copies)
        # A change in place of a view would lead the graph around the edge that a rule takes hold
        # of.
        out = out.clone() if out._is_view() else out
        self.recorder.reach.enclose(out.grad_fn, before)
        return out

    def _copies(self) -> tuple[dict[int, Tensor], list[Any]]:
        """Leaves in place of the tracked arguments, by id, and the nodes of the graph that all
        others come from.
        """
        copies = {
            id(t): t.detach().requires_grad_() for t in self.meeting.arguments if self.tracked(t)
        }
        others = [t for t in self.meeting.arguments if id(t) not in copies and t.requires_grad]
        return copies, [get_gradient_edge(t).node for t in others]

    def run_with(self, copies: dict[int, Tensor]) -> Any:
        """Carry the operation out with some of its tensors, known by id, replaced."""
        args, kwargs = each_tensor((self.args, self.kwargs), lambda t: copies.get(id(t), t))
        return self.func(*args, **kwargs)

    def tracked(self, t: Any) -> bool:
        """Whether `t` is a parameter or comes from parameters alone."""
        return isinstance(t, Tensor) and id(t) in self.recorder._tracked

    def leave(self, target: Tensor, edges: Sequence[GradientEdge], gradient: Any) -> None:
        """Note that `gradient` (an `Outer` or a `Summed`) turns the cotangents at `edges` into
        target's gradient.
        """
        if id(target) not in self.recorder.weights.names:
            target = self._same_for_all_rows(target)
        self.recorder.pieces.append(GradFactor(target, tuple(edges), gradient))

    def _same_for_all_rows(self, derived: Tensor) -> Tensor:
        """What stands in for `derived` on one row, if every row of it is just that: else it depends
        on the input.

        An input's way around the function mode (a script, numpy, a Python number) ends here.
        """
        alone = self.on_one_row(derived)
        layout = self.layout(derived) if self.recorder.twins else None
        parts = (
            [derived] if layout is None else [layout.part(derived, row) for row in range(self.rows)]
        )
        if not all(same_values(part, alone) for part in parts):
            raise NotBatchable(
                f"an argument of {self.meeting.name} depends on the input in a way that was not seen"
            )
        return alone

    # Which part of a tensor belongs to which row.

    def _twin_meetings(self) -> tuple[ParamUse, ParamUse]:
        assert self.recorder.twins is not None
        twins = self.recorder.twins.of(self.meeting)
        if twins is None or any(
            len(twin.arguments) != len(self.meeting.arguments) for twin in twins
        ):
            raise NotBatchable(f"{self.meeting.name} is not called for every input")
        return twins

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
        """Carry the operation out on copies of its tracked arguments that let one row's gradient be
        told apart.

        A tracked tensor that was expanded to a batch already has a part of its own for each row.
        For anything else the operation runs one row at a time, each with its own copy.
        """
        used = [t for t in self.meeting.arguments if self.tracked(t)]
        if self.recorder.twins is None or all(self.layout(t) for t in used):
            copies = {id(t): t.detach().requires_grad_() for t in used}
            for t in used:
                layout = self.layout(t)
                assert layout is not None
                shape = self.on_one_row(t).shape
                self.leave(
                    t,
                    [get_gradient_edge(copies[id(t)])],
                    Summed.over_rows(layout, self.inputs, shape),
                )
            return self.run_with(copies)
        return self._one_row_at_a_time(used)

    def with_owners(
        self, gradients: dict[int, Callable[[SampleIds], Outer | Summed]] | None = None
    ) -> Any:
        """Carry the operation out where no axis of its result counts the rows: see `owners.py`.

        `gradients` says, for tracked arguments by id, how their gradients follow once owners are
        known; for all others the operation's own derivative serves.
        """
        used = [t for t in self.meeting.arguments if self.tracked(t)]
        copies, before = self._copies()
        out = each_tensor(self.run_with(copies), lambda t: t.clone() if t._is_view() else t)
        results = [t for t in tensors_in(out) if t.requires_grad]
        if not results:
            raise NotBatchable(f"no result of {self.meeting.name} can be differentiated")
        if len(results) == 1:
            self.recorder.reach.enclose(results[0].grad_fn, before)
        edges = tuple(get_gradient_edge(t) for t in results)
        how: dict[int, Callable[[SampleIds], Outer | Summed]] = dict(gradients or {})
        for key, copy in copies.items():
            how.setdefault(key, partial(SampleIds.by_autograd, copy=copy))
        self.recorder.scattered.append(UnbatchedOp(results, edges, [(t, how[id(t)]) for t in used]))
        if gradients is None:
            self.recorder.general |= {
                name for t in used for name in roots(t, self.recorder.weights)
            }
        return out

    def _one_row_at_a_time(self, used: list[Tensor]) -> Any:
        """Runs the operation once per row on fresh copies of `used`, leaves their pieces, joins the
        results.
        """
        if self.meeting.name.endswith("_") and not self.meeting.name.startswith("_"):
            raise NotBatchable(f"{self.meeting.name} changes its argument in place")
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
            self.recorder.general |= roots(t, self.recorder.weights)
        return self._join(outs)

    def _join(self, outs: list[Any]) -> Any:
        """The results of all rows, put together where the batched operation would have put them."""
        place = itertools.count()

        def join(parts: list[Any]) -> Any:
            first = parts[0]
            if isinstance(first, Tensor):
                layout = self.result_layout(next(place))
                if layout is None:
                    raise NotBatchable(
                        f"the result of {self.meeting.name} does not keep the rows apart"
                    )
                return layout.join(parts)
            if isinstance(first, (tuple, list)):
                return type(first)([join([p[i] for p in parts]) for i in range(len(first))])
            return first

        return join(outs)
