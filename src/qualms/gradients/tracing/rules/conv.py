"""Rules for convolutions: the same sum over positions as for linear layers, but over windows.

With activations a and the cotangent δ of the result, the gradient of a convolution's weight is a
sum over the positions of δ, with windows of a. A transposed convolution is a convolution run
backwards: a sum over the positions of a, with windows of δ.
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

    δ is the cotangent of the result, at positions t; o and i count output and input channels.

    Args:
        call: the operation `conv1d`, `conv2d` or `conv3d`.
        input: the activations a [n, groups·i, *space].
        weight: W [o, i, *kernel].
        bias: b [o].
        stride: distance between neighboring windows.
        padding: number of zeros around the image.
        dilation: distance between the entries of a window.
        groups: number of groups of channels.

    Returns:
        The result; NotImplemented, so that `OpCall.run_on_copies` runs it, if the batch axis is not
        the first.
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

    ∂b[o] = Σ_t δ[o, t]. δ is the cotangent of the result, and i and o count input and output
    channels.

    Args:
        call: the operation `conv_transpose1d`, `conv_transpose2d` or `conv_transpose3d`.
        input: the activations a [n, groups·i, *space], at positions t.
        weight: W [groups·i, o, *kernel].
        bias: b [groups·o].
        stride: distance between neighboring windows.
        padding: number of zeros around the result, which are cut off.
        output_padding: size added to one side of the result; not read here, as the result has it.
        groups: number of groups of channels.
        dilation: distance between the entries of a window.

    Returns:
        The result; NotImplemented, so that `OpCall.run_on_copies` runs it, if the batch axis is not
        the first.
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
    """Run `aten::convolution`, a convolution or a transposed one, which exported graphs call.

    Args:
        call: the operation.
        input: the activations [n, groups·in_channels, *space].
        weight: the weight, [out_channels, in_channels, *kernel], or with the first two axes swapped
            if the convolution is transposed.
        bias: the bias [out_channels].
        stride: distance between neighboring windows.
        padding: number of zeros around the image.
        dilation: distance between the entries of a window.
        transposed: whether this is a transposed convolution, so that windows are cut from the
            cotangent of the result, not from the input.
        output_padding: size added to one side of the result; not read here, as the result has it.
        groups: number of groups of channels.

    Returns:
        The result; NotImplemented, so that `OpCall.run_on_copies` runs it, if the batch axis is not
        the first.
    """
    geometry = Geometry.of(weight, stride, padding, dilation, groups)
    space = len(geometry.kernel)
    layout = _image_layout(call, input, space)
    if layout is None:
        return NotImplemented
    out = call.run()
    edge = get_gradient_edge(out)
    if call.is_param(weight):
        images = _ConvInput(input, weight, geometry, layout, call.num_samples)
        # Each channel is a group of its own.
        is_depthwise = geometry.groups == weight.shape[0] > 1 and weight.shape[1] == 1
        gradient: Outer | Summed
        if transposed:
            gradient = images.build_transposed_gradient()
        elif is_depthwise:
            gradient = images.build_depthwise_gradient(out.shape[-space:])
        else:
            gradient = images.build_gradient(out.shape[-space:])
        call.add_factor(weight, [edge], gradient)
    if call.is_param(bias):
        bias_gradient = Summed.for_channels(call.num_samples, layout, bias, space=space)
        call.add_factor(bias, [edge], bias_gradient)
    return out


def _image_layout(call: OpCall, input: Tensor, space: int) -> Layout | None:
    """Find the batch axis of the images that a convolution takes.

    Args:
        call: the convolution.
        input: the images [n, channel, *space]; [channel, *space] is allowed for a single row.
        space: number of spatial axes.

    Returns:
        The layout; None if the batch axis is not the first, or if there is none.
    """
    layout = call.find_input_layout(input)
    if layout is None or layout.axis is None:
        return layout
    has_batch_axis = input.ndim == space + 2
    return layout if has_batch_axis and layout.axis == 0 else None


@dataclass(frozen=True)
class _ConvInput:
    """The input of a convolution; builds the gradient of the convolution's weight.

    Args:
        input: the images [n, channel, *space]; [channel, *space] is allowed for a single row.
        weight: the weight, as the operation takes it.
        geometry: kernel, stride, dilation, padding and groups of the windows.
        layout: which axis of the input is the batch axis.
        num_samples: number of samples of the batch.
    """

    input: Tensor
    weight: Tensor
    geometry: Geometry
    layout: Layout
    num_samples: int

    def rows_first(self, t: Tensor) -> Tensor:
        """Reshape the convolution's input, or a cotangent of its result, to [n, channel, *space].

        The images are in the order of the rows. A single image gets the axis n.
        """
        space = len(self.geometry.kernel)
        return self.layout.rows_first(t).reshape(-1, *t.shape[-space - 1 :])

    @property
    def images_per_sample(self) -> int:
        """Number of images of each sample; the axes before the channels count the images."""
        space = len(self.geometry.kernel)
        return math.prod(self.input.shape[: -space - 1]) // self.num_samples

    def build_depthwise_gradient(self, positions: tuple[int, ...]) -> Summed:
        """Build the gradient of a depthwise convolution, whose filters see one channel each.

        Args:
            positions: number of windows on each spatial axis.
        """

        def correlate(cotangent: Tensor) -> Tensor:
            """Compute the gradients [b, c, 1, *kernel], for b samples and c channels.

            The argument is the cotangent of the convolution's result.
            """
            delta, images = self.rows_first(cotangent), self.rows_first(self.input)
            return depthwise_gradient(delta, images, self.geometry, self.num_samples)

        numel = self.weight.numel()
        multiplications = self.images_per_sample * math.prod(positions) * numel
        return Summed.from_cotangent(correlate, numel, multiplications)

    def build_gradient(self, positions: tuple[int, ...]) -> Outer:
        """Build the gradient of a convolution, Σ_t δ_t ⊗ (window of the input at t).

        δ_t is the cotangent of the result at position t. In the shapes below, n counts images, t
        positions, g groups, o and i output and input channels of a group, k entries of a window.

        Args:
            positions: number of windows on each spatial axis.
        """
        weight, geometry = self.weight, self.geometry
        kernel, groups = geometry.kernel, geometry.groups
        out_channels, in_channels = weight.shape[0] // groups, weight.shape[1]
        num_positions, window_size = math.prod(positions), math.prod(kernel)

        def arrange_cotangent(cotangent: Tensor) -> Tensor:
            """Reshape the cotangent of the result to [n, t, g, o]."""
            delta = self.rows_first(cotangent).movedim(1, -1)
            return delta.reshape(delta.shape[0], num_positions, groups, out_channels)

        def cut_windows() -> Tensor:
            """Copy the windows of the input, as [n, t, g, k·i]."""
            return extract_windows(self.rows_first(self.input), geometry)

        def gram_from_pixels() -> Tensor:
            """Compute the inner products between windows from those between pixels."""
            images = at_least_float32(self.rows_first(self.input))
            return window_gram(images, geometry, self.num_samples)

        def arrange(grad: Tensor) -> Tensor:
            """Reshape the gradient [b, g, o, k·i] of b samples to [b, *weight.shape]."""
            grad = grad.flatten(1, 2).unflatten(-1, (*kernel, in_channels))
            return grad.movedim(-1, 2)

        def compute_directly(cotangent: Tensor) -> Tensor:
            """Compute the gradient of a single sample without copies of the windows."""
            delta, images = self.rows_first(cotangent), self.rows_first(self.input)
            return weight_gradient(delta, images, weight, geometry)

        # Inner products between all pixels, or between all windows: whichever is cheaper.
        num_pixels = geometry.count_pixels(self.input.shape[-len(kernel) :])
        is_gram_from_pixels = groups == 1 and num_pixels**2 < num_positions**2 * window_size
        sizes = OuterSizes(
            positions=self.images_per_sample * num_positions,
            out_features=out_channels,
            in_features=in_channels * window_size,
            groups=groups,
        )
        return Outer(
            grad_outputs=arrange_cotangent,
            activations=cut_windows,
            arrange=arrange,
            num_samples=self.num_samples,
            sizes=sizes,
            fast_gram=gram_from_pixels if is_gram_from_pixels else None,
            direct=compute_directly,
        )

    def build_transposed_gradient(self) -> Outer:
        """Build the gradient of a transposed convolution, Σ_t (window of δ at t) ⊗ a_t.

        δ is the cotangent of the result, and a_t the input at position t. In the shapes below, n
        counts images, g groups, o and i output and input channels of a group, k window entries.
        """
        weight, geometry = self.weight, self.geometry
        kernel, groups = geometry.kernel, geometry.groups
        in_channels, out_channels = weight.shape[0] // groups, weight.shape[1]
        positions = self.input.shape[-len(kernel) :]
        num_positions = positions.numel()

        def cut_windows(cotangent: Tensor) -> Tensor:
            """Copy the window of the cotangent at each input position t, as [n, t, g, k·o]."""
            return extract_windows(self.rows_first(cotangent), geometry, positions)

        def arrange_input() -> Tensor:
            """Reshape the input to [n, t, g, i]."""
            images = self.rows_first(self.input).movedim(1, -1)
            return images.reshape(images.shape[0], num_positions, groups, in_channels)

        def arrange(grad: Tensor) -> Tensor:
            """Reshape the gradient [b, g, k·o, i] of b samples to [b, *weight.shape]."""
            grad = grad.mT.flatten(1, 2).unflatten(-1, (*kernel, out_channels))
            return grad.movedim(-1, 2)

        sizes = OuterSizes(
            positions=self.images_per_sample * num_positions,
            out_features=out_channels * math.prod(kernel),
            in_features=in_channels,
            groups=groups,
        )
        return Outer(
            grad_outputs=cut_windows,
            activations=arrange_input,
            arrange=arrange,
            num_samples=self.num_samples,
            sizes=sizes,
        )
