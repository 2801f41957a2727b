"""Rules for convolutions: the same sum over positions as for linear layers, with windows of a.

A transposed convolution is a convolution run backwards: a sum over the positions of a, with windows
of δ.
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
    """Run a convolution: ∂W[o, i, k] = Σ_t δ[o, t] a[i, entry k of the window at t], ∂b = Σ_t δ_t.

    Args:
        call: `conv1d`, `conv2d` or `conv3d`.
        input: a [n, groups·i, *space].
        weight: W [o, i, *kernel].
        bias: b [o].
        stride: distance between neighboring windows.
        padding: number of zeros around the image.
        dilation: distance between the entries of a window.
        groups: number of groups of channels.
    """
    return convolution(
        call,
        input,
        weight,
        bias,
        stride,
        padding,
        dilation,
        transposed=False,
        output_padding=0,
        groups=groups,
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
    """Run a transposed convolution: ∂W[i, o, k] = Σ_t a[i, t] δ[o, entry k of the window at t].

    ∂b[o] = Σ_t δ[o, t].

    Args:
        call: `conv_transpose1d`, `conv_transpose2d` or `conv_transpose3d`.
        input: a [n, groups·i, *space].
        weight: W [groups·i, o, *kernel].
        bias: b [groups·o].
        stride: distance between neighboring windows.
        padding: number of zeros around the result, which are cut off.
        output_padding: size added to one side of the result; not read here, as the result has it.
        groups: number of groups of channels.
        dilation: distance between the entries of a window.
    """
    return convolution(
        call,
        input,
        weight,
        bias,
        stride,
        padding,
        dilation,
        transposed=True,
        output_padding=output_padding,
        groups=groups,
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
    """Run a convolution or a transposed one, in the form of aten, which exported graphs call.

    Args:
        call: the operation.
        input: a [n, groups·i, *space].
        weight: W, in the shape that `conv` or `conv_transpose` has.
        bias: b.
        stride: distance between neighboring windows.
        padding: number of zeros around the image.
        dilation: distance between the entries of a window.
        transposed: whether this is a transposed convolution, so that windows are cut from δ, not a.
        output_padding: size added to one side of the result; not read here, as the result has it.
        groups: number of groups of channels.

    Returns:
        The result; NotImplemented, so that the general path runs it, if rows are not on the first
        axis of `a`.
    """
    geometry = Geometry.of(weight, stride, padding, dilation, groups)
    space = len(geometry.kernel)
    layout = _image_layout(call, input, space)
    if layout is None:
        return NotImplemented
    out = call.run()
    edge = get_gradient_edge(out)
    if call.is_param(weight):
        images = _Images(input, weight, geometry, layout, call.num_samples)
        gradient: Outer | Summed
        if transposed:
            gradient = images.transposed()
        elif geometry.groups == weight.shape[0] > 1 and weight.shape[1] == 1:
            gradient = images.depthwise(out.shape[-space:])
        else:
            gradient = images.plain(out.shape[-space:])
        call.add_factor(weight, [edge], gradient)
    if call.is_param(bias):
        call.add_factor(bias, [edge], Summed.channels(call.num_samples, layout, bias, space=space))
    return out


def _image_layout(call: OpCall, input: Tensor, space: int) -> Layout | None:
    """Find the layout of images [n, channel, *space].

    None if another axis than the first counts the rows, or none does. A single row may also be one
    image without a batch axis.
    """
    layout = call.input_layout(input)
    if layout is None or layout.axis is None:
        return layout
    has_batch_axis = input.ndim == space + 2
    return layout if has_batch_axis and layout.axis == 0 else None


@dataclass(frozen=True)
class _Images:
    """The input of a convolution, and the gradients that its weight may have.

    Args:
        input: a [n, channel, *space].
        weight: W.
        geometry: kernel, stride, dilation, padding and groups of the windows.
        layout: which axis of the input counts the rows.
        num_samples: number of samples of the batch.
    """

    input: Tensor
    weight: Tensor
    geometry: Geometry
    layout: Layout
    num_samples: int

    def by_row(self, t: Tensor) -> Tensor:
        """Arrange images, or cotangents of them, as [n, channel, *space]."""
        space = len(self.geometry.kernel)
        return self.layout.rows_first(t).reshape(-1, *t.shape[-space - 1 :])

    @property
    def images_per_sample(self) -> int:
        """Number of images of each sample."""
        space = len(self.geometry.kernel)
        return math.prod(self.input.shape[: -space - 1]) // self.num_samples

    def depthwise(self, positions: tuple[int, ...]) -> Summed:
        """Build the gradient of a depthwise convolution, whose filters see one channel each.

        Args:
            positions: number of windows on each spatial axis.
        """

        def write(d: Tensor) -> Tensor:
            """Compute the gradients [b, c, 1, *kernel] from the cotangent of the result."""
            images = self.by_row(self.input)
            return depthwise_gradient(self.by_row(d), images, self.geometry, self.num_samples)

        numel = self.weight.numel()
        multiplications = self.images_per_sample * math.prod(positions) * numel
        return Summed.from_cotangent(write, numel, multiplications)

    def plain(self, positions: tuple[int, ...]) -> Outer:
        """Build the gradient of a convolution, Σ_t δ_t ⊗ (window of a at t).

        Args:
            positions: number of windows on each spatial axis.
        """
        weight, geometry = self.weight, self.geometry
        kernel, groups = geometry.kernel, geometry.groups
        features, count = weight.shape[0] // groups, math.prod(positions)

        def grad_outputs(d: Tensor) -> Tensor:
            """Arrange δ by position, as [n, t, g, o]."""
            d = self.by_row(d).movedim(1, -1)
            return d.reshape(d.shape[0], count, groups, features)

        def activations() -> Tensor:
            """Copy the windows of a, as [n, t, g, k·i]."""
            return extract_windows(self.by_row(self.input), geometry)

        def gram() -> Tensor:
            """Compute aaᵀ from the inner products between pixels."""
            return window_gram(at_least_float32(self.by_row(self.input)), geometry, self.num_samples)

        def arrange(grad: Tensor) -> Tensor:
            """Arrange [b, g, o, k·i] in the weight's shape, as [b, g·o, i, *k]."""
            grad = grad.flatten(1, 2).unflatten(-1, (*kernel, weight.shape[1]))
            return grad.movedim(-1, 2)

        def direct(d: Tensor) -> Tensor:
            """Compute the gradient of a single sample without copies of the windows."""
            return weight_gradient(self.by_row(d), self.by_row(self.input), weight, geometry)

        window = math.prod(kernel)
        pixels = geometry.count_pixels(self.input.shape[-len(kernel) :])
        # aaᵀ from inner products between pixels, or between windows: whichever is cheaper
        by_pixels = groups == 1 and pixels**2 < count**2 * window
        sizes = OuterSizes(
            self.images_per_sample * count, features, weight.shape[1] * window, groups
        )
        return Outer(
            grad_outputs,
            activations,
            arrange,
            self.num_samples,
            sizes,
            fast_gram=gram if by_pixels else None,
            direct=direct,
        )

    def transposed(self) -> Outer:
        """Build the gradient of a transposed convolution, Σ_t (window of δ at t) ⊗ a_t."""
        weight, geometry = self.weight, self.geometry
        kernel, groups = geometry.kernel, geometry.groups
        positions = self.input.shape[-len(kernel) :]

        def grad_outputs(d: Tensor) -> Tensor:
            """Cut the window of δ at each position of a, as [n, t, g, k·o]."""
            return extract_windows(self.by_row(d), geometry, positions)

        def activations() -> Tensor:
            """Arrange a by position, as [n, t, g, i]."""
            a = self.by_row(self.input).movedim(1, -1)
            return a.reshape(a.shape[0], positions.numel(), groups, -1)

        def arrange(grad: Tensor) -> Tensor:
            """Arrange [b, g, k·o, i] in the weight's shape, as [b, g·i, o, *k]."""
            grad = grad.mT.flatten(1, 2).unflatten(-1, (*kernel, weight.shape[1]))
            return grad.movedim(-1, 2)

        sizes = OuterSizes(
            self.images_per_sample * positions.numel(),
            weight.shape[1] * math.prod(kernel),
            weight.shape[0] // groups,
            groups,
        )
        return Outer(grad_outputs, activations, arrange, self.num_samples, sizes)
