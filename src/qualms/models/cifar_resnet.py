"""He et al.'s residual networks for CIFAR (CVPR 2016, section 4.2): three stages of 16, 32 and 64
channels.

They are much smaller than the ResNets of `resnet.py`, which have four stages of 64 to 512 channels
as for ImageNet. Most published CIFAR checkpoints are of this kind; they differ in the shortcuts
between stages.
"""

import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output; if they differ from `in_channels`, height and width
            are halved.
        has_shortcut_weights: whether a shortcut that changes the shape is a convolution. If not,
            it subsamples the pixels and adds channels of zeros.
    """

    def __init__(self, in_channels: int, out_channels: int, has_shortcut_weights: bool) -> None:
        super().__init__()
        # A block that adds channels also halves height and width.
        self.stride = 1 if in_channels == out_channels else 2
        self.new_channels = out_channels - in_channels
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, self.stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.downsample: nn.Module | None = None
        if self.stride == 2 and has_shortcut_weights:
            self.downsample = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, 2, bias=False), nn.BatchNorm2d(out_channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Map [n, in_channels, h, w] to [n, out_channels, h/stride, w/stride]."""
        h = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(h + self._apply_shortcut(x))

    def _apply_shortcut(self, x: Tensor) -> Tensor:
        """Return the block's input in the shape of its output."""
        if self.downsample is not None:
            return self.downsample(x)
        if self.stride == 1:
            return x
        # Take every second pixel, and add half of the new channels, all zeros, before the channels
        # of x and half after them.
        half = self.new_channels // 2
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, half, half))


class CifarResNet(nn.Module):
    """A 3x3 stem, three stages of blocks, the mean over space, and a linear layer.

    Args:
        blocks: the number of blocks in each stage.
        classes: the number of classes.
        has_shortcut_weights: whether shortcuts that change the shape are convolutions.
    """

    def __init__(self, blocks: int, classes: int, has_shortcut_weights: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = _build_stage(16, 16, blocks, has_shortcut_weights)
        self.layer2 = _build_stage(16, 32, blocks, has_shortcut_weights)
        self.layer3 = _build_stage(32, 64, blocks, has_shortcut_weights)
        self.fc = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map [n, 3, 32, 32] to [n, classes]."""
        h = F.relu(self.bn1(self.conv1(x)))
        h = self.layer3(self.layer2(self.layer1(h)))
        return self.fc(h.mean((2, 3)))


def _build_stage(
    in_channels: int,
    out_channels: int,
    blocks: int,
    has_shortcut_weights: bool,
) -> nn.Sequential:
    """Create a stage: a sequence of blocks with the same number of output channels.

    Args:
        in_channels: channels of the input.
        out_channels: channels of every block's output.
        blocks: the number of blocks.
        has_shortcut_weights: whether a shortcut that changes the shape is a convolution.
    """
    stage = [Block(in_channels, out_channels, has_shortcut_weights)]
    for _ in range(blocks - 1):
        stage.append(Block(out_channels, out_channels, has_shortcut_weights))
    return nn.Sequential(*stage)


def resnet20(classes: int = 10, has_shortcut_weights: bool = False) -> CifarResNet:
    """Create ResNet-20, with three blocks a stage: 0.27 million parameters.

    By default, its shortcuts are those of the published weights in `ZOO`, without weights.
    """
    return CifarResNet(3, classes, has_shortcut_weights)


def resnet56(classes: int = 100, has_shortcut_weights: bool = True) -> CifarResNet:
    """Create ResNet-56, with nine blocks a stage: 0.86 million parameters.

    By default, its shortcuts are those of the published weights in `ZOO`, with weights.
    """
    return CifarResNet(9, classes, has_shortcut_weights)
