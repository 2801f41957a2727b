"""Rules for parameters that scale or shift: biases, normalizations (∂γ = Σ_t δ_t x̂_t, ∂β = Σ_t
δ_t) and PReLU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from qualms.gradients.precision import at_least_float32
from qualms.gradients.tracing.factors import Summed
from qualms.gradients.tracing.sample_axis import Layout

if TYPE_CHECKING:
    from qualms.gradients.tracing.op_call import Call


def row_layout(call: Call, input: Tensor) -> Layout | None:
    """The layout of an operation's input, or None where it has no rows."""
    return None if call.tracked(input) else call.layout(input)


def batch_norm(
    call: Call,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Any:
    """Batch normalization with running statistics; with batch statistics the inputs are not
    independent.
    """
    if training or running_mean is None or running_var is None:
        return NotImplemented

    def normalized() -> Tensor:
        shape = (1, -1) + (1,) * (input.ndim - 2)
        return (input - running_mean.reshape(shape)) * (running_var + eps).rsqrt().reshape(shape)

    return _channel_affine(call, input, weight, bias, normalized)


def group_norm(
    call: Call,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Any:
    """Group normalization."""
    return _channel_affine(
        call, input, weight, bias, lambda: F.group_norm(input, num_groups, None, None, eps)
    )


def instance_norm(
    call: Call,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Any:
    """Instance normalization, by the input's or by running statistics."""

    def normalized() -> Tensor:
        return F.instance_norm(
            input, running_mean, running_var, None, None, use_input_stats, momentum, eps
        )

    return _channel_affine(call, input, weight, bias, normalized)


def layer_norm(
    call: Call,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Any:
    """Layer normalization."""
    return _trailing_affine(
        call, input, weight, bias, lambda: F.layer_norm(input, normalized_shape, None, None, eps)
    )


def rms_norm(
    call: Call,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Any:
    """Root-mean-square normalization."""
    return _trailing_affine(
        call, input, weight, None, lambda: F.rms_norm(input, normalized_shape, None, eps)
    )


def prelu(call: Call, input: Tensor, weight: Tensor) -> Any:
    """PReLU: ∂w = Σ_t δ_t min(x_t, 0), for each channel or for all of them."""
    if weight.numel() > 1:
        return _channel_affine(call, input, weight, None, lambda: input.clamp_max(0))
    layout = row_layout(call, input)
    if layout is None:
        return NotImplemented
    out = call.run()
    inputs = call.inputs

    def write(cotangents: list[Tensor | None]) -> Tensor:
        (d,) = cotangents
        assert d is not None
        product = layout.leading(at_least_float32(d) * input.detach().clamp_max(0))
        return product.reshape(inputs, -1).sum(1).reshape(inputs, *weight.shape)

    call.leave(weight, [get_gradient_edge(out)], Summed(write, weight.numel()))
    return out


def _channel_affine(
    call: Call,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    scaled: Callable[[], Tensor],
) -> Any:
    """Parameters that stand for the channels of [n, channel, …]; `scaled` is what the weight
    multiplies.
    """
    layout = row_layout(call, input)
    if layout is None or layout.axis not in (None, 0):
        return NotImplemented
    out = call.run()
    edge = get_gradient_edge(out)
    if weight is not None and call.tracked(weight):
        call.leave(
            weight, [edge], channel_sum(call.inputs, layout, weight, input.ndim - 2, _once(scaled))
        )
    if bias is not None and call.tracked(bias):
        call.leave(bias, [edge], channel_sum(call.inputs, layout, bias, input.ndim - 2, None))
    return out


def _trailing_affine(
    call: Call,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    scaled: Callable[[], Tensor],
) -> Any:
    """Parameters that have the shape of the last axes; `scaled` is what the weight multiplies."""
    layout = row_layout(call, input)
    last = next(p for p in (weight, bias) if p is not None)
    if layout is None:
        return NotImplemented
    if layout.axis is not None and layout.axis >= input.ndim - last.ndim:
        return NotImplemented
    out = call.run()
    edge = get_gradient_edge(out)
    if weight is not None and call.tracked(weight):
        call.leave(weight, [edge], trailing_sum(call.inputs, layout, weight, _once(scaled)))
    if bias is not None and call.tracked(bias):
        call.leave(bias, [edge], trailing_sum(call.inputs, layout, bias))
    return out


def channel_sum(
    inputs: int, layout: Layout, target: Tensor, space: int, times: Callable[[], Tensor] | None
) -> Summed:
    """Σ over rows and space of δ, times a factor if there is one, for each channel."""

    def write(cotangents: list[Tensor | None]) -> Tensor:
        (d,) = cotangents
        assert d is not None
        d = at_least_float32(d) if times is None else at_least_float32(d) * times()
        d = d.sum(tuple(range(-space, 0))) if space else d
        return layout.leading(d).reshape(inputs, -1, d.shape[-1]).sum(1).reshape(-1, *target.shape)

    return Summed(write, target.numel())


def trailing_sum(
    inputs: int, layout: Layout, target: Tensor, times: Callable[[], Tensor] | None = None
) -> Summed:
    """Σ of δ, times a factor if there is one, over all axes but the last ones, which the parameter
    has.
    """

    def write(cotangents: list[Tensor | None]) -> Tensor:
        (d,) = cotangents
        assert d is not None
        d = at_least_float32(d) if times is None else at_least_float32(d) * times()
        return layout.leading(d).reshape(inputs, -1, *target.shape).sum(1)

    return Summed(write, target.numel())


def _once(compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """What all cotangents share is computed when the first one comes."""
    kept: list[Tensor] = []

    def get() -> Tensor:
        if not kept:
            with torch.no_grad():
                kept.append(at_least_float32(compute()))
        return kept[0]

    return get
