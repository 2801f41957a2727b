"""The paper's networks, for timing."""

import torch.nn.functional as F
from torch import Tensor, nn


def mnist_cnn(classes: int = 10) -> nn.Module:
    """Conv(32,4x4)-ReLU-Conv(32,4x4)-ReLU-MaxPool2-Dense128-ReLU-Dense (Wang & Ji, CVPR 2024, appendix B)."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 4),
        nn.ReLU(),
        nn.Conv2d(32, 32, 4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 11 * 11, 128),
        nn.ReLU(),
        nn.Linear(128, classes),
    )


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.shortcut = nn.Sequential()
        if stride != 1 or inside != outside:
            self.shortcut = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        """[n, inside, h, w] to [n, outside, h/stride, w/stride]."""
        h = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(h)) + self.shortcut(x))


def resnet18(classes: int = 10) -> nn.Module:
    """ResNet-18 for 32x32 images."""
    blocks: list[nn.Module] = []
    inside = 64
    for outside, stride in ((64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), (512, 1)):
        blocks.append(Block(inside, outside, stride))
        inside = outside
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, 1, 1, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.Sequential(*blocks),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(512, classes),
    )
