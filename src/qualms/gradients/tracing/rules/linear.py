"""Rules for products with a weight matrix W: ∂W = Σ_t δ_t a_tᵀ.

a_t is the input of the product, and δ_t the cotangent of its result, at position t.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from qualms.gradients.tracing.factors import Summed
from qualms.gradients.tracing.outer_product import Outer, arrange_in_out, arrange_out_in
from qualms.gradients.tracing.rules.broadcast import broadcast

if TYPE_CHECKING:
    from qualms.gradients.tracing.op_call import OpCall


def linear(call: OpCall, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """Run a linear layer, y_t = W a_t + b, with ∂W = Σ_t δ_t a_tᵀ and ∂b = Σ_t δ_t.

    δ_t is the cotangent of y_t at position t.

    Args:
        call: the operation.
        input: the activations a [..., in_features].
        weight: W [out_features, in_features].
        bias: b [out_features].

    Returns:
        y; NotImplemented, so that `OpCall.run_on_copies` runs it, if W is a vector, or if
        the batch axis of the input is the last, or there is none.
    """
    if weight.ndim != 2:
        return NotImplemented
    return _run_product(call, input, weight, bias, out_axis=0)


def matmul(call: OpCall, input: Tensor, other: Tensor) -> Any:
    """Run a matrix product with the parameter on the right, y_t = a_t W: ∂W = Σ_t a_t δ_tᵀ.

    δ_t is the cotangent of y_t at position t. If the parameter is on the left, or W is not a
    matrix, the rule `broadcast` runs the product.

    Args:
        call: the operation.
        input: the activations a [..., in_features].
        other: W [in_features, out_features].

    Returns:
        y; NotImplemented, so that `OpCall.run_on_copies` runs it, if the batch axis of the
        input is the last, or there is none.
    """
    if call.is_param(input) or other.ndim != 2 or input.ndim < 2:
        return broadcast(call, input, other)
    return _run_product(call, input, other, bias=None, out_axis=1)


def addmm(
    call: OpCall,
    input: Tensor,
    mat1: Tensor,
    mat2: Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> Any:
    """Run y_t = b + a_t W, a linear layer with Wᵀ: ∂W = Σ_t a_t δ_tᵀ, ∂b = Σ_t δ_t.

    δ_t is the cotangent of y_t at position t.

    Args:
        call: the operation.
        input: b [out_features].
        mat1: the activations a [positions, in_features].
        mat2: W [in_features, out_features].
        beta: scale of b; the rule covers 1 alone.
        alpha: scale of the product; the rule covers 1 alone.

    Returns:
        y; NotImplemented, so that `OpCall.run_on_copies` runs it, if the rule does not cover
        it.
    """
    if beta != 1 or alpha != 1 or input.ndim != 1:
        return NotImplemented
    return _run_product(call, mat1, mat2, bias=input, out_axis=1)


def _run_product(
    call: OpCall,
    activations: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out_axis: int,
) -> Any:
    """Run a product of activations with a weight matrix, and add the factors of its parameters.

    Args:
        call: the operation.
        activations: input of the product, [..., in_features].
        weight: the matrix; its axes count the features of the input and of the product.
        bias: the bias [out_features].
        out_axis: the axis of the weight that counts the features of the product.

    Returns:
        The product; NotImplemented if their batch axis is the last, or there is none.
    """
    layout = call.find_input_layout(activations)
    if layout is None or layout.axis == activations.ndim - 1:
        return NotImplemented
    out = call.run()
    edge = get_gradient_edge(out)
    if call.is_param(weight):
        gradient = Outer.for_product(
            call.num_samples,
            layout,
            activations,
            out_features=weight.shape[out_axis],
            arrange=arrange_in_out if out_axis == 1 else arrange_out_in,
        )
        call.add_factor(weight, [edge], gradient)
    if call.is_param(bias):
        call.add_factor(bias, [edge], Summed.for_trailing_axes(call.num_samples, layout, bias))
    return out


def unbatched_linear(
    call: OpCall,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
) -> Any:
    """Run a linear layer without a batch axis, such as an expert on the tokens routed to it.

    The gradients are the sums of the rule `linear`, over the positions found for each sample.

    Args:
        call: the operation.
        input: the activations [..., in_features].
        weight: the weight [out_features, in_features].
        bias: the bias [out_features].

    Returns:
        The result; NotImplemented, so that autograd's derivative is used, if the parameter is the
        input or the weight is a vector.
    """
    if call.is_param(input) or weight.ndim != 2:
        return NotImplemented
    builders = {id(weight): lambda sample_ids: sample_ids.for_product(input, arrange_out_in)}
    if bias is not None:
        builders[id(bias)] = lambda sample_ids: sample_ids.for_bias(bias)
    return call.run_unbatched(builders)


def unbatched_matmul(call: OpCall, input: Tensor, other: Tensor) -> Any:
    """Run a matrix product without a batch axis, such as an expert on the tokens routed to it.

    The gradient is the sum of the rule `matmul`, over the positions found for each sample.

    Args:
        call: the operation.
        input: the activations [..., in_features], of two axes or more.
        other: the weight [in_features, out_features].

    Returns:
        The result; NotImplemented, so that autograd's derivative is used, if the parameter is on
        the left or an argument has another number of axes.
    """
    if call.is_param(input) or other.ndim != 2 or input.ndim < 2:
        return NotImplemented
    return call.run_unbatched(
        {id(other): lambda sample_ids: sample_ids.for_product(input, arrange_in_out)}
    )
