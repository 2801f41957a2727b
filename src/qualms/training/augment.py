"""Random crops, flips and small rotations of a batch of images, from one generator."""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

PADDING = 4  # pixels that a crop may move the image by
DEGREES = 15.0


def augment(
    x: Float[Tensor, "n c h w"],
    draws: torch.Generator,
) -> Float[Tensor, "n c h w"]:
    """Mirror half of the images, rotate each by up to 15 degrees, and shift it by up to 4 pixels.

    All three are done in one resampling: pixel u of the result is pixel A u of the image, with A an
    affine map for each image. Pixels from outside the image are 0, the mean color of normalized
    images.

    Args:
        x: a batch of normalized images, [n, c, h, w].
        draws: the random generator for flips, angles and shifts.

    Returns:
        The augmented images, [n, c, h, w].
    """
    n, _, h, w = x.shape
    angle = (2 * torch.rand(n, generator=draws) - 1) * math.radians(DEGREES)
    flip_sign = 1 - 2 * torch.randint(0, 2, (n,), generator=draws).float()  # -1 mirrors
    shift_in_pixels = torch.randint(-PADDING, PADDING + 1, (n, 2), generator=draws)
    # grid_sample counts from -1 to 1 across the image, so a pixel is 2 / w or 2 / h.
    shift = shift_in_pixels * 2 / torch.tensor([w, h])
    cos, sin = angle.cos(), angle.sin()
    # The two rows of each A: flip and rotation in the first two columns, the shift in the third.
    affine_maps = torch.stack(
        [flip_sign * cos, -sin, shift[:, 0], flip_sign * sin, cos, shift[:, 1]],
        dim=1,
    ).reshape(n, 2, 3)
    grid = F.affine_grid(affine_maps.to(x), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, align_corners=False)
