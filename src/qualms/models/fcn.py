"""A small fully convolutional network for segmentation, with logits of the image's size."""

from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor, nn

# Channels at each level, half as wide and high as the one before.
DOWN = (16, 32, 64)
UP = (48, 24)  # channels at each level on the way back up


class FCN(nn.Module):
    """A U-Net (Ronneberger et al., MICCAI 2015) of three levels.

    Each level down halves height and width, so that a pixel's logits depend on a wide area. Each
    level up joins the features of the same size from the way down, which know where things are.
    Height and width are multiples of 4. With 9 classes and one channel it has some 128,000 weights.

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
        self.down = nn.ModuleList(_convolutions(a, b, b) for a, b in pairwise((channels, *DOWN)))
        self.up = nn.ModuleList()
        below = DOWN[-1]
        # `below` channels come up from the level below, `beside` ones from the way down.
        for beside, outputs in zip(DOWN[-2::-1], UP, strict=True):
            self.up.append(_convolutions(below + beside, outputs))
            below = outputs
        self.shrink = nn.MaxPool2d(2)
        self.grow = nn.Upsample(scale_factor=2)
        self.head = nn.Conv2d(UP[-1], classes, 1)

    def forward(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n k h w"]:
        """Compute the logits of every class at every pixel."""
        # The features of each level on the way down.
        seen: list[Tensor] = []
        for i, level in enumerate(self.down):
            x = level(x if i == 0 else self.shrink(x))
            seen.append(x)
        x = seen.pop()
        for level in self.up:
            x = level(torch.cat([self.grow(x), seen.pop()], 1))
        return self.head(x)


def _convolutions(*channels: int) -> nn.Sequential:
    """Create 3x3 convolutions, each with batch normalization and ReLU.

    Args:
        channels: the number of channels of the input, then of each convolution's output.
    """
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(channels):
        layers += [
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers)
