"""The windows that a convolution sees, and the inner products between them, for any number of
spatial axes.
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
        stride: distance between windows.
        dilation: distance between the entries of a window.
        padding: zeros before and after each axis.
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
        """The geometry of a convolution with arguments as torch takes them.

        Args:
            weight: [o, i, *kernel].
            stride: a number, or one for each axis.
            padding: likewise, or "valid" or "same".
            dilation: a number, or one for each axis.
            groups: number of groups of channels.
        """
        kernel = tuple(weight.shape[2:])
        steps = _per_axis(dilation, len(kernel))
        around = _padding_per_axis(padding, kernel, steps)
        return cls(kernel, _per_axis(stride, len(kernel)), steps, around, groups)

    def count_positions(self, space: Sequence[int]) -> list[int]:
        """How many windows fit on each axis of a padded image."""
        sizes = zip(space, self.kernel, self.stride, self.dilation, strict=True)
        return [(n - d * (k - 1) - 1) // s + 1 for n, k, s, d in sizes]

    def count_pixels(self, space: Sequence[int]) -> int:
        """How many pixels an image has when it is padded."""
        return math.prod(n + sum(pair) for n, pair in zip(space, self.padding, strict=True))

    def pad(self, image: Float[Tensor, "n c *space"]) -> Float[Tensor, "n c *padded"]:
        """The image with zeros around it."""
        if not any(map(any, self.padding)):
            return image
        return F.pad(image, list(itertools.chain(*reversed(self.padding))))

    def shifts(self, positions: Sequence[int]) -> Iterator[tuple[slice, ...]]:
        """For each offset in a window, the pixels that the windows at all positions have there."""
        for offset in itertools.product(*map(range, self.kernel)):
            cut = []
            for axis, number in enumerate(positions):
                start, step = offset[axis] * self.dilation[axis], self.stride[axis]
                cut.append(slice(start, start + (number - 1) * step + 1, step))
            yield tuple(cut)


def _per_axis(value: Any, space: int) -> tuple[int, ...]:
    if not isinstance(value, Sequence):
        return (int(value),) * space
    return tuple(value) * (space if len(value) == 1 else 1)


def _padding_per_axis(
    padding: Any, kernel: Sequence[int], dilation: Sequence[int]
) -> list[tuple[int, int]]:
    """Zeros before and after each axis; "same" puts the extra one of an odd total after, as torch
    does.
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
    """Copy the window at each position, f = kernel · channels of the group.

    Args:
        image: the images.
        geometry: of the windows.
        positions: number of windows on each axis; by default all that fit.
    """
    x = geometry.pad(image).movedim(1, -1)
    n, *space, channels = x.shape
    kernel, groups = geometry.kernel, geometry.groups
    if positions is None:
        positions = geometry.count_positions(space)
    first, *steps, last = x.stride()
    between = [s * by for s, by in zip(steps, geometry.stride, strict=True)]
    inside = [s * by for s, by in zip(steps, geometry.dilation, strict=True)]
    view = x.as_strided(
        (n, *positions, *kernel, channels),
        (first, *between, *inside, last),
    )
    view = view.reshape(n, math.prod(positions), math.prod(kernel), groups, channels // groups)
    return view.transpose(2, 3).flatten(3)


def window_gram(
    image: Float[Tensor, "n c *space"], geometry: Geometry, samples: int
) -> Float[Tensor, "b t t"]:
    """The inner products between all windows of a sample, from those between its pixels.

    Σ_k ⟨a[t + k], a[t' + k]⟩: a sum of shifted copies of the pixels' Gram matrix, as many times
    cheaper than the windows' own as a window has pixels.
    """
    x = geometry.pad(image).movedim(1, -1)
    n, *space, channels = x.shape
    x = x.reshape(samples, -1, channels)
    images = n // samples
    products = torch.bmm(x, x.mT).reshape(samples, images, *space, images, *space)
    positions = geometry.count_positions(space)
    total: Tensor | None = None
    for cut in geometry.shifts(positions):
        shifted = products[(slice(None), slice(None), *cut, slice(None), *cut)]
        total = shifted.clone() if total is None else total.add_(shifted)
    assert total is not None
    t = images * math.prod(positions)
    return total.reshape(samples, t, t)


def weight_gradient(
    cotangent: Float[Tensor, "n o *positions"],
    image: Float[Tensor, "n c *space"],
    weight: Tensor,
    geometry: Geometry,
) -> Tensor:
    """The gradient of a convolution's weight, added up over all images, without a copy of windows.

    This is torch's own.

    Args:
        cotangent: δ.
        image: a.
        weight: W, for its shape.
        geometry: of the windows.
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
    samples: int,
) -> Float[Tensor, "b c 1 *kernel"]:
    """The gradient of filters for one channel each: Σ_t δ[c, t] a[c, t + k] for every offset k.

    One product with a shifted image for each offset, in whatever memory format there is: a copy of
    all windows would be as many times larger than the image.

    Args:
        cotangent: δ.
        image: a.
        geometry: of the windows.
        samples: number of samples.
    """
    x, d = geometry.pad(at_least_float32(image)), at_least_float32(cotangent)
    sums = []
    for cut in geometry.shifts(d.shape[2:]):
        product = x[(slice(None), slice(None), *cut)] * d
        sums.append(product.flatten(2).sum(2))
    of_samples = torch.stack(sums, dim=2).unflatten(0, (samples, -1)).sum(1)
    return of_samples.unflatten(2, (1, *geometry.kernel))
