"""He et al.'s residual networks for CIFAR (CVPR 2016, section 4.2): three stages of 16, 32 and 64
channels.

Much smaller than the ResNets of `resnet.py`, which widen ImageNet's to four stages of 64 to 512
channels. Most of the published CIFAR checkpoints are of this kind, and differ in the shortcut
between stages.
"""

import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut.

    Args:
        inside: channels of the input.
        outside: channels of the output; more than `inside` halves height and width.
        projected: whether a shortcut that changes shape has weights.
    """

    def __init__(self, inside: int, outside: int, projected: bool) -> None:
        super().__init__()
        self.stride = 1 if inside == outside else 2
        self.new_channels = outside - inside
        self.conv1 = nn.Conv2d(inside, outside, 3, self.stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.downsample: nn.Module | None = None
        if self.stride == 2 and projected:
            self.downsample = nn.Sequential(
                nn.Conv2d(inside, outside, 1, 2, bias=False), nn.BatchNorm2d(outside)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Map [n, inside, h, w] to [n, outside, h/stride, w/stride]."""
        h = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(h + self._shortcut(x))

    def _shortcut(self, x: Tensor) -> Tensor:
        """Return x in the shape of the block's output."""
        if self.downsample is not None:
            return self.downsample(x)
        if self.stride == 1:
            return x
        # Every second pixel, and half of the new channels, all zeros, on each side of x's.
        half = self.new_channels // 2
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, half, half))


class CifarResNet(nn.Module):
    """A 3x3 stem, three stages of blocks, the mean over space, and a linear layer.

    Args:
        blocks: the number of blocks in each stage.
        classes: the number of classes.
        projected: whether shortcuts that change shape have weights.
    """

    def __init__(self, blocks: int, classes: int, projected: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = _stage(16, 16, blocks, projected)
        self.layer2 = _stage(16, 32, blocks, projected)
        self.layer3 = _stage(32, 64, blocks, projected)
        self.fc = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map [n, 3, 32, 32] to [n, classes]."""
        h = F.relu(self.bn1(self.conv1(x)))
        h = self.layer3(self.layer2(self.layer1(h)))
        return self.fc(h.mean((2, 3)))


def _stage(inside: int, outside: int, blocks: int, projected: bool) -> nn.Sequential:
    """Create a stage: blocks of one width.

    Args:
        inside: channels of the input.
        outside: channels of every block's output.
        blocks: the number of blocks.
        projected: whether a shortcut that changes shape has weights.
    """
    stage = [Block(inside, outside, projected)]
    for _ in range(blocks - 1):
        stage.append(Block(outside, outside, projected))
    return nn.Sequential(*stage)


def resnet20(classes: int = 10, projected: bool = False) -> CifarResNet:
    """Create ResNet-20, with three blocks a stage: 0.27 million parameters."""
    return CifarResNet(3, classes, projected)


def resnet56(classes: int = 100, projected: bool = True) -> CifarResNet:
    """Create ResNet-56, with nine blocks a stage: 0.86 million parameters."""
    return CifarResNet(9, classes, projected)
