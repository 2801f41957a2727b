"""Rules for convolutions: the same sum over positions as for linear layers, with windows of a.

A transposed convolution is a convolution run backwards: windows of δ on a's positions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from qualms.gradients.precision import at_least_float32
from qualms.gradients.tracing.factors import Summed
from qualms.gradients.tracing.outer_product import Outer, OuterSizes
from qualms.gradients.tracing.rules.conv_windows import (
    Geometry,
    depthwise_gradient,
    extract_windows,
    weight_gradient,
    window_gram,
)
from qualms.gradients.tracing.sample_axis import Layout

if TYPE_CHECKING:
    from qualms.gradients.tracing.op_call import OpCall


def conv(
    call: OpCall,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    """∂W[o, i, k] = Σ_t δ[o, t] a[i, window k of position t], for each group; ∂b[o] = Σ_t δ[o, t].

    Args:
        call: `conv1d`, `conv2d` or `conv3d`.
        input: a [n, groups·i, *space].
        weight: W [o, i, *kernel].
        bias: b [o].
        stride: of the windows.
        padding: zeros around the image.
        dilation: of the windows.
        groups: number of groups.
    """
    return convolution(
        call, input, weight, bias, stride, padding, dilation, False, output_padding=0, groups=groups
    )


def conv_transpose(
    call: OpCall,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Any:
    """∂W[i, o, k] = Σ_t a[i, t] δ[o, window k of position t], for each group; ∂b[o] = Σ_t δ[o, t].

    Args:
        call: `conv_transpose1d`, `conv_transpose2d` or `conv_transpose3d`.
        input: a [n, groups·i, *space].
        weight: W [groups·i, o, *kernel].
        bias: b [groups·o].
        stride: of the windows.
        padding: zeros around the result.
        output_padding: what is added to one side of the result; it shows in its shape.
        groups: number of groups.
        dilation: of the windows.
    """
    return convolution(
        call, input, weight, bias, stride, padding, dilation, True, output_padding, groups
    )


def convolution(
    call: OpCall,
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
    """The common form of `conv` and `conv_transpose`, which is aten's: exported graphs use it.

    Args:
        call: the operation.
        input: a.
        weight: W.
        bias: b.
        stride: of the windows.
        padding: zeros around the image.
        dilation: of the windows.
        transposed: whether the windows are those of δ.
        output_padding: what is added to one side of the result; it shows in its shape.
        groups: number of groups.
    """
    geometry = Geometry.of(weight, stride, padding, dilation, groups)
    space = len(geometry.kernel)
    layout = _image_layout(call, input, space)
    if layout is None:
        return NotImplemented
    out = call.run()
    edge = get_gradient_edge(out)
    if call.is_param(weight):
        images = _Images(input, weight, geometry, layout, call.samples)
        gradient: Outer | Summed
        if transposed:
            gradient = images.transposed()
        elif geometry.groups == weight.shape[0] > 1 and weight.shape[1] == 1:
            gradient = images.depthwise(out.shape[-space:])
        else:
            gradient = images.plain(out.shape[-space:])
        call.add_factor(weight, [edge], gradient)
    if call.is_param(bias):
        call.add_factor(bias, [edge], Summed.channels(call.samples, layout, bias, space=space))
    return out


def _image_layout(call: OpCall, input: Tensor, space: int) -> Layout | None:
    """The layout of images [n, channel, *space]: rows on the first axis, or a single image."""
    layout = call.input_layout(input)
    if layout is None or layout.axis is None:
        return layout
    has_batch_axis = input.ndim == space + 2
    return layout if has_batch_axis and layout.axis == 0 else None


@dataclass(frozen=True)
class _Images:
    """The input of a convolution, and the gradients that its weight may have.

    Args:
        input: a.
        weight: W.
        geometry: of the windows.
        layout: of the input.
        samples: number of samples.
    """

    input: Tensor
    weight: Tensor
    geometry: Geometry
    layout: Layout
    samples: int

    def by_row(self, t: Tensor) -> Tensor:
        """An image for each row: [n, channel, *space]."""
        space = len(self.geometry.kernel)
        return self.layout.leading(t).reshape(-1, *t.shape[-space - 1 :])

    @property
    def images_per_sample(self) -> int:
        """Number of images of a sample."""
        space = len(self.geometry.kernel)
        return math.prod(self.input.shape[: -space - 1]) // self.samples

    def depthwise(self, positions: tuple[int, ...]) -> Summed:
        """The gradient of filters that see one channel each.

        Args:
            positions: number of windows on each spatial axis.
        """

        def write(d: Tensor) -> Tensor:
            images = self.by_row(self.input)
            return depthwise_gradient(self.by_row(d), images, self.geometry, self.samples)

        numel = self.weight.numel()
        multiplications = self.images_per_sample * math.prod(positions) * numel
        return Summed.from_cotangent(write, numel, multiplications)

    def plain(self, positions: tuple[int, ...]) -> Outer:
        """Σ_t δ_t ⊗ (a's window at t).

        Args:
            positions: number of windows on each spatial axis.
        """
        weight, geometry = self.weight, self.geometry
        kernel, groups = geometry.kernel, geometry.groups
        features, count = weight.shape[0] // groups, math.prod(positions)

        def grad_outputs(d: Tensor) -> Tensor:
            """δ at each position, as [n, t, g, o]."""
            d = self.by_row(d).movedim(1, -1)
            return d.reshape(d.shape[0], count, groups, features)

        def activations() -> Tensor:
            return extract_windows(self.by_row(self.input), geometry)

        def gram() -> Tensor:
            return window_gram(at_least_float32(self.by_row(self.input)), geometry, self.samples)

        def arrange(grad: Tensor) -> Tensor:  # [b, g, o, k·i] -> [b, g·o, i, *k]
            grad = grad.flatten(1, 2).unflatten(-1, (*kernel, weight.shape[1]))
            return grad.movedim(-1, 2)

        def direct(d: Tensor) -> Tensor:
            return weight_gradient(self.by_row(d), self.by_row(self.input), weight, geometry)

        window = math.prod(kernel)
        pixels = geometry.count_pixels(self.input.shape[-len(kernel) :])
        by_pixels = groups == 1 and pixels**2 < count**2 * window
        sizes = OuterSizes(
            self.images_per_sample * count, features, weight.shape[1] * window, groups
        )
        return Outer(
            grad_outputs,
            activations,
            arrange,
            self.samples,
            sizes,
            fast_gram=gram if by_pixels else None,
            direct=direct,
        )

    def transposed(self) -> Outer:
        """Σ_t (δ's window at t) ⊗ a_t."""
        weight, geometry = self.weight, self.geometry
        kernel, groups = geometry.kernel, geometry.groups
        positions = self.input.shape[-len(kernel) :]

        def grad_outputs(d: Tensor) -> Tensor:
            """δ's window at each position of a, as [n, t, g, k·o]."""
            return extract_windows(self.by_row(d), geometry, positions)

        def activations() -> Tensor:
            a = self.by_row(self.input).movedim(1, -1)
            return a.reshape(a.shape[0], positions.numel(), groups, -1)

        def arrange(grad: Tensor) -> Tensor:  # [b, g, k·o, i] -> [b, g·i, o, *k]
            grad = grad.mT.flatten(1, 2).unflatten(-1, (*kernel, weight.shape[1]))
            return grad.movedim(-1, 2)

        sizes = OuterSizes(
            self.images_per_sample * positions.numel(),
            weight.shape[1] * math.prod(kernel),
            weight.shape[0] // groups,
            groups,
        )
        return Outer(grad_outputs, activations, arrange, self.samples, sizes)
