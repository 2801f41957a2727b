"""One operation on parameters and input, as it is passed to a rule.

It also has the general paths for operations that no rule covers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from qualms.errors import reason
from qualms.gradients.batch import NotBatchable, map_tensors, tensors_in
from qualms.gradients.function_modes import run_function
from qualms.gradients.precision import same_values
from qualms.gradients.tracing.factors import GradFactor, Summed
from qualms.gradients.tracing.outer_product import Outer
from qualms.gradients.tracing.param_use import ParamUse, roots
from qualms.gradients.tracing.sample_axis import Layout, infer_layout
from qualms.gradients.tracing.sample_ids import SampleIds, UnbatchedOp

if TYPE_CHECKING:
    from qualms.gradients.tracing.recorder import Recorder


@dataclass(eq=False)
class OpCall:
    """An operation that takes both parameters and something that depends on the input.

    A rule runs it with `run`, and adds a `GradFactor`, which says how to compute a gradient, for
    each parameter with `add_factor`.

    Args:
        recorder: the recorder of this forward pass.
        func: the operation, a function of torch.
        args: the operation's positional arguments.
        kwargs: the operation's keyword arguments.
        use: the operation's name and tensors, and where it stands in the forward pass.
    """

    recorder: Recorder
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    use: ParamUse

    # What rules use.

    @property
    def rows(self) -> int:
        """Number of rows of the batch."""
        return self.recorder.rows

    @property
    def samples(self) -> int:
        """Number of samples that the rows belong to."""
        return self.recorder.rows // self.recorder.rows_per_sample

    def is_param(self, t: Any) -> TypeGuard[Tensor]:
        """Whether `t` is a selected parameter, or a tensor computed from parameters alone."""
        return isinstance(t, Tensor) and self.recorder.is_param(t)

    def run(self) -> Any:
        """Run the operation on detached copies of its parameters, and return its result.

        So the gradient of the parameters comes from the rule's factor alone, not from autograd.
        """
        copies, before = self._param_copies()
        out = self._run_with(copies)
        # If the result is a view and is changed in place later, autograd replaces its node, and the
        # edge that a rule has taken of it gets no cotangent.
        if out._is_view():
            out = out.clone()
        # If the logits depend on the inside of the operation in another way than by `out`, the
        # factor would miss that part: `require_no_bypass` then raises.
        self.recorder.reach.enclose(out.grad_fn, before)
        return out

    def run_for_rows(self, part_of: Callable[[Tensor], Tensor]) -> Any:
        """Run the operation with some tensors replaced: by one row's part, or a copy for each row.

        Args:
            part_of: maps each tensor among the arguments to its replacement, or to itself.

        Returns:
            The operation's result.

        Raises:
            NotBatchable: if the operation does not take the shapes of the replacements.
        """
        args, kwargs = map_tensors((self.args, self.kwargs), part_of)
        try:
            return run_function(self.func, args, kwargs)
        except torch.OutOfMemoryError:
            raise
        # torch's error for shapes has no type of its own.
        except RuntimeError as error:
            if self.recorder.trace_pair is None:
                # Tracing one row: no shape was replaced, so the model is at fault.
                raise
            raise NotBatchable(
                f"{self.use.name} cannot run on one row at a time: {reason(error)}"
            ) from error

    def add_factor(
        self, target: Tensor, edges: Sequence[GradientEdge], gradient: Outer | Summed
    ) -> None:
        """Record how a parameter's gradient follows from the cotangents at edges of the graph.

        Args:
            target: a tensor for which `is_param` holds.
            edges: the edges of the autograd graph whose cotangents determine the gradient.
            gradient: computes the gradient from these cotangents.
        """
        if id(target) not in self.recorder.weights.names:  # computed from parameters
            target = self._same_for_all_rows(target)
        self.recorder.factors.append(GradFactor(target, tuple(edges), gradient))

    # Which part of a tensor belongs to which row.

    def layout(self, t: Tensor) -> Layout | None:
        """Find which axis of an argument counts the rows; None if no axis does."""
        # A single row, which owns the whole tensor.
        if self.recorder.trace_pair is None:
            return Layout()
        place = self.use.place_of(t)
        one, two = self._uses_in_pair()
        return infer_layout(one.arguments[place], two.arguments[place], t.shape, self.rows)

    def input_layout(self, t: Tensor) -> Layout | None:
        """Return the layout of an argument, or None if it is computed from parameters alone."""
        return None if self.is_param(t) else self.layout(t)

    def result_layout(self, place: int = 0) -> Layout | None:
        """Find which axis of result number `place` counts the rows; None if no axis does."""
        # A single row, which owns the whole tensor.
        if self.recorder.trace_pair is None:
            return Layout()
        one, two = self._uses_in_pair()
        if place >= min(len(one.results), len(two.results)):
            raise NotBatchable(
                f"{self.use.name} does not return the same structure for every input"
            )
        return infer_layout(one.results[place], two.results[place], None, self.rows)

    def result_ndim(self) -> int:
        """Return the number of axes of the first result."""
        return self._uses_in_pair()[0].results[0].ndim

    def on_one_row(self, t: Tensor) -> Tensor:
        """Return what the operation took in place of argument `t` in the pass over a single row."""
        if self.recorder.trace_pair is None:
            return t
        return self._uses_in_pair()[0].arguments[self.use.place_of(t)]

    def _uses_in_pair(self) -> tuple[ParamUse, ParamUse]:
        """Find this operation in the traces on one row and on two.

        Raises:
            NotBatchable: if a trace lacks it, or it has another number of tensors there.
        """
        assert self.recorder.trace_pair is not None
        uses = self.recorder.trace_pair.find(self.use)
        number = len(self.use.arguments)
        if uses is None or any(len(use.arguments) != number for use in uses):
            raise NotBatchable(f"{self.use.name} is not called for every input")
        return uses

    def _same_for_all_rows(self, derived: Tensor) -> Tensor:
        """Return the value of `derived` on one row, after checking that all rows have the same.

        Args:
            derived: a tensor computed from parameters alone, as far as the recorder sees.

        Raises:
            NotBatchable: if rows differ, so that the tensor depends on the input past the recorder:
                through TorchScript, numpy or a Python number.
        """
        alone = self.on_one_row(derived)
        layout = self.layout(derived)
        parts = [derived]
        if layout is not None:
            parts = [layout.part(derived, row) for row in range(self.rows)]
        if not all(same_values(part, alone) for part in parts):
            raise NotBatchable(
                f"an argument of {self.use.name} depends on the input in a way that cannot be "
                "traced"
            )
        return alone

    # The general paths: exact for any operation.

    def run_on_copies(self) -> Any:
        """Run the operation on copies of its parameters that keep the rows' gradients separate.

        Adds the factors and returns the result: the path for operations that no rule covers.
        If every parameter was expanded to a batch before, one copy has a part for each row already.
        Else the operation runs one row at a time, with a new copy of the parameters for each row.
        """
        used = [t for t in self.use.arguments if self.is_param(t)]
        layouts = [self.layout(t) for t in used]
        if not all(layouts):  # some parameter has no row axis
            return self._run_row_by_row(used)
        copies = {id(t): t.detach().requires_grad_() for t in used}
        for t, layout in zip(used, layouts, strict=True):
            assert layout is not None
            shape = self.on_one_row(t).shape
            gradient = Summed.row_parts(layout, self.samples, shape)
            self.add_factor(t, [get_gradient_edge(copies[id(t)])], gradient)
        return self._run_with(copies)

    def run_unbatched(
        self, gradients: dict[int, Callable[[SampleIds], Outer | Summed]] | None = None
    ) -> Any:
        """Run the operation where no axis of its result counts the rows (see `sample_ids.py`).

        Its factors follow at the end of the forward pass, when backward passes from the logits can
        show which sample each entry of the result belongs to.

        Args:
            gradients: from the id of a parameter to a function that builds its gradient once the
                samples of the result's entries are known. Without one, the gradient comes from
                autograd's derivative of the operation.
        """
        used = [t for t in self.use.arguments if self.is_param(t)]
        copies, before = self._param_copies()
        out = map_tensors(self._run_with(copies), lambda t: t.clone() if t._is_view() else t)
        results = [t for t in tensors_in(out) if t.requires_grad]
        if not results:
            raise NotBatchable(f"no result of {self.use.name} is differentiable")
        if len(results) == 1:
            self.recorder.reach.enclose(results[0].grad_fn, before)
        edges = tuple(get_gradient_edge(t) for t in results)
        builders: dict[int, Callable[[SampleIds], Outer | Summed]] = dict(gradients or {})
        for key, copy in copies.items():
            builders.setdefault(key, partial(SampleIds.by_autograd, copy=copy))
        op = UnbatchedOp(results, edges, [(t, builders[id(t)]) for t in used])
        self.recorder.unbatched_ops.append(op)
        if gradients is None:
            self._mark_without_rule(used)
        return out

    def _run_with(self, copies: dict[int, Tensor]) -> Any:
        """Run the operation with the tensors whose ids are in `copies` replaced by these copies."""
        args, kwargs = map_tensors((self.args, self.kwargs), lambda t: copies.get(id(t), t))
        return run_function(self.func, args, kwargs)

    def _param_copies(self) -> tuple[dict[int, Tensor], list[Any]]:
        """Make a leaf in place of each parameter among the arguments.

        Returns:
            The leaves, by the id of the parameter, and the autograd nodes of the other arguments.
        """
        copies: dict[int, Tensor] = {}
        nodes: list[Any] = []
        for t in self.use.arguments:
            if self.is_param(t):
                copies[id(t)] = t.detach().requires_grad_()
            elif t.requires_grad:
                nodes.append(get_gradient_edge(t).node)
        return copies, nodes

    def _mark_without_rule(self, used: list[Tensor]) -> None:
        """Note that no rule covers this use of the parameters that `used` were computed from."""
        for t in used:
            self.recorder.without_rule |= roots(t, self.recorder.weights)

    def _run_row_by_row(self, used: list[Tensor]) -> Any:
        """Run the operation once per row on new copies of the parameters `used`; join results."""
        if self.use.name.endswith("_") and not self.use.name.startswith("_"):
            raise NotBatchable(f"{self.use.name} changes its argument in place")
        layouts = {id(t): self.layout(t) for t in self.use.arguments}
        edges_of: dict[int, list[GradientEdge]] = {id(t): [] for t in used}

        def part_of(t: Tensor, row: int) -> Tensor:
            """Return a new copy of a parameter, or a row's part of another tensor."""
            if id(t) in edges_of:
                copy = t.detach().requires_grad_()
                edges_of[id(t)].append(get_gradient_edge(copy))
                return copy
            layout = layouts[id(t)]
            return t if layout is None else layout.part(t, row)

        outs = [self.run_for_rows(partial(part_of, row=row)) for row in range(self.rows)]
        for t in used:
            shape = self.on_one_row(t).shape
            self.add_factor(t, edges_of[id(t)], Summed.from_row_copies(self.samples, shape))
        self._mark_without_rule(used)
        return self._join(outs)

    def _join(self, outs: list[Any]) -> Any:
        """Join the rows' results into what the operation on the whole batch would have returned.

        Args:
            outs: the result of each row, a tensor or nested tuples and lists of tensors.
        """
        # The number of the next tensor in the result.
        place = itertools.count()

        def join(parts: list[Any]) -> Any:
            """Join the rows' values of one part of the result; other values are the first row's."""
            first = parts[0]
            if isinstance(first, Tensor):
                layout = self.result_layout(next(place))
                if layout is None:
                    raise NotBatchable(f"the result of {self.use.name} has no batch axis")
                return layout.join(parts)
            if isinstance(first, (tuple, list)):
                columns = zip(*parts, strict=True)
                return type(first)([join(list(column)) for column in columns])
            return first

        return join(outs)
