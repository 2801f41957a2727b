"""The rule for arithmetic with a bare parameter, such as a scale, a bias or a token.

The parameter is replaced by a copy that is expanded along the row axis of the result. Autograd's
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

    Args:
        call: the operation f.
        args: the operation's positional arguments, which `call` has too.
        kwargs: the operation's keyword arguments, which `call` has too.

    Returns:
        y; NotImplemented, so that the general path runs it, if p cannot be expanded along the axis
        of y that counts the rows, or if only a single row is traced.
    """
    layout = call.result_layout() if call.recorder.trace_pair else None
    if layout is None:
        return NotImplemented
    params = [t for t in call.use.arguments if call.is_param(t)]
    if any(call.layout(t) for t in params) or not _broadcasts(call, layout, params):
        return NotImplemented
    copies: dict[int, Tensor] = {}
    for t in params:
        copy = _expand(t, layout, call.result_ndim(), call.rows)
        if copy is None:
            return NotImplemented
        copies[id(t)] = copy
    for t in params:
        gradient = Summed.broadcast(layout, call.samples, t.shape)
        call.add_factor(t, [get_gradient_edge(copies[id(t)])], gradient)
    return call.run_for_rows(lambda t: copies.get(id(t), t))


def _broadcasts(call: OpCall, layout: Layout, params: list[Tensor]) -> bool:
    """Whether the operation broadcasts its arguments along the row axis of its result.

    A matrix product does not broadcast its last two axes, so the rows must be on an axis before.
    """
    if not call.use.name.strip("_").endswith("matmul"):
        return True
    assert layout.axis is not None
    return layout.axis < call.result_ndim() - 2 and all(t.ndim >= 2 for t in params)


def _expand(t: Tensor, layout: Layout, ndim: int, rows: int) -> Tensor | None:
    """Make a leaf that repeats a parameter along the row axis; None if the parameter has that axis.

    Args:
        t: the parameter.
        layout: which axis of the operation's result counts the rows.
        ndim: number of axes of the result.
        rows: number of rows of the batch.
    """
    shape = [1] * (ndim - t.ndim) + list(t.shape)
    if len(shape) > ndim or layout.axis is None or shape[layout.axis] != 1:
        return None
    padded = t.detach().reshape(shape)
    shape[layout.axis] = layout.per_row * rows
    return padded.expand(shape).requires_grad_()
