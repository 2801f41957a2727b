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
        cls, weight: Tensor, stride: Any, padding: Any, dilation: Any, groups: int
    ) -> "Geometry":
        """Convert the arguments of a convolution of torch to one value for each axis.

        Args:
            weight: weight [o, i, *kernel], read for the size of the kernel.
            stride: a number, or one number for each axis.
            padding: a number, one number for each axis, "valid" or "same".
            dilation: a number, or one number for each axis.
            groups: number of groups of channels.
        """
        kernel = tuple(weight.shape[2:])
        steps = _per_axis(dilation, len(kernel))
        around = _padding_per_axis(padding, kernel, steps)
        return cls(kernel, _per_axis(stride, len(kernel)), steps, around, groups)

    def count_positions(self, space: Sequence[int]) -> list[int]:
        """Count the windows that fit on each axis.

        Args:
            space: size of the padded image on each axis.
        """
        sizes = zip(space, self.kernel, self.stride, self.dilation, strict=True)
        return [(n - d * (k - 1) - 1) // s + 1 for n, k, s, d in sizes]

    def count_pixels(self, space: Sequence[int]) -> int:
        """Count the pixels of a padded image, from the size `space` that it has before padding."""
        return math.prod(n + sum(pair) for n, pair in zip(space, self.padding, strict=True))

    def pad(self, image: Float[Tensor, "n c *space"]) -> Float[Tensor, "n c *padded"]:
        """Pad images with zeros."""
        if not any(map(any, self.padding)):
            return image
        return F.pad(image, list(itertools.chain(*reversed(self.padding))))

    def shifts(self, positions: Sequence[int]) -> Iterator[tuple[slice, ...]]:
        """For each offset inside a window, yield slices of the padded image.

        The slices select the pixel at that offset of the windows at all positions.

        Args:
            positions: number of windows on each axis.
        """
        for offset in itertools.product(*map(range, self.kernel)):
            cut = []
            for axis, number in enumerate(positions):
                start, step = offset[axis] * self.dilation[axis], self.stride[axis]
                cut.append(slice(start, start + (number - 1) * step + 1, step))
            yield tuple(cut)


def _per_axis(value: Any, space: int) -> tuple[int, ...]:
    """Repeat a single number for each of `space` axes."""
    if not isinstance(value, Sequence):
        return (int(value),) * space
    return tuple(value) * (space if len(value) == 1 else 1)


def _padding_per_axis(
    padding: Any, kernel: Sequence[int], dilation: Sequence[int]
) -> list[tuple[int, int]]:
    """Count the zeros before and after each axis.

    If "same" needs an odd number of zeros, the extra one comes after, as in torch.

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
    return [(int(p), int(p)) for p in _per_axis(padding, len(kernel))]


def extract_windows(
    image: Float[Tensor, "n c *space"], geometry: Geometry, positions: Sequence[int] | None = None
) -> Float[Tensor, "n t g f"]:
    """Copy the window at each position, with f = kernel size · channels of a group.

    Args:
        image: images before padding.
        geometry: kernel, stride, dilation, padding and groups of the windows.
        positions: number of windows on each axis; by default as many as fit.
    """
    x = geometry.pad(image).movedim(1, -1)
    n, *space, channels = x.shape
    kernel, groups = geometry.kernel, geometry.groups
    if positions is None:
        positions = geometry.count_positions(space)
    image_step, *axis_steps, channel_step = x.stride()
    between = [step * s for step, s in zip(axis_steps, geometry.stride, strict=True)]
    inside = [step * d for step, d in zip(axis_steps, geometry.dilation, strict=True)]
    # A view of all windows, which may overlap: [n, *positions, *kernel, channels].
    view = x.as_strided(
        (n, *positions, *kernel, channels),
        (image_step, *between, *inside, channel_step),
    )
    # The new shape needs a copy where windows overlap.
    view = view.reshape(n, math.prod(positions), math.prod(kernel), groups, channels // groups)
    return view.transpose(2, 3).flatten(3)


def window_gram(
    image: Float[Tensor, "n c *space"], geometry: Geometry, num_samples: int
) -> Float[Tensor, "b t t"]:
    """Compute the inner products between all windows of a sample from those between its pixels.

    Windows at t and t' have the inner product Σ_k ⟨a[t + k], a[t' + k]⟩, so their Gram matrix is a
    sum of shifted copies of the pixels' Gram matrix. If a window has K pixels, that takes 1/K of
    the multiplications.

    Args:
        image: images before padding; one group of channels.
        geometry: kernel, stride, dilation and padding of the windows.
        num_samples: number of samples that the images belong to, in order.
    """
    x = geometry.pad(image).movedim(1, -1)
    n, *space, channels = x.shape
    x = x.reshape(num_samples, -1, channels)
    images = n // num_samples
    products = torch.bmm(x, x.mT).reshape(num_samples, images, *space, images, *space)
    positions = geometry.count_positions(space)
    total: Tensor | None = None
    for cut in geometry.shifts(positions):
        shifted = products[(slice(None), slice(None), *cut, slice(None), *cut)]
        total = shifted.clone() if total is None else total.add_(shifted)
    assert total is not None
    t = images * math.prod(positions)
    return total.reshape(num_samples, t, t)


def weight_gradient(
    cotangent: Float[Tensor, "n o *positions"],
    image: Float[Tensor, "n c *space"],
    weight: Tensor,
    geometry: Geometry,
) -> Tensor:
    """Compute the gradient of a convolution's weight by torch's own kernel, summed over images.

    The kernel does not copy the windows.

    Args:
        cotangent: cotangent δ of the convolution's result.
        image: the convolution's input a, before padding.
        weight: weight W, read for its shape.
        geometry: kernel, stride, dilation, padding and groups of the windows.
    """
    x = geometry.pad(at_least_float32(image))
    zeros = [0] * len(geometry.kernel)
    _, gradient, _ = torch.ops.aten.convolution_backward(
        at_least_float32(cotangent),
        x,
        at_least_float32(weight.detach()),
        None,  # no bias
        list(geometry.stride),
        zeros,  # already padded
        list(geometry.dilation),
        False,  # not transposed
        zeros,
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

    One product with a shifted image for each offset: a copy of all windows would be larger than the
    image by the number of offsets.

    Args:
        cotangent: cotangent δ of the convolution's result.
        image: the convolution's input a, before padding.
        geometry: kernel, stride, dilation and padding of the windows.
        num_samples: number of samples that the images belong to, in order.
    """
    x, d = geometry.pad(at_least_float32(image)), at_least_float32(cotangent)
    sums = []
    for cut in geometry.shifts(d.shape[2:]):
        product = x[(slice(None), slice(None), *cut)] * d
        sums.append(product.flatten(2).sum(2))
    of_samples = torch.stack(sums, dim=2).unflatten(0, (num_samples, -1)).sum(1)
    return of_samples.unflatten(2, (1, *geometry.kernel))
