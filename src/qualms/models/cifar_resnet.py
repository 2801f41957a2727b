"""He et al.'s residual networks for CIFAR (CVPR 2016, section 4.2): three stages of 16, 32 and 64
channels.

Much smaller than the ResNets of `resnet.py`, which widen ImageNet's to four stages of 64 to 512
channels. Most of the published CIFAR checkpoints are of this kind, and differ in the shortcut
between stages.
"""

import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut; `projected` says whether a shortcut that changes shape
    has weights.
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
        """[n, inside, h, w] to [n, outside, h/stride, w/stride]."""
        h = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(h + self._shortcut(x))

    def _shortcut(self, x: Tensor) -> Tensor:
        if self.downsample is not None:
            return self.downsample(x)
        if self.stride == 1:
            return x
        half = (
            self.new_channels // 2
        )  # no parameters: every second pixel, and channels of zeros on both sides
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, half, half))


class CifarResNet(nn.Module):
    """A 3x3 stem, three stages of `blocks` blocks each, the mean over space, and a linear layer."""

    def __init__(self, blocks: int, classes: int, projected: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1, self.layer2, self.layer3 = (
            nn.Sequential(
                *(Block(inside if i == 0 else width, width, projected) for i in range(blocks))
            )
            for inside, width in ((16, 16), (16, 32), (32, 64))
        )
        self.fc = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        """[n, 3, 32, 32] to [n, classes]."""
        h = F.relu(self.bn1(self.conv1(x)))
        h = self.layer3(self.layer2(self.layer1(h)))
        return self.fc(h.mean((2, 3)))


def resnet20(classes: int = 10, projected: bool = False) -> CifarResNet:
    """Three blocks a stage: 0.27 million parameters."""
    return CifarResNet(3, classes, projected)


def resnet56(classes: int = 100, projected: bool = True) -> CifarResNet:
    """Nine blocks a stage: 0.86 million parameters."""
    return CifarResNet(9, classes, projected)
