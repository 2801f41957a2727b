"""Rules for convolutions: the same sum over positions as for linear layers, with a's window at each
position.

A transposed convolution is one run backwards: windows of δ on a's positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from qualms.gradients.precision import at_least_float32
from qualms.gradients.tracing.factors import Outer, Summed
from qualms.gradients.tracing.rules.scales import channel_sum, row_layout
from qualms.gradients.tracing.rules.windows import (
    Geometry,
    depthwise_gradient,
    pads,
    pixel_pairs,
    weight_gradient,
    windows,
)
from qualms.gradients.tracing.sample_axis import Layout

if TYPE_CHECKING:
    from qualms.gradients.tracing.op_call import Call

# From an operation's arguments and result to the gradient of its weight.
WeightGradient = Callable[
    [Tensor, Tensor, Tensor, Geometry, Callable[[Tensor], Tensor], int], Outer | Summed
]


def convolution_rule(space: int) -> Callable[..., Any]:
    """∂W[o, i, k] = Σ_t δ[o, t] a[i, window k of position t], group by group; ∂b[o] = Σ_t δ[o, t]."""

    def conv(
        call: Call,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Any:
        return _rule(
            call, input, weight, bias, space, (stride, padding, dilation, groups), _windows_of_input
        )

    return conv


def transposed_convolution_rule(space: int) -> Callable[..., Any]:
    """∂W[i, o, k] = Σ_t a[i, t] δ[o, window k of position t], group by group; ∂b[o] = Σ_t δ[o, t]."""

    def conv_transpose(
        call: Call,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
    ) -> Any:
        return _rule(
            call,
            input,
            weight,
            bias,
            space,
            (stride, padding, dilation, groups),
            _windows_of_cotangent,
        )

    return conv_transpose


def convolution(
    call: Call,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> Any:
    """aten's common form of all convolutions, which exported graphs use."""
    gradient = _windows_of_cotangent if transposed else _windows_of_input
    return _rule(
        call, input, weight, bias, weight.ndim - 2, (stride, padding, dilation, groups), gradient
    )


def _rule(
    call: Call,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    space: int,
    how: tuple[Any, Any, Any, int],
    gradient: WeightGradient,
) -> Any:
    layout = _image_rows(call, input, space)
    if layout is None:
        return NotImplemented
    stride, padding, dilation, groups = how
    kernel, steps = weight.shape[2:], _each(dilation, space)
    geometry = Geometry(kernel, _each(stride, space), steps, pads(padding, kernel, steps), groups)
    out = call.run()
    edge = get_gradient_edge(out)
    if call.tracked(weight):

        def image(t: Tensor) -> Tensor:
            return layout.leading(t).reshape(-1, *t.shape[-space - 1 :])

        call.leave(weight, [edge], gradient(input, weight, out, geometry, image, call.inputs))
    if bias is not None and call.tracked(bias):
        call.leave(bias, [edge], channel_sum(call.inputs, layout, bias, space, None))
    return out


def _windows_of_input(
    input: Tensor,
    weight: Tensor,
    out: Tensor,
    geometry: Geometry,
    image: Callable[[Tensor], Tensor],
    inputs: int,
) -> Outer | Summed:
    """Σ_t δ_t ⊗ (a's window at t)."""
    kernel, groups, space = geometry.kernel, geometry.groups, len(geometry.kernel)
    if groups == weight.shape[0] > 1 and weight.shape[1] == 1:

        def filters(cotangents: list[Tensor | None]) -> Tensor:
            (d,) = cotangents
            assert d is not None
            return depthwise_gradient(image(d), image(input), geometry, inputs)

        images = math.prod(out.shape[: -space - 1]) // inputs
        return Summed(
            filters, weight.numel(), images * math.prod(out.shape[-space:]) * weight.numel()
        )
    features, positions = weight.shape[0] // groups, math.prod(out.shape[-space:])

    def grad_outputs(d: Tensor) -> Tensor:
        """δ at each output position, as [n, t, g, o]."""
        d = image(d).movedim(1, -1)  # [n, *positions, o]
        return d.reshape(d.shape[0], positions, groups, features)

    def activations() -> Tensor:
        return windows(image(input), geometry)

    def pairs() -> Tensor:
        return pixel_pairs(at_least_float32(image(input)), geometry, inputs)

    def arrange(grad: Tensor) -> Tensor:  # [b, g, o, k·i] -> [b, g·o, i, *k]
        return grad.flatten(1, 2).unflatten(-1, (*kernel, weight.shape[1])).movedim(-1, 2)

    images = math.prod(out.shape[: -space - 1]) // inputs
    sizes = (images * positions, features, weight.shape[1] * math.prod(kernel), groups)
    padded = math.prod(
        n + sum(p) for n, p in zip(input.shape[-space:], geometry.around, strict=True)
    )

    def direct(d: Tensor) -> Tensor:
        return weight_gradient(image(d), image(input), weight, geometry)

    by_pixels = groups == 1 and padded**2 < positions**2 * math.prod(kernel)
    return Outer(
        grad_outputs, activations, arrange, inputs, sizes, pairs if by_pixels else None, direct
    )


def _windows_of_cotangent(
    input: Tensor,
    weight: Tensor,
    out: Tensor,
    geometry: Geometry,
    image: Callable[[Tensor], Tensor],
    inputs: int,
) -> Outer:
    """Σ_t (δ's window at t) ⊗ a_t."""
    kernel, groups, space = geometry.kernel, geometry.groups, len(geometry.kernel)
    positions = input.shape[-space:]

    def grad_outputs(d: Tensor) -> Tensor:
        """δ's window at each position of a, as [n, t, g, k·o]."""
        return windows(image(d), geometry, positions)

    def activations() -> Tensor:
        a = image(input).movedim(1, -1)
        return a.reshape(a.shape[0], positions.numel(), groups, -1)

    def arrange(grad: Tensor) -> Tensor:  # [b, g, k·o, i] -> [b, g·i, o, *k]
        return grad.mT.flatten(1, 2).unflatten(-1, (*kernel, weight.shape[1])).movedim(-1, 2)

    images = math.prod(input.shape[: -space - 1]) // inputs
    sizes = (
        images * positions.numel(),
        weight.shape[1] * math.prod(kernel),
        weight.shape[0] // groups,
        groups,
    )
    return Outer(grad_outputs, activations, arrange, inputs, sizes)


def _image_rows(call: Call, input: Tensor, space: int) -> Layout | None:
    """The layout of images [n, channel, …]: rows on the first axis, or the one image of a single
    row.
    """
    layout = row_layout(call, input)
    batched = input.ndim == space + 2
    return (
        layout
        if layout is not None and (layout.axis is None or (batched and layout.axis == 0))
        else None
    )


def _each(value: Any, space: int) -> tuple[int, ...]:
    return (
        tuple(value) * (space if len(value) == 1 else 1)
        if isinstance(value, Sequence)
        else (int(value),) * space
    )
