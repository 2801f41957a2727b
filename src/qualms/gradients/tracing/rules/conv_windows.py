"""Cuts out the windows of a convolution, and computes inner products between them.

All functions take any number of spatial axes.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from qualms.gradients.precision import at_least_float32


@dataclass(frozen=True)
class Geometry:
    """The windows of a convolution.

    Args:
        kernel: size of a window on each spatial axis.
        stride: distance between neighboring windows on each axis.
        dilation: distance between the entries of a window on each axis.
        padding: number of zeros before and after each axis.
        groups: number of groups of channels.
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: list[tuple[int, int]]
    groups: int

    @classmethod
    def of(
        cls,
        weight: Tensor,
        stride: Any,
        padding: Any,
        dilation: Any,
        groups: int,
    ) -> "Geometry":
        """Convert the arguments of a convolution of torch to one value for each spatial axis.

        Args:
            weight: weight [o, i, *kernel], read for the size of the kernel.
            stride: a number, or one number for each axis.
            padding: a number, one number for each axis, "valid" or "same".
            dilation: a number, or one number for each axis.
            groups: number of groups of channels.
        """
        kernel = tuple(weight.shape[2:])
        dilations = _repeat_per_axis(dilation, len(kernel))
        return cls(
            kernel=kernel,
            stride=_repeat_per_axis(stride, len(kernel)),
            dilation=dilations,
            padding=_padding_per_axis(padding, kernel, dilations),
            groups=groups,
        )

    def count_positions(self, space: Sequence[int]) -> list[int]:
        """Count the windows that fit on each axis.

        Args:
            space: size of the padded image on each axis.
        """
        counts: list[int] = []
        for size, k, s, d in zip(space, self.kernel, self.stride, self.dilation, strict=True):
            # From the first entry of a window to its last: k entries, d apart.
            extent = d * (k - 1) + 1
            counts.append((size - extent) // s + 1)
        return counts

    def count_pixels(self, space: Sequence[int]) -> int:
        """Count the pixels of a padded image.

        Args:
            space: size of the image on each axis, before padding.
        """
        pairs = zip(space, self.padding, strict=True)
        return math.prod(size + sum(before_and_after) for size, before_and_after in pairs)

    def pad(self, image: Float[Tensor, "n c *space"]) -> Float[Tensor, "n c *padded"]:
        """Pad n images of c channels with the zeros that the convolution puts around them."""
        if not any(map(any, self.padding)):
            return image
        # F.pad takes the last axis first.
        return F.pad(image, list(itertools.chain(*reversed(self.padding))))

    def iterate_offsets(self, positions: Sequence[int]) -> Iterator[tuple[slice, ...]]:
        """Yield slices of the padded image, a tuple for each offset inside a window.

        The slices of an offset select the pixels that the windows at all positions have there.

        Args:
            positions: number of windows on each axis.
        """
        for offset in itertools.product(*map(range, self.kernel)):
            slices: list[slice] = []
            for axis, num_windows in enumerate(positions):
                start, step = offset[axis] * self.dilation[axis], self.stride[axis]
                stop = start + (num_windows - 1) * step + 1
                slices.append(slice(start, stop, step))
            yield tuple(slices)


def _repeat_per_axis(value: Any, space: int) -> tuple[int, ...]:
    """Return one number for each spatial axis, as torch's `stride=2` means 2 on all axes.

    Args:
        value: a number, or a sequence of one number or of one for each axis.
        space: number of spatial axes.
    """
    if not isinstance(value, Sequence):
        return (int(value),) * space
    return tuple(value) * (space if len(value) == 1 else 1)


def _padding_per_axis(
    padding: Any, kernel: Sequence[int], dilation: Sequence[int]
) -> list[tuple[int, int]]:
    """Count the zeros that padding puts before and after the entries of each axis.

    If "same" needs an odd number of zeros, the additional one is after the entries, as in torch.

    Args:
        padding: a number, one number for each axis, "valid" or "same".
        kernel: size of a window on each axis, read for "same".
        dilation: distance between the entries of a window on each axis, read for "same".
    """
    if padding == "valid":
        return [(0, 0)] * len(kernel)
    if padding == "same":
        totals = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        return [(total // 2, total - total // 2) for total in totals]
    return [(int(p), int(p)) for p in _repeat_per_axis(padding, len(kernel))]


def extract_windows(
    image: Float[Tensor, "n c *space"], geometry: Geometry, positions: Sequence[int] | None = None
) -> Float[Tensor, "n t g f"]:
    """Copy the window of each of n images at each of t positions.

    Args:
        image: images before padding, with c channels.
        geometry: kernel, stride, dilation, padding and groups of the windows.
        positions: number of windows on each axis; by default as many as fit.

    Returns:
        The windows of g groups of channels, with f = entries of the kernel · channels of a group.
    """
    padded = geometry.pad(image).movedim(1, -1)  # [n, *space, c]
    n, *space, channels = padded.shape
    kernel, groups = geometry.kernel, geometry.groups
    if positions is None:
        positions = geometry.count_positions(space)
    # Strides in memory: from a window to the next, and from an entry of a window to the next.
    image_stride, *axis_strides, channel_stride = padded.stride()
    window_strides = [m * s for m, s in zip(axis_strides, geometry.stride, strict=True)]
    entry_strides = [m * d for m, d in zip(axis_strides, geometry.dilation, strict=True)]
    # A view of all windows, which may overlap: [n, *positions, *kernel, channels].
    view = padded.as_strided(
        (n, *positions, *kernel, channels),
        (image_stride, *window_strides, *entry_strides, channel_stride),
    )
    # The new shape needs a copy where windows overlap.
    windows = view.reshape(n, math.prod(positions), math.prod(kernel), groups, channels // groups)
    return windows.transpose(2, 3).flatten(3)


def window_gram(
    image: Float[Tensor, "n c *space"], geometry: Geometry, num_samples: int
) -> Float[Tensor, "b t t"]:
    """Compute the inner products between all windows of a sample from those between its pixels.

    The windows of an image a at positions t and t' have the inner product Σ_k ⟨a[t + k], a[t' + k]⟩
    over offsets k. So their Gram matrix is a sum of shifted copies of the pixels' Gram matrix. If a
    window has K pixels, that takes 1/K of the multiplications.

    Args:
        image: n images before padding, with c channels in a single group.
        geometry: kernel, stride, dilation and padding of the windows.
        num_samples: number of samples that the images belong to, in order.

    Returns:
        A Gram matrix for each of b samples, over the t windows of all images of the sample.
    """
    padded = geometry.pad(image).movedim(1, -1)  # [n, *space, c]
    n, *space, channels = padded.shape
    pixels = padded.reshape(num_samples, -1, channels)
    images_per_sample = n // num_samples
    pixel_gram = torch.bmm(pixels, pixels.mT).reshape(
        num_samples, images_per_sample, *space, images_per_sample, *space
    )
    positions = geometry.count_positions(space)
    gram: Tensor | None = None
    for slices in geometry.iterate_offsets(positions):
        # The pixels at one offset of all windows, on both sides of the inner product.
        part = pixel_gram[(slice(None), slice(None), *slices, slice(None), *slices)]
        gram = part.clone() if gram is None else gram.add_(part)
    assert gram is not None
    num_windows = images_per_sample * math.prod(positions)
    return gram.reshape(num_samples, num_windows, num_windows)


def weight_gradient(
    cotangent: Float[Tensor, "n o *positions"],
    image: Float[Tensor, "n c *space"],
    weight: Tensor,
    geometry: Geometry,
) -> Tensor:
    """Compute the gradient of a convolution's weight by torch's own kernel, summed over images.

    torch's kernel does not copy the windows, which may be large.

    Args:
        cotangent: cotangent δ of the convolution's result.
        image: the convolution's input a, before padding.
        weight: weight W, read for its shape.
        geometry: kernel, stride, dilation, padding and groups of the windows.
    """
    # Padded here, as torch's kernel takes the same padding before and after an axis only.
    padded = geometry.pad(at_least_float32(image))
    zeros = [0] * len(geometry.kernel)
    _, gradient, _ = torch.ops.aten.convolution_backward(
        at_least_float32(cotangent),
        padded,
        at_least_float32(weight.detach()),
        None,  # no bias
        list(geometry.stride),
        zeros,  # no further padding
        list(geometry.dilation),
        False,  # not transposed
        zeros,  # no output padding
        geometry.groups,
        [False, True, False],  # the weight's gradient alone
    )
    return gradient


def depthwise_gradient(
    cotangent: Float[Tensor, "n c *positions"],
    image: Float[Tensor, "n c *space"],
    geometry: Geometry,
    num_samples: int,
) -> Float[Tensor, "b c 1 *kernel"]:
    """Compute the gradient of a depthwise convolution: Σ_t δ[c, t] a[c, t + k] for each offset k.

    δ is the cotangent of the result, a the image, c a channel and t a position. Each offset takes
    one product with a shifted image: a copy of all windows would take as many times the image's
    memory as there are offsets.

    Args:
        cotangent: cotangent δ of the convolution's result.
        image: the convolution's input a, before padding.
        geometry: kernel, stride, dilation and padding of the windows.
        num_samples: number of samples that the images belong to, in order.
    """
    padded, delta = geometry.pad(at_least_float32(image)), at_least_float32(cotangent)
    sums: list[Tensor] = []
    for slices in geometry.iterate_offsets(delta.shape[2:]):
        product = padded[(slice(None), slice(None), *slices)] * delta
        sums.append(product.flatten(2).sum(2))
    by_image = torch.stack(sums, dim=2)  # [n, c, number of offsets]
    by_sample = by_image.unflatten(0, (num_samples, -1)).sum(1)
    return by_sample.unflatten(2, (1, *geometry.kernel))
