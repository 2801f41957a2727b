"""A small fully convolutional network for segmentation, with logits of the image's size."""

from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor, nn

# The number of channels at each level of the way down; each level has half the height and width of
# the level above it.
DOWN_CHANNELS = (16, 32, 64)
# The number of channels at each level of the way back up.
UP_CHANNELS = (48, 24)


class FCN(nn.Module):
    """A U-Net (Ronneberger et al., MICCAI 2015) of three levels.

    Each level of the way down halves height and width, so that a pixel's logits depend on a wide
    area. Each level of the way up also takes the features of the same size from the way down, which
    keep the positions of edges. Height and width of the images must be multiples of 4. With 9
    classes and one channel, the network has some 128,000 weights.

    Args:
        classes: the number of classes.
        channels: the number of channels of the images.

    Example:
        ```python
        import torch
        from qualms.models.fcn import FCN

        assert FCN(classes=9)(torch.rand(2, 1, 48, 48)).shape == (2, 9, 48, 48)
        ```
    """

    def __init__(self, classes: int, channels: int = 1) -> None:
        super().__init__()
        self.down = nn.ModuleList()
        for in_channels, out_channels in pairwise((channels, *DOWN_CHANNELS)):
            self.down.append(_build_convolutions(in_channels, out_channels, out_channels))
        self.up = nn.ModuleList()
        channels_below = DOWN_CHANNELS[-1]
        # Each level takes the output of the level below it, and the features of its own size from
        # the way down, whose levels are joined from the last but one to the first.
        for skip_channels, out_channels in zip(DOWN_CHANNELS[-2::-1], UP_CHANNELS, strict=True):
            self.up.append(_build_convolutions(channels_below + skip_channels, out_channels))
            channels_below = out_channels
        self.shrink = nn.MaxPool2d(2)
        self.grow = nn.Upsample(scale_factor=2)
        self.head = nn.Conv2d(UP_CHANNELS[-1], classes, 1)

    def forward(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n k h w"]:
        """Map images [n, channels, h, w] to the logits of each pixel, [n, classes, h, w]."""
        # The features of each level of the way down.
        features: list[Tensor] = []
        for i, level in enumerate(self.down):
            x = level(x if i == 0 else self.shrink(x))
            features.append(x)
        # The lowest level has nothing below it to be joined with.
        x = features.pop()
        for level in self.up:
            x = level(torch.cat([self.grow(x), features.pop()], 1))
        return self.head(x)


def _build_convolutions(*channels: int) -> nn.Sequential:
    """Create a sequence of 3x3 convolutions, each with batch normalization and ReLU.

    Args:
        channels: the number of channels of the input, then of each convolution's output.
    """
    layers: list[nn.Module] = []
    for in_channels, out_channels in pairwise(channels):
        layers += [
            nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers)
