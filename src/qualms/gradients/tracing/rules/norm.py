"""Rules for normalizations and PReLU: ∂γ = Σ_t δ_t x̂_t, ∂β = Σ_t δ_t.

x̂ is the tensor that γ multiplies: the normalized input, or for PReLU the input's negative part.
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
    """Run batch normalization with running statistics: x̂ = (x - μ) / √(σ² + ε).

    With batch statistics a sample's result depends on the whole batch; no rule can cover that.

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
        The result; NotImplemented, so that the general path runs it, with batch statistics.
    """
    if training or running_mean is None or running_var is None:
        return NotImplemented

    def normalize() -> Tensor:
        """Compute x̂, in the shape of x."""
        shape = (1, -1) + (1,) * (input.ndim - 2)
        factor = (running_var + eps).rsqrt()
        return (input - running_mean.reshape(shape)) * factor.reshape(shape)

    return _channel_affine(call, input, weight, bias, normalize)


def group_norm(
    call: OpCall,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Any:
    """Run group normalization: x̂ = (x - μ) / √(σ² + ε), over each group of a row's channels.

    Args:
        call: the operation.
        input: x [n, channel, …].
        num_groups: number of groups.
        weight: γ [channel].
        bias: β [channel].
        eps: ε.
        cudnn_enabled: not used.
    """
    normalize = partial(F.group_norm, input, num_groups, eps=eps)
    return _channel_affine(call, input, weight, bias, normalize)


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
    """Run instance normalization: x̂ = (x - μ) / √(σ² + ε), over each channel of a row.

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
    """
    statistics = running_mean, running_var, None, None, use_input_stats, momentum, eps
    normalize = partial(F.instance_norm, input, *statistics)
    return _channel_affine(call, input, weight, bias, normalize)


def layer_norm(
    call: OpCall,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Any:
    """Run layer normalization: x̂ = (x - μ) / √(σ² + ε), over the last axes.

    Args:
        call: the operation.
        input: x [..., *normalized_shape].
        normalized_shape: sizes of the last axes.
        weight: γ [*normalized_shape].
        bias: β [*normalized_shape].
        eps: ε.
        cudnn_enable: not used.
    """
    normalize = partial(F.layer_norm, input, normalized_shape, eps=eps)
    return _trailing_affine(call, input, weight, bias, normalize)


def rms_norm(
    call: OpCall,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Any:
    """Run root-mean-square normalization: x̂ = x / √(mean x² + ε), over the last axes.

    Args:
        call: the operation.
        input: x [..., *normalized_shape].
        normalized_shape: sizes of the last axes.
        weight: γ [*normalized_shape].
        eps: ε.
    """
    normalize = partial(F.rms_norm, input, normalized_shape, eps=eps)
    return _trailing_affine(call, input, weight, None, normalize)


def prelu(call: OpCall, input: Tensor, weight: Tensor) -> Any:
    """Run PReLU, max(x, 0) + w min(x, 0): ∂w = Σ_t δ_t min(x_t, 0), for each channel or for all.

    Args:
        call: the operation.
        input: x [n, channel, …].
        weight: w [channel], or [1] for all channels.

    Returns:
        The result; NotImplemented, so that the general path runs it, if no axis counts the rows, or
        channels have a w each and another axis than the first counts the rows.
    """

    def negative_part() -> Tensor:
        """Compute min(x, 0), which stands in for x̂."""
        return input.detach().clamp_max(0)

    if weight.numel() > 1:
        return _channel_affine(call, input, weight, None, negative_part)
    layout = call.input_layout(input)
    if layout is None:
        return NotImplemented
    summed = partial(Summed.trailing, call.num_samples, layout)
    return _affine(call, weight, None, negative_part, summed)


def _channel_affine(
    call: OpCall,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    normalize: Callable[[], Tensor],
) -> Any:
    """Run γ_c x̂ + β_c, with one γ_c and β_c for each channel, and add the factors of γ and β.

    Args:
        call: the operation.
        input: x [n, channel, …].
        weight: γ [channel].
        bias: β [channel].
        normalize: returns x̂, in the shape of x.

    Returns:
        The result; NotImplemented if another axis than the first counts the rows, or none does.
    """
    layout = call.input_layout(input)
    if layout is None or layout.axis not in (None, 0):
        return NotImplemented
    summed = partial(Summed.channels, call.num_samples, layout, space=input.ndim - 2)
    return _affine(call, weight, bias, normalize, summed)


def _trailing_affine(
    call: OpCall,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    normalize: Callable[[], Tensor],
) -> Any:
    """Run γ x̂ + β, with γ and β in the shape of the last axes of x, and add their factors.

    Args:
        call: the operation.
        input: x [..., *shape].
        weight: γ [*shape].
        bias: β [*shape].
        normalize: returns x̂, in the shape of x.

    Returns:
        The result; NotImplemented if there is neither γ nor β, if an axis that γ or β has counts
        the rows, or if no axis does.
    """
    layout = call.input_layout(input)
    parameter = weight if weight is not None else bias
    if layout is None or parameter is None:
        return NotImplemented
    if layout.axis is not None and layout.axis >= input.ndim - parameter.ndim:
        return NotImplemented
    return _affine(call, weight, bias, normalize, partial(Summed.trailing, call.num_samples, layout))


def _affine(
    call: OpCall,
    weight: Tensor | None,
    bias: Tensor | None,
    normalize: Callable[[], Tensor],
    summed: Callable[..., Summed],
) -> Any:
    """Run a normalization, add the factors of its parameters, and return the result.

    Args:
        call: the operation.
        weight: γ; None if there is none.
        bias: β; None if there is none.
        normalize: returns x̂, in the shape of the result.
        summed: builds the gradient of a parameter, from the parameter and a `scale` for δ.
    """
    out = call.run()
    edge = get_gradient_edge(out)
    if call.is_param(weight):
        call.add_factor(weight, [edge], summed(weight, scale=_once(normalize)))
    if call.is_param(bias):
        call.add_factor(bias, [edge], summed(bias))
    return out


def _once(compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Wrap a function so that it runs at the first call alone; later calls return the same tensor.

    The tensor has at least 32 bits. x̂ is the same for all classes, and may not be needed at all.
    """
    kept: list[Tensor] = []

    def get() -> Tensor:
        """Return the kept result, computed without a graph at the first call."""
        if not kept:
            with torch.no_grad():
                kept.append(at_least_float32(compute()))
        return kept[0]

    return get
