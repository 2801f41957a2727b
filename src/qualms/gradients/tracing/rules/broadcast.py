"""The rule for arithmetic with a bare parameter, such as a scale, a bias or a token.

The parameter is replaced by a copy that is expanded along the batch axis of the result. Autograd's
cotangent of that copy, summed over a sample's rows, is the gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from qualms.gradients.tracing.factors import Summed
from qualms.gradients.tracing.sample_axis import Layout

if TYPE_CHECKING:
    from qualms.gradients.tracing.op_call import OpCall

# Operations that broadcast their tensor arguments against each other.
BROADCASTING = {
    "add",
    "addcdiv",
    "addcmul",
    "div",
    "divide",
    "lerp",
    "maximum",
    "minimum",
    "mul",
    "multiply",
    "pow",
    "scaled_dot_product_attention",
    "sub",
    "true_divide",
    "truediv",
    "where",
}


def broadcast(call: OpCall, *args: Any, **kwargs: Any) -> Any:
    """Run y = f(p, x) with a copy p_r of p for each row r of x: ∂p = Σ_r ∂f/∂p_r δ_r.

    p is a parameter, x depends on the input, and δ_r is the cotangent of y's row r.

    Args:
        call: the operation f.
        args: the operation's positional arguments, which `call` has too.
        kwargs: the operation's keyword arguments, which `call` has too.

    Returns:
        y; NotImplemented, so that `OpCall.run_on_copies` runs it, if p cannot be expanded along
        the batch axis of y, or if only a single row is traced, which needs no copies.
    """
    layout = call.find_result_layout() if call.recorder.trace_pair else None
    if layout is None:
        return NotImplemented
    params = [t for t in call.use.arguments if call.is_param(t)]
    # A parameter with a layout was expanded by the model, and has a part for each row already.
    if any(call.find_layout(p) for p in params) or not _can_broadcast(call, layout, params):
        return NotImplemented
    copies: dict[int, Tensor] = {}
    for p in params:
        copy = _expand_along_rows(p, layout, call.result_ndim(), call.num_rows)
        if copy is None:
            return NotImplemented
        copies[id(p)] = copy
    for p in params:
        gradient = Summed.for_broadcast(layout, call.num_samples, p.shape)
        call.add_factor(p, [get_gradient_edge(copies[id(p)])], gradient)
    return call.run_with(lambda t: copies.get(id(t), t))


def _can_broadcast(call: OpCall, layout: Layout, params: list[Tensor]) -> bool:
    """Whether the operation broadcasts its arguments along the batch axis of its result.

    A matrix product does not broadcast its last two axes, so the rows must be on an earlier axis.

    Args:
        call: the operation.
        layout: which axis of the operation's result is the batch axis.
        params: the parameters among the operation's arguments.
    """
    if not call.use.name.strip("_").endswith("matmul"):
        return True
    assert layout.axis is not None
    return layout.axis < call.result_ndim() - 2 and all(p.ndim >= 2 for p in params)


def _expand_along_rows(p: Tensor, layout: Layout, ndim: int, num_rows: int) -> Tensor | None:
    """Make a leaf that repeats a parameter along the batch axis of an operation's result.

    Args:
        p: the parameter.
        layout: which axis of the operation's result is the batch axis.
        ndim: number of axes of the result.
        num_rows: number of rows of the batch.

    Returns:
        The leaf; None if the parameter already has more than one entry on that axis.
    """
    # Broadcasting adds missing axes at the front.
    shape = [1] * (ndim - p.ndim) + list(p.shape)
    if len(shape) > ndim or layout.axis is None or shape[layout.axis] != 1:
        return None
    with_all_axes = p.detach().reshape(shape)
    shape[layout.axis] = layout.entries_per_row * num_rows
    return with_all_axes.expand(shape).requires_grad_()
