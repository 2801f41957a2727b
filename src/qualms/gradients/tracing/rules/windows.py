"""The windows that a convolution sees, and the inner products between them, for any number of
spatial axes.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from qualms.gradients.precision import at_least_float32


@dataclass(frozen=True)
class Geometry:
    """Of a convolution: sizes on each spatial axis, and the zeros before and after it."""

    kernel: Sequence[int]
    stride: Sequence[int]
    dilation: Sequence[int]
    around: list[tuple[int, int]]
    groups: int

    def positions(self, space: Sequence[int]) -> list[int]:
        """How many windows fit on each axis of a padded image."""
        sizes = zip(space, self.kernel, self.stride, self.dilation, strict=True)
        return [(n - d * (k - 1) - 1) // s + 1 for n, k, s, d in sizes]


def pads(
    padding: str | int | Sequence[int], kernel: Sequence[int], dilation: Sequence[int]
) -> list[tuple[int, int]]:
    """Zeros before and after each spatial axis; an odd total of "same" puts the extra one after, as
    torch does.
    """
    if padding == "valid":
        return [(0, 0)] * len(kernel)
    if padding == "same":
        totals = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        return [(total // 2, total - total // 2) for total in totals]
    if isinstance(padding, int):
        return [(padding, padding)] * len(kernel)
    assert not isinstance(padding, str)
    sizes = list(padding) * (len(kernel) if len(padding) == 1 else 1)
    return [(int(p), int(p)) for p in sizes]


def windows(
    image: Float[Tensor, "n c *space"], geometry: Geometry, positions: Sequence[int] | None = None
) -> Float[Tensor, "n t g f"]:
    """What each output position sees, f = kernel · channels of the group.

    `positions` is their number on each axis; by default all that fit.
    """
    x = _padded(image, geometry.around).movedim(1, -1)
    n, *space, channels = x.shape
    kernel, groups = geometry.kernel, geometry.groups
    if positions is None:
        positions = geometry.positions(space)
    steps = x.stride()[1:-1]
    view = x.as_strided(
        (n, *positions, *kernel, channels),
        (
            x.stride(0),
            *(s * by for s, by in zip(steps, geometry.stride, strict=True)),
            *(s * by for s, by in zip(steps, geometry.dilation, strict=True)),
            x.stride(-1),
        ),
    )
    view = view.reshape(n, math.prod(positions), math.prod(kernel), groups, channels // groups)
    return view.transpose(2, 3).flatten(3)


def pixel_pairs(
    image: Float[Tensor, "n c *space"], geometry: Geometry, inputs: int
) -> Float[Tensor, "b t t"]:
    """The inner products between all windows of an input, from those between its pixels.

    Σ_k ⟨a[t + k], a[t' + k]⟩: a sum of shifted copies of the pixels' matrix, as many times cheaper
    than the windows' own product as a window has pixels.
    """
    x = _padded(image, geometry.around).movedim(1, -1)
    n, *space, channels = x.shape
    x = x.reshape(inputs, -1, channels)
    rows_per_sample = n // inputs
    products = torch.bmm(x, x.mT).reshape(inputs, rows_per_sample, *space, rows_per_sample, *space)
    positions = geometry.positions(space)
    total: Tensor | None = None
    for cut in _shifts(geometry, positions):
        shifted = products[(slice(None), slice(None), *cut, slice(None), *cut)]
        total = shifted.clone() if total is None else total.add_(shifted)
    assert total is not None
    t = rows_per_sample * math.prod(positions)
    return total.reshape(inputs, t, t)


def weight_gradient(
    cotangent: Float[Tensor, "n o *positions"],
    image: Float[Tensor, "n c *space"],
    weight: Tensor,
    geometry: Geometry,
) -> Tensor:
    """The gradient of a convolution's weight, added up over all images: torch's own, which makes no
    copy of windows.
    """
    x, space = _padded(at_least_float32(image), geometry.around), len(geometry.kernel)
    how = (
        list(geometry.stride),
        [0] * space,
        list(geometry.dilation),
        False,
        [0] * space,
        geometry.groups,
    )
    wanted = [False, True, False]
    found: Tensor = torch.ops.aten.convolution_backward(
        at_least_float32(cotangent), x, at_least_float32(weight.detach()), None, *how, wanted
    )[1]
    return found


def depthwise_gradient(
    cotangent: Float[Tensor, "n c *positions"],
    image: Float[Tensor, "n c *space"],
    geometry: Geometry,
    inputs: int,
) -> Float[Tensor, "b c 1 *kernel"]:
    """The gradient of each input's filters, one for each channel: Σ_t δ[c, t] a[c, t + k] for every
    offset k.

    One product with a shifted image for each offset, in whatever memory format there is: a copy of
    all windows would be as many times larger than the image.
    """
    x, d = _padded(at_least_float32(image), geometry.around), at_least_float32(cotangent)
    sums = []
    for cut in _shifts(geometry, d.shape[2:]):
        sums.append((x[(slice(None), slice(None), *cut)] * d).flatten(2).sum(2))
    of_rows = torch.stack(sums, dim=2).unflatten(0, (inputs, -1)).sum(1)
    return of_rows.unflatten(2, (1, *geometry.kernel))


def _shifts(geometry: Geometry, positions: Sequence[int]) -> Iterator[tuple[slice, ...]]:
    """For each offset in a window, the pixels of a padded image that the windows at all positions
    have there.
    """
    for offset in itertools.product(*(range(k) for k in geometry.kernel)):
        yield tuple(
            slice(o * d, o * d + (p - 1) * s + 1, s)
            for o, d, s, p in zip(
                offset, geometry.dilation, geometry.stride, positions, strict=True
            )
        )


def _padded(image: Tensor, around: list[tuple[int, int]]) -> Tensor:
    if not any(map(any, around)):
        return image
    return F.pad(image, [size for pair in reversed(around) for size in pair])
