"""Rules for products with a weight matrix: ∂W = Σ_t δ_t a_tᵀ."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from qualms.gradients.tracing.factors import Summed
from qualms.gradients.tracing.outer_product import Outer, in_out, out_in
from qualms.gradients.tracing.rules.broadcast import broadcast

if TYPE_CHECKING:
    from qualms.gradients.tracing.op_call import OpCall


def linear(call: OpCall, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """Run a linear layer, y_t = W a_t + b: ∂W = Σ_t δ_t a_tᵀ, ∂b = Σ_t δ_t.

    Args:
        call: the operation.
        input: a [..., f].
        weight: W [o, f].
        bias: b [o].

    Returns:
        The result; NotImplemented, so that the general path runs it, if W is a vector, or if no
        axis of `a`, or its last one, counts the rows.
    """
    if weight.ndim != 2:
        return NotImplemented
    return _run(call, input, weight, bias, out_axis=0)


def matmul(call: OpCall, input: Tensor, other: Tensor) -> Any:
    """Run a matrix product with the parameter on the right, y_t = a_t W: ∂W = Σ_t a_t δ_tᵀ.

    If the parameter is on the left, or W is not a matrix, the rule `broadcast` runs it.

    Args:
        call: the operation.
        input: a [..., f].
        other: W [f, o].

    Returns:
        The result; NotImplemented, so that the general path runs it, if no axis of `a`, or its last
        one, counts the rows.
    """
    if call.is_param(input) or other.ndim != 2 or input.ndim < 2:
        return broadcast(call, input, other)
    return _run(call, input, other, None, out_axis=1)


def addmm(
    call: OpCall, input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Any:
    """Run y_t = b + a_t W, a linear layer with Wᵀ: ∂W = Σ_t a_t δ_tᵀ, ∂b = Σ_t δ_t.

    Args:
        call: the operation.
        input: b [o].
        mat1: a [t, f].
        mat2: W [f, o].
        beta: scale of b; the rule covers 1 alone.
        alpha: scale of the product; the rule covers 1 alone.

    Returns:
        The result; NotImplemented, so that the general path runs it, if the rule does not cover it.
    """
    if beta != 1 or alpha != 1 or input.ndim != 1:
        return NotImplemented
    return _run(call, mat1, mat2, input, out_axis=1)


def _run(call: OpCall, a: Tensor, weight: Tensor, bias: Tensor | None, out_axis: int) -> Any:
    """Run a product and add the factors of its parameters.

    Args:
        call: the operation.
        a: input of the product [..., f].
        weight: W [o, f] or [f, o].
        bias: b [o].
        out_axis: the axis of W that counts the features o of the product.

    Returns:
        The result; NotImplemented if no axis of `a`, or its last one, counts the rows.
    """
    layout = call.input_layout(a)
    if layout is None or layout.axis == a.ndim - 1:
        return NotImplemented
    out = call.run()
    edge = get_gradient_edge(out)
    if call.is_param(weight):
        arrange = in_out if out_axis else out_in
        features = weight.shape[out_axis]
        outer = Outer.product(call.samples, layout, a, features, arrange)
        call.add_factor(weight, [edge], outer)
    if call.is_param(bias):
        call.add_factor(bias, [edge], Summed.trailing(call.samples, layout, bias))
    return out


def unbatched_linear(
    call: OpCall, input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Any:
    """Run `linear` where no axis counts the rows: the same sums over each sample's positions.

    Args:
        call: the operation.
        input: a [..., f].
        weight: W [o, f].
        bias: b [o].

    Returns:
        The result; NotImplemented, so that autograd's derivative is used, if the parameter is the
        input or W is a vector.
    """
    if call.is_param(input) or weight.ndim != 2:
        return NotImplemented
    gradients = {id(weight): lambda ids: ids.product(input, out_in)}
    if bias is not None:
        gradients[id(bias)] = lambda ids: ids.total(bias)
    return call.run_unbatched(gradients)


def unbatched_matmul(call: OpCall, input: Tensor, other: Tensor) -> Any:
    """Run `matmul` where no axis counts the rows: the same sum over each sample's positions.

    Args:
        call: the operation.
        input: a [..., f].
        other: W [f, o].

    Returns:
        The result; NotImplemented, so that autograd's derivative is used, for other products.
    """
    if call.is_param(input) or other.ndim != 2 or input.ndim < 2:
        return NotImplemented
    return call.run_unbatched({id(other): lambda ids: ids.product(input, in_out)})
