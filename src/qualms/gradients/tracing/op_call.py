"""One operation on parameters and input, as it is passed to a rule.

It also runs the operations that no rule covers, which is exact but slower.
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

# Builds the gradient of a parameter of an operation, once the samples of the entries of its results
# are known.
GradientBuilder = Callable[[SampleIds], Outer | Summed]


@dataclass(eq=False)
class OpCall:
    """One call of an operation that takes both parameters and something that depends on the input.

    A rule runs the operation with `run`. With `add_factor` it adds a `GradFactor` for each
    parameter, which states how to compute the parameter's gradient.

    Args:
        recorder: the recorder of this forward pass.
        func: the operation, a function of torch.
        args: the operation's positional arguments.
        kwargs: the operation's keyword arguments.
        use: the operation's name and tensors, and how to find it in other forward passes.
    """

    recorder: Recorder
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    use: ParamUse

    # What rules use.

    @property
    def num_rows(self) -> int:
        """Number of rows of the batch; a sample and its perturbed copies have a row each."""
        return self.recorder.num_rows

    @property
    def num_samples(self) -> int:
        """Number of samples that the rows belong to."""
        return self.recorder.num_rows // self.recorder.rows_per_sample

    def is_param(self, t: Any) -> TypeGuard[Tensor]:
        """Whether `t` is a selected parameter, or a tensor computed from parameters alone."""
        return isinstance(t, Tensor) and self.recorder.is_param(t)

    def run(self) -> Any:
        """Run the operation on detached copies of its parameters, and return its result.

        Autograd then computes no gradients of the parameters: they come from the rule's factors
        alone.
        """
        copies, argument_nodes = self._copy_params()
        result = self._run_with_copies(copies)
        # If the result is a view and is changed in place later, autograd replaces its node, and the
        # edge that a rule took from it gets no cotangent.
        if result._is_view():
            result = result.clone()
        # If the logits depend on the inside of the operation in another way than by `result`, the
        # factor would miss that part: `require_no_bypass` then raises.
        self.recorder.inner_nodes.add_operation(result.grad_fn, argument_nodes)
        return result

    def run_with(self, replace: Callable[[Tensor], Tensor]) -> Any:
        """Run the operation with other tensors as arguments, such as the parts of a single row.

        Args:
            replace: maps each tensor among the arguments to its replacement, or to itself.

        Returns:
            The operation's result.

        Raises:
            NotBatchable: if the operation does not take the shapes of the replacements.
        """
        args, kwargs = map_tensors((self.args, self.kwargs), replace)
        try:
            return run_function(self.func, args, kwargs)
        # Also a RuntimeError, but not about shapes.
        except torch.OutOfMemoryError:
            raise
        # torch's error for wrong shapes has no type of its own.
        except RuntimeError as error:
            # Tracing one row: no shape was replaced, so the error is the model's own.
            if self.recorder.trace_pair is None:
                raise
            raise NotBatchable(
                f"{self.use.name} cannot run on one sample at a time: {reason(error)}"
            ) from error

    def add_factor(
        self,
        target: Tensor,
        edges: Sequence[GradientEdge],
        gradient: Outer | Summed,
    ) -> None:
        """Record how a parameter's gradient follows from the cotangents at edges of the graph.

        Args:
            target: a tensor for which `is_param` holds.
            edges: the edges of the autograd graph whose cotangents determine the gradient.
            gradient: computes the gradient from these cotangents.
        """
        # Not a leaf, so it was computed from parameters, and may have been expanded to all rows.
        if id(target) not in self.recorder.weights.names:
            target = self._reduce_to_one_row(target)
        self.recorder.factors.append(GradFactor(target, tuple(edges), gradient))

    # Which part of a tensor belongs to which row.

    def find_layout(self, t: Tensor) -> Layout | None:
        """Find the batch axis of the argument `t`; None if there is none."""
        # A single row, which owns the whole tensor.
        if self.recorder.trace_pair is None:
            return Layout()
        index = self.use.index_of(t)
        one, two = self._find_in_trace_pair()
        return infer_layout(one.arguments[index], two.arguments[index], t.shape, self.num_rows)

    def find_input_layout(self, t: Tensor) -> Layout | None:
        """Find the batch axis of the argument `t`; None if it is a parameter.

        As `find_layout`, but for an argument that must depend on the input.
        """
        return None if self.is_param(t) else self.find_layout(t)

    def find_result_layout(self, index: int = 0) -> Layout | None:
        """Find the batch axis of a result; None if there is none.

        Args:
            index: index of the result among all tensors that the operation returns.
        """
        # A single row, which owns the whole tensor.
        if self.recorder.trace_pair is None:
            return Layout()
        one, two = self._find_in_trace_pair()
        if index >= min(len(one.results), len(two.results)):
            raise NotBatchable(
                f"{self.use.name} does not return the same structure for every input"
            )
        return infer_layout(one.results[index], two.results[index], None, self.num_rows)

    def result_ndim(self) -> int:
        """Return the number of axes of the first result, known before the operation runs."""
        return self._find_in_trace_pair()[0].results[0].ndim

    def value_on_one_row(self, t: Tensor) -> Tensor:
        """Return the tensor that stood in place of argument `t` in the pass over a single row."""
        # Without a pair of traces, this pass itself is over a single row.
        if self.recorder.trace_pair is None:
            return t
        return self._find_in_trace_pair()[0].arguments[self.use.index_of(t)]

    def _find_in_trace_pair(self) -> tuple[ParamUse, ParamUse]:
        """Find this operation in the traces on one row and on two.

        Returns:
            The use in the pass on one row, and that in the pass on two.

        Raises:
            NotBatchable: if a trace lacks it, or it has another number of tensors there.
        """
        assert self.recorder.trace_pair is not None
        uses = self.recorder.trace_pair.find(self.use)
        num_arguments = len(self.use.arguments)
        if uses is None or any(len(use.arguments) != num_arguments for use in uses):
            raise NotBatchable(f"{self.use.name} is not called for every input")
        return uses

    def _reduce_to_one_row(self, derived: Tensor) -> Tensor:
        """Return the value that `derived` has on one row, and require all rows to have the same.

        Args:
            derived: a tensor computed from parameters alone, as far as the recorder sees.

        Raises:
            NotBatchable: if rows differ, so that the tensor depends on the input in a way that the
                recorder does not see: through TorchScript, NumPy or a Python number.
        """
        on_one_row = self.value_on_one_row(derived)
        layout = self.find_layout(derived)
        if layout is None:
            row_parts = [derived]
        else:
            rows = range(self.num_rows)
            row_parts = [layout.select_row(derived, row) for row in rows]
        if not all(same_values(part, on_one_row) for part in row_parts):
            raise NotBatchable(
                f"an argument of {self.use.name} depends on the input in a way that cannot be "
                "traced"
            )
        return on_one_row

    # What runs an operation that no rule covers.

    def run_on_copies(self) -> Any:
        """Run an operation that no rule covers, on copies of its parameters, and add their factors.

        If the model itself repeated every parameter for each row, a copy has a part for each row,
        and its cotangent too. Otherwise the operation runs one row at a time, with a new copy of
        the parameters for each row.

        Returns:
            The operation's result.
        """
        params = [t for t in self.use.arguments if self.is_param(t)]
        layouts = [self.find_layout(param) for param in params]
        if not all(layouts):  # some parameter has no batch axis
            return self._run_row_by_row(params)
        copies = {id(param): param.detach().requires_grad_() for param in params}
        for param, layout in zip(params, layouts, strict=True):
            assert layout is not None
            shape = self.value_on_one_row(param).shape
            gradient = Summed.for_repeated(layout, self.num_samples, shape)
            self.add_factor(param, [get_gradient_edge(copies[id(param)])], gradient)
        return self._run_with_copies(copies)

    def run_unbatched(self, builders: dict[int, GradientBuilder] | None = None) -> Any:
        """Run the operation although its result has no batch axis (see `sample_ids.py`).

        Its factors are added at the end of the forward pass, when backward passes from the logits
        can show which sample each entry of the result belongs to.

        Args:
            builders: a dict from the id of a parameter to the function that builds its gradient,
                once the samples of the result's entries are known. The gradients of parameters
                without a builder come from autograd's derivative of the operation. None if no rule
                covers the operation.

        Returns:
            The operation's result.
        """
        params = [t for t in self.use.arguments if self.is_param(t)]
        copies, argument_nodes = self._copy_params()
        out = self._run_with_copies(copies)
        # Views are cloned for the reason that `run` states.
        out = map_tensors(out, lambda t: t.clone() if t._is_view() else t)
        results = [t for t in tensors_in(out) if t.requires_grad]
        if not results:
            raise NotBatchable(f"no result of {self.use.name} is differentiable")
        # Several results may share nodes, which then cannot be assigned to one of them.
        if len(results) == 1:
            self.recorder.inner_nodes.add_operation(results[0].grad_fn, argument_nodes)
        edges = tuple(get_gradient_edge(t) for t in results)
        all_builders: dict[int, GradientBuilder] = dict(builders or {})
        for param_id, copy in copies.items():
            all_builders.setdefault(param_id, partial(SampleIds.for_argument, copy=copy))
        gradients = [(param, all_builders[id(param)]) for param in params]
        self.recorder.unbatched_ops.append(UnbatchedOp(results, edges, gradients))
        if builders is None:
            self._mark_without_rule(params)
        return out

    def _run_with_copies(self, copies: dict[int, Tensor]) -> Any:
        """Run the operation with the tensors whose ids are in `copies` replaced by these copies."""
        args, kwargs = map_tensors((self.args, self.kwargs), lambda t: copies.get(id(t), t))
        return run_function(self.func, args, kwargs)

    def _copy_params(self) -> tuple[dict[int, Tensor], list[Any]]:
        """Copy each parameter among the arguments to a leaf of its own.

        Returns:
            A dict from the id of a parameter to its copy, and a list of the autograd nodes of the
            other arguments that require gradients, where the graph of this operation begins.
        """
        copies: dict[int, Tensor] = {}
        argument_nodes: list[Any] = []
        for t in self.use.arguments:
            if self.is_param(t):
                copies[id(t)] = t.detach().requires_grad_()
            elif t.requires_grad:
                argument_nodes.append(get_gradient_edge(t).node)
        return copies, argument_nodes

    def _mark_without_rule(self, params: list[Tensor]) -> None:
        """Add parameters to `Recorder.without_rule`, which reports the layers that no rule covers.

        Args:
            params: the arguments of the operation that were computed from parameters alone.
        """
        for param in params:
            self.recorder.without_rule |= roots(param, self.recorder.weights)

    def _run_row_by_row(self, params: list[Tensor]) -> Any:
        """Run the operation once per row, with new copies of its parameters, and join the results.

        Args:
            params: the arguments of the operation that were computed from parameters alone.

        Returns:
            What the operation would return for the whole batch.
        """
        # `add_` changes its argument, `__add__` does not.
        if self.use.name.endswith("_") and not self.use.name.startswith("_"):
            raise NotBatchable(f"{self.use.name} modifies its argument in place")
        layouts = {id(t): self.find_layout(t) for t in self.use.arguments}
        # From the id of a parameter to the edges of its copies, one for each row.
        copy_edges: dict[int, list[GradientEdge]] = {id(param): [] for param in params}

        def select_or_copy(t: Tensor, row: int) -> Tensor:
            """Return a new copy of a parameter, or a row's part of another tensor."""
            if id(t) in copy_edges:
                copy = t.detach().requires_grad_()
                copy_edges[id(t)].append(get_gradient_edge(copy))
                return copy
            layout = layouts[id(t)]
            return t if layout is None else layout.select_row(t, row)

        row_results: list[Any] = []
        for row in range(self.num_rows):
            row_results.append(self.run_with(partial(select_or_copy, row=row)))
        for param in params:
            shape = self.value_on_one_row(param).shape
            gradient = Summed.for_row_copies(self.num_samples, shape)
            self.add_factor(param, copy_edges[id(param)], gradient)
        self._mark_without_rule(params)
        return self._join_results(row_results)

    def _join_results(self, row_results: list[Any]) -> Any:
        """Join the rows' results into what the operation on the whole batch would have returned.

        Args:
            row_results: the result of each row, a tensor or nested tuples and lists of tensors.
        """
        # The index of the next tensor in the result, as `find_result_layout` takes it.
        next_index = itertools.count()

        def join(values: list[Any]) -> Any:
            """Join a tensor or tuple of all rows; of other values, return that of the first row."""
            first = values[0]
            if isinstance(first, Tensor):
                layout = self.find_result_layout(next(next_index))
                if layout is None:
                    raise NotBatchable(f"the result of {self.use.name} has no batch axis")
                return layout.join_rows(values)
            if isinstance(first, (tuple, list)):
                # For each entry of the tuples, its values in all rows.
                values_by_entry = zip(*values, strict=True)
                return type(first)([join(list(entry_values)) for entry_values in values_by_entry])
            return first

        return join(row_results)
