"""Rules for products with a weight matrix: ∂W = Σ_t δ_t a_tᵀ."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from qualms.gradients.tracing.factors import Summed
from qualms.gradients.tracing.outer_product import Outer
from qualms.gradients.tracing.rules.broadcast import broadcast
from qualms.gradients.tracing.sample_axis import Layout

if TYPE_CHECKING:
    from qualms.gradients.tracing.op_call import OpCall


def linear(call: OpCall, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """y_t = W a_t + b: ∂W = Σ_t δ_t a_tᵀ, ∂b = Σ_t δ_t.

    Args:
        call: the operation.
        input: a [..., f].
        weight: W [o, f].
        bias: b [o].
    """
    layout = call.input_layout(input)
    if layout is None or weight.ndim != 2 or layout.axis == input.ndim - 1:
        return NotImplemented
    outer = Outer.product(call.samples, layout, input, weight.shape[0], _out_in)
    return _run(call, layout, weight, outer, bias)


def matmul(call: OpCall, input: Tensor, other: Tensor) -> Any:
    """y_t = a_t W with the parameter on the right: ∂W = Σ_t a_t δ_tᵀ.

    A parameter on the left is broadcast over rows.
    """
    if call.is_param(input) or other.ndim != 2 or input.ndim < 2:
        return broadcast(call, input, other)
    layout = call.input_layout(input)
    if layout is None or layout.axis == input.ndim - 1:
        return NotImplemented
    outer = Outer.product(call.samples, layout, input, other.shape[1], _in_out)
    return _run(call, layout, other, outer, bias=None)


def addmm(
    call: OpCall, input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Any:
    """y_t = b + a_t W, as in a transposed linear layer: ∂W = Σ_t a_t δ_tᵀ, ∂b = Σ_t δ_t.

    Args:
        call: the operation.
        input: b [o].
        mat1: a [t, f].
        mat2: W [f, o].
        beta: scale of b; covered if 1.
        alpha: scale of the product; covered if 1.
    """
    layout = call.input_layout(mat1)
    plain = beta == alpha == 1 and input.ndim == 1
    if layout is None or layout.axis == 1 or not plain:
        return NotImplemented
    outer = Outer.product(call.samples, layout, mat1, mat2.shape[1], _in_out)
    return _run(call, layout, mat2, outer, bias=input)


def _run(call: OpCall, layout: Layout, weight: Tensor, outer: Outer, bias: Tensor | None) -> Any:
    """Run a product and add the factors of its parameters.

    Args:
        call: the operation.
        layout: of its input.
        weight: W.
        outer: the gradient of W.
        bias: b, whose gradient is Σ_t δ_t.
    """
    out = call.run()
    edge = get_gradient_edge(out)
    if call.is_param(weight):
        call.add_factor(weight, [edge], outer)
    if call.is_param(bias):
        call.add_factor(bias, [edge], Summed.trailing(call.samples, layout, bias))
    return out


def unbatched_linear(
    call: OpCall, input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Any:
    """`linear` where no axis counts the rows: the same sums, over the positions of each sample.

    Args:
        call: the operation.
        input: a [..., f].
        weight: W [o, f].
        bias: b [o].
    """
    if call.is_param(input) or weight.ndim != 2:
        return NotImplemented
    gradients = {id(weight): lambda ids: ids.product(input, _out_in)}
    if bias is not None:
        gradients[id(bias)] = lambda ids: ids.total(bias)
    return call.run_unbatched(gradients)


def unbatched_matmul(call: OpCall, input: Tensor, other: Tensor) -> Any:
    """`matmul` where no axis counts the rows: the same sum, over the positions of each sample."""
    if call.is_param(input) or other.ndim != 2 or input.ndim < 2:
        return NotImplemented
    return call.run_unbatched({id(other): lambda ids: ids.product(input, _in_out)})


def _out_in(grad: Tensor) -> Tensor:
    """[b, 1, o, f] to [b, o, f]."""
    return grad.squeeze(1)


def _in_out(grad: Tensor) -> Tensor:
    """[b, 1, o, f] to [b, f, o]."""
    return grad.squeeze(1).mT
