"""Rules for convolutions: the same sum over positions as for linear layers, with a's window at each position."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from qualms.gradients.watch.layout import Layout
from qualms.gradients.watch.pieces import Outer, accurate
from qualms.gradients.watch.scales import channel_sum, row_layout
from qualms.gradients.watch.windows import pads, pixel_pairs, windows

if TYPE_CHECKING:
    from qualms.gradients.watch.record import Call


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
        layout = _image_rows(call, input, space)
        if layout is None:
            return NotImplemented
        kernel, inputs = weight.shape[2:], call.inputs
        stride, dilation = _each(stride, space), _each(dilation, space)
        around = pads(padding, kernel, dilation)
        out = call.run()
        edge = get_gradient_edge(out)
        features, positions = weight.shape[0] // groups, math.prod(out.shape[-space:])
        if call.tracked(weight):
            images = math.prod(out.shape[: -space - 1]) // inputs
            per_window = weight.shape[1] * kernel.numel()

            def image(t: Tensor) -> Tensor:
                return layout.leading(t).reshape(-1, *t.shape[-space - 1 :])

            def moving(d: Tensor) -> Tensor:
                d = image(d).movedim(1, -1)  # [n, *positions, o]
                return d.reshape(d.shape[0], positions, groups, features)

            def still() -> Tensor:
                return windows(image(input), kernel, stride, dilation, around, groups)

            def pairs() -> Tensor:
                return pixel_pairs(accurate(image(input)), kernel, stride, dilation, around, inputs)

            def arrange(grad: Tensor) -> Tensor:  # [b, g, o, k·i] -> [b, g·o, i, *k]
                grad = grad.flatten(1, 2).unflatten(-1, (*kernel, weight.shape[1]))
                return grad.movedim(-1, 2)

            sizes = (images * positions, features, per_window, groups)
            padded = math.prod(n + sum(p) for n, p in zip(input.shape[-space:], around, strict=True))
            by_pixels = groups == 1 and padded**2 < positions**2 * kernel.numel()
            outer = Outer(moving, still, arrange, inputs, sizes, pairs if by_pixels else None)
            call.leave(weight, [edge], outer)
        if bias is not None and call.tracked(bias):
            call.leave(bias, [edge], channel_sum(inputs, layout, bias, space, None))
        return out

    return conv


def transposed_convolution_rule(space: int) -> Callable[..., Any]:
    """A convolution run backwards, windows of δ on a's positions: ∂W[i, o, k] = Σ_t a[i, t] δ[o, window k of t]."""

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
        layout = _image_rows(call, input, space)
        if layout is None:
            return NotImplemented
        kernel, inputs = weight.shape[2:], call.inputs
        stride, dilation = _each(stride, space), _each(dilation, space)
        around = pads(padding, kernel, dilation)
        out = call.run()
        edge = get_gradient_edge(out)
        positions = input.shape[-space:]
        if call.tracked(weight):
            images = math.prod(input.shape[: -space - 1]) // inputs

            def image(t: Tensor) -> Tensor:
                return layout.leading(t).reshape(-1, *t.shape[-space - 1 :])

            def moving(d: Tensor) -> Tensor:
                return windows(image(d), kernel, stride, dilation, around, groups, positions)

            def still() -> Tensor:
                a = image(input).movedim(1, -1)
                return a.reshape(a.shape[0], positions.numel(), groups, -1)

            def arrange(grad: Tensor) -> Tensor:  # [b, g, k·o, i] -> [b, g·i, o, *k]
                grad = grad.mT.flatten(1, 2).unflatten(-1, (*kernel, weight.shape[1]))
                return grad.movedim(-1, 2)

            sizes = (images * positions.numel(), weight.shape[1] * kernel.numel(), weight.shape[0] // groups, groups)
            call.leave(weight, [edge], Outer(moving, still, arrange, inputs, sizes))
        if bias is not None and call.tracked(bias):
            call.leave(bias, [edge], channel_sum(inputs, layout, bias, space, None))
        return out

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
    space = weight.ndim - 2
    if transposed:
        rule = transposed_convolution_rule(space)
        return rule(call, input, weight, bias, stride, padding, output_padding, groups, dilation)
    return convolution_rule(space)(call, input, weight, bias, stride, padding, dilation, groups)


def _image_rows(call: Call, input: Tensor, space: int) -> Layout | None:
    """The layout of images [n, channel, …]: rows on the first axis, or the one image of a single row."""
    layout = row_layout(call, input)
    batched = input.ndim == space + 2
    return layout if layout is not None and (layout.axis is None or (batched and layout.axis == 0)) else None


def _each(value: Any, space: int) -> tuple[int, ...]:
    return tuple(value) * (space if len(value) == 1 else 1) if isinstance(value, Sequence) else (int(value),) * space
