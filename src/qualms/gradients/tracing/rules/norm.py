"""Rules for normalizations and PReLU, γ x̂ + β: ∂γ = Σ_t δ_t x̂_t, ∂β = Σ_t δ_t.

x̂ is the tensor that γ multiplies: the normalized input, or for PReLU the input's negative part.
δ_t is the cotangent of the result at position t.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from qualms.gradients.precision import at_least_float32
from qualms.gradients.tracing.factors import Summed

if TYPE_CHECKING:
    from qualms.gradients.tracing.op_call import OpCall


def batch_norm(
    call: OpCall,
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
    """Run batch normalization γ x̂ + β with running statistics, and add the factors of γ and β.

    x̂ = (x - μ) / √(σ² + ε). With batch statistics a sample's result depends on the
    whole batch; no rule can cover that.

    Args:
        call: the operation.
        input: x [n, channel, …].
        weight: γ [channel].
        bias: β [channel].
        running_mean: μ [channel].
        running_var: σ² [channel].
        training: whether batch statistics are used.
        momentum: momentum of the running statistics; not used.
        eps: ε.
        cudnn_enabled: not used.

    Returns:
        The result; NotImplemented, so that `OpCall.run_on_copies` runs it, if batch statistics are
        used, or if the batch axis is not the first.
    """
    if training or running_mean is None or running_var is None:
        return NotImplemented

    def normalize() -> Tensor:
        """Compute x̂ = (x - μ) / √(σ² + ε), in the shape of x."""
        channel_shape = (1, -1) + (1,) * (input.ndim - 2)
        inverse_std = (running_var + eps).rsqrt()
        centered = input - running_mean.reshape(channel_shape)
        return centered * inverse_std.reshape(channel_shape)

    return _run_channel_affine(call, input, weight, bias, normalize)


def group_norm(
    call: OpCall,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Any:
    """Run group normalization γ x̂ + β, and add the factors of γ and β.

    x̂ = (x - μ) / √(σ² + ε). Mean μ and variance σ² are taken over each group of a row's channels.

    Args:
        call: the operation.
        input: x [n, channel, …].
        num_groups: number of groups.
        weight: γ [channel].
        bias: β [channel].
        eps: ε.
        cudnn_enabled: not used.

    Returns:
        The result; NotImplemented, so that `OpCall.run_on_copies` runs it, if the batch axis is not
        the first.
    """
    normalize = partial(F.group_norm, input, num_groups, eps=eps)
    return _run_channel_affine(call, input, weight, bias, normalize)


def instance_norm(
    call: OpCall,
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
    """Run instance normalization γ x̂ + β, and add the factors of γ and β.

    x̂ = (x - μ) / √(σ² + ε). Mean μ and variance σ² are taken over each channel of a row,
    or are running statistics.

    Args:
        call: the operation.
        input: x [n, channel, …].
        weight: γ [channel].
        bias: β [channel].
        running_mean: μ [channel], if running statistics are used.
        running_var: σ² [channel], if running statistics are used.
        use_input_stats: whether the input's own statistics are used.
        momentum: momentum of the running statistics.
        eps: ε.
        cudnn_enabled: not used.

    Returns:
        The result; NotImplemented, so that `OpCall.run_on_copies` runs it, if the batch axis is not
        the first.
    """
    normalize = partial(
        F.instance_norm,
        input,
        running_mean,
        running_var,
        use_input_stats=use_input_stats,
        momentum=momentum,
        eps=eps,
    )
    return _run_channel_affine(call, input, weight, bias, normalize)


def layer_norm(
    call: OpCall,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Any:
    """Run layer normalization γ x̂ + β, and add the factors of γ and β.

    x̂ = (x - μ) / √(σ² + ε). Mean μ and variance σ² are taken over the last axes.

    Args:
        call: the operation.
        input: x [..., *normalized_shape].
        normalized_shape: sizes of the last axes.
        weight: γ [*normalized_shape].
        bias: β [*normalized_shape].
        eps: ε.
        cudnn_enable: not used.

    Returns:
        The result; NotImplemented, so that `OpCall.run_on_copies` runs it, if there are no
        parameters, or if the batch axis is normalized.
    """
    normalize = partial(F.layer_norm, input, normalized_shape, eps=eps)
    return _run_trailing_affine(call, input, weight, bias, normalize)


def rms_norm(
    call: OpCall,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Any:
    """Run root-mean-square normalization γ x̂, and add the factor of γ.

    x̂ = x / √(mean x² + ε). The mean is taken over the last axes.

    Args:
        call: the operation.
        input: x [..., *normalized_shape].
        normalized_shape: sizes of the last axes.
        weight: γ [*normalized_shape].
        eps: ε.

    Returns:
        The result; NotImplemented, so that `OpCall.run_on_copies` runs it, if there are no
        parameters, or if the batch axis is normalized.
    """
    normalize = partial(F.rms_norm, input, normalized_shape, eps=eps)
    return _run_trailing_affine(call, input, weight, None, normalize)


def prelu(call: OpCall, input: Tensor, weight: Tensor) -> Any:
    """Run PReLU, y = max(x, 0) + w min(x, 0): ∂w = Σ_t δ_t min(x_t, 0), per channel or for all.

    δ_t is the cotangent of y at position t. The gradient is that of a scale w of min(x, 0).

    Args:
        call: the operation.
        input: x [n, channel, …].
        weight: w [channel], or [1] for all channels.

    Returns:
        The result; NotImplemented, so that `OpCall.run_on_copies` runs it, if there is no batch
        axis, or if each channel has a w and the batch axis is not the first.
    """

    def negative_part() -> Tensor:
        """Compute min(x, 0), the tensor that the weight multiplies."""
        return input.detach().clamp_max(0)

    if weight.numel() > 1:
        return _run_channel_affine(call, input, weight, None, negative_part)
    layout = call.find_input_layout(input)
    if layout is None:
        return NotImplemented
    build_gradient = partial(Summed.for_trailing_axes, call.num_samples, layout)
    return _run_affine(call, weight, None, negative_part, build_gradient)


def _run_channel_affine(
    call: OpCall,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    normalize: Callable[[], Tensor],
) -> Any:
    """Run a normalization γ_c x̂ + β_c, with one scale γ_c and bias β_c for each channel c.

    x̂ is the normalized input. The gradient factors of γ and β are added to the recorder.

    Args:
        call: the operation.
        input: x [n, channel, …].
        weight: γ [channel].
        bias: β [channel].
        normalize: returns x̂, in the shape of x.

    Returns:
        The result; NotImplemented if the batch axis is not the first, or if there is none.
    """
    layout = call.find_input_layout(input)
    if layout is None or layout.axis not in (None, 0):
        return NotImplemented
    build_gradient = partial(Summed.for_channels, call.num_samples, layout, space=input.ndim - 2)
    return _run_affine(call, weight, bias, normalize, build_gradient)


def _run_trailing_affine(
    call: OpCall,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    normalize: Callable[[], Tensor],
) -> Any:
    """Run a normalization γ x̂ + β, with scale γ and bias β in the shape of the last axes of x.

    x̂ is the normalized input. The gradient factors of γ and β are added to the recorder.

    Args:
        call: the operation.
        input: x [..., *shape].
        weight: γ [*shape].
        bias: β [*shape].
        normalize: returns x̂, in the shape of x.

    Returns:
        The result; NotImplemented if there is neither γ nor β, if the batch axis is an axis of γ
        or β, or if there is none.
    """
    layout = call.find_input_layout(input)
    parameter = weight if weight is not None else bias
    if layout is None or parameter is None:
        return NotImplemented
    if layout.axis is not None and layout.axis >= input.ndim - parameter.ndim:
        return NotImplemented
    build_gradient = partial(Summed.for_trailing_axes, call.num_samples, layout)
    return _run_affine(call, weight, bias, normalize, build_gradient)


def _run_affine(
    call: OpCall,
    weight: Tensor | None,
    bias: Tensor | None,
    normalize: Callable[[], Tensor],
    build_gradient: Callable[..., Summed],
) -> Any:
    """Run a normalization γ x̂ + β, add the gradient factors of γ and β, and return the result.

    Args:
        call: the operation.
        weight: the scale γ; None if there is none.
        bias: the bias β; None if there is none.
        normalize: returns the normalized input x̂, in the shape of the result.
        build_gradient: builds the gradient of a parameter, from the parameter and `get_scale`, a
            function that returns what the cotangent is multiplied by: x̂ for γ, 1 by default.
    """
    out = call.run()
    edge = get_gradient_edge(out)
    if call.is_param(weight):
        get_scale = _compute_once(normalize)
        call.add_factor(weight, [edge], build_gradient(weight, get_scale=get_scale))
    if call.is_param(bias):
        call.add_factor(bias, [edge], build_gradient(bias))
    return out


def _compute_once(compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Wrap a function so that it runs at the first call alone; later calls return the same tensor.

    The tensor has at least 32 bits and no graph. All classes share it, and it may never be needed.
    """
    results: list[Tensor] = []

    def get() -> Tensor:
        """Return the tensor; compute it if this is the first call."""
        if not results:
            with torch.no_grad():
                results.append(at_least_float32(compute()))
        return results[0]

    return get
