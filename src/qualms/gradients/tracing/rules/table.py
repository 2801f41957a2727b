"""The table of rules: how the gradient of a parameter follows from the cotangent of the operation
that uses it.

A rule takes the `Call` and the operation's own arguments, carries the operation out, leaves a piece
for each tracked parameter and returns the result; or it returns NotImplemented, and the general
path takes over. To cover a further
operation: one function, one row in `RULES`, one case in the tests' model list.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from qualms.gradients.precision import at_least_float32
from qualms.gradients.tracing.factors import Outer, Summed
from qualms.gradients.tracing.rules.conv import (
    convolution,
    convolution_rule,
    transposed_convolution_rule,
)
from qualms.gradients.tracing.rules.recurrent_rule import RECURRENT
from qualms.gradients.tracing.rules.scales import (
    batch_norm,
    group_norm,
    instance_norm,
    layer_norm,
    prelu,
    rms_norm,
    row_layout,
    trailing_sum,
)

if TYPE_CHECKING:
    from qualms.gradients.tracing.op_call import Call


def find_rule(name: str) -> Callable[..., Any] | None:
    """The rule for an operation by the name it has in torch: `add`, `add_`, `__radd__` and
    `__iadd__` are one.
    """
    bare = name.strip("_")
    arithmetic = {bare, bare.removeprefix("r"), bare.removeprefix("i")}
    return RULES.get(bare) or (None if arithmetic.isdisjoint(BROADCASTING) else broadcasting)


# Weights that multiply: δ ⊗ a.


def linear(call: Call, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """y = x Wᵀ + b: ∂W = Σ_t δ_t a_tᵀ, ∂b = Σ_t δ_t."""
    layout = row_layout(call, input)
    if layout is None or weight.ndim != 2 or layout.axis == input.ndim - 1:
        return NotImplemented
    out = call.run()
    edge = get_gradient_edge(out)
    if call.tracked(weight):
        outer = Outer.product(
            call.inputs, layout, input, weight.shape[0], lambda grad: grad.squeeze(1)
        )
        call.leave(weight, [edge], outer)
    if bias is not None and call.tracked(bias):
        call.leave(bias, [edge], trailing_sum(call.inputs, layout, bias))
    return out


def matmul(call: Call, input: Tensor, other: Tensor) -> Any:
    """y = x W with the parameter on the right: ∂W = Σ_t a_t δ_tᵀ. A parameter on the left is
    broadcast over rows.
    """
    if call.tracked(input) or other.ndim != 2 or input.ndim < 2:
        return broadcasting(call, input, other)
    layout = row_layout(call, input)
    if layout is None or layout.axis == input.ndim - 1:
        return NotImplemented
    out = call.run()
    outer = Outer.product(
        call.inputs, layout, input, other.shape[1], lambda grad: grad.squeeze(1).mT
    )
    call.leave(other, [get_gradient_edge(out)], outer)
    return out


def addmm(
    call: Call, input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Any:
    """y = b + x W, as in a transposed linear layer."""
    layout = row_layout(call, mat1)
    plain = beta == alpha == 1 and input.ndim == 1
    if layout is None or layout.axis == 1 or not plain:
        return NotImplemented
    out = call.run()
    edge = get_gradient_edge(out)
    if call.tracked(mat2):
        outer = Outer.product(
            call.inputs, layout, mat1, mat2.shape[1], lambda grad: grad.squeeze(1).mT
        )
        call.leave(mat2, [edge], outer)
    if call.tracked(input):
        call.leave(input, [edge], trailing_sum(call.inputs, layout, input))
    return out


def scattered_linear(call: Call, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """`linear` where no axis counts the rows."""
    if call.tracked(input) or weight.ndim != 2:
        return NotImplemented
    gradients = {id(weight): lambda whose: whose.product(input, lambda grad: grad.squeeze(1))}
    return call.with_owners(
        gradients | ({} if bias is None else {id(bias): lambda whose: whose.total(bias)})
    )


def scattered_matmul(call: Call, input: Tensor, other: Tensor) -> Any:
    """`matmul` where no axis counts the rows."""
    if call.tracked(input) or other.ndim != 2 or input.ndim < 2:
        return NotImplemented
    return call.with_owners(
        {id(other): lambda whose: whose.product(input, lambda grad: grad.squeeze(1).mT)}
    )


# Embeddings: δ ⊗ one-hot.


def embedding(
    call: Call,
    weight: Tensor,
    input: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """∂W[v] = Σ_t [id_t = v] δ_t: pairs of positions count if they hold the same id. The padding
    row stays zero.
    """
    layout = row_layout(call, input)
    if layout is None or scale_grad_by_freq or not call.tracked(weight):
        # with scale_grad_by_freq autograd returns something else than the derivative
        return NotImplemented
    out = call.run()
    inputs, (vocabulary, features) = call.inputs, weight.shape

    def ids() -> Tensor:
        return layout.leading(input).reshape(inputs, -1)

    def grad_outputs(d: Tensor) -> Tensor:
        d = layout.leading(d).reshape(inputs, -1, 1, features)
        return d * (ids() != padding_idx)[:, :, None, None]

    def pairs() -> Tensor:
        i = ids()
        return (i[:, :, None] == i[:, None, :]).to(at_least_float32(weight).dtype)

    def activations() -> Tensor:
        return F.one_hot(ids(), vocabulary).to(weight.dtype).unsqueeze(2)

    sizes = (input.numel() // inputs, features, vocabulary, 1)
    outer = Outer(grad_outputs, activations, lambda grad: grad.squeeze(1).mT, inputs, sizes, pairs)
    call.leave(weight, [get_gradient_edge(out)], outer)
    return out


# Arithmetic with a bare parameter: a copy of it for each row, along the row axis of the result.


def broadcasting(call: Call, *args: Any, **kwargs: Any) -> Any:
    """Any operation that broadcasts: its own derivative, at a copy expanded along the rows, is the
    gradient.
    """
    used = [t for t in call.meeting.arguments if call.tracked(t)]
    layout = call.result_layout() if call.recorder.twins else None
    if layout is None or layout.axis is None or any(call.layout(t) for t in used):
        return NotImplemented
    ndim = call.result_ndim()
    # A matrix product broadcasts the axes before the last two only.
    if call.meeting.name.strip("_").endswith("matmul") and (
        layout.axis >= ndim - 2 or min(t.ndim for t in used) < 2
    ):
        return NotImplemented
    copies: dict[int, Tensor] = {}
    for t in used:
        shape = [1] * (ndim - t.ndim) + list(t.shape)
        if len(shape) > ndim or shape[layout.axis] != 1:
            return NotImplemented
        padded = t.detach().reshape(shape)
        shape[layout.axis] = layout.per_row * call.rows
        copies[id(t)] = padded.expand(shape).requires_grad_()
    for t in used:
        gradient = Summed.broadcast(layout, call.inputs, t.shape)
        call.leave(t, [get_gradient_edge(copies[id(t)])], gradient)
    return call.run_with(copies)


# Operations that broadcast their tensor arguments against each other.
BROADCASTING = frozenset(
    (
        "add",
        "sub",
        "mul",
        "multiply",
        "div",
        "divide",
        "true_divide",
        "truediv",
        "pow",
        "maximum",
        "minimum",
        "where",
    )
) | frozenset(("lerp", "addcmul", "addcdiv", "scaled_dot_product_attention"))
RULES: dict[str, Callable[..., Any]] = {
    "linear": linear,
    "matmul": matmul,
    "mm": matmul,
    "addmm": addmm,
    "embedding": embedding,
    "batch_norm": batch_norm,
    "group_norm": group_norm,
    "instance_norm": instance_norm,
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
    "prelu": prelu,
    "convolution": convolution,
    **{f"conv{n}d": convolution_rule(n) for n in (1, 2, 3)},
    **{f"conv_transpose{n}d": transposed_convolution_rule(n) for n in (1, 2, 3)},
    **RECURRENT,
}
# The same where the values of the input decide what stands where.
SCATTERED: dict[str, Callable[..., Any]] = {
    "linear": scattered_linear,
    "matmul": scattered_matmul,
    "mm": scattered_matmul,
}
