"""Residual networks for 32x32 images (He et al., CVPR 2016): the paper's ResNet-18 for CIFAR-10,
-152 for CIFAR-100.
"""

import torch.nn.functional as F
from torch import Tensor, nn


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut.

    Args:
        in_channels: channels of the input.
        width: channels of the output.
        stride: the stride of the first convolution.
    """

    expansion = 1

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.shortcut = _build_shortcut(in_channels, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Map [n, in_channels, h, w] to [n, width, h/stride, w/stride]."""
        h = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(h)) + self.shortcut(x))


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions and a shortcut.

    Args:
        in_channels: channels of the input.
        width: channels between the convolutions; the output has `expansion` times as many.
        stride: the stride of the 3x3 convolution.
    """

    expansion = 4

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        out_channels = self.expansion * width
        self.conv1 = nn.Conv2d(in_channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, out_channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out_channels)
        self.shortcut = _build_shortcut(in_channels, out_channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Map [n, in_channels, h, w] to [n, 4·width, h/stride, w/stride]."""
        h = F.relu(self.bn1(self.conv1(x)))
        h = F.relu(self.bn2(self.conv2(h)))
        return F.relu(self.bn3(self.conv3(h)) + self.shortcut(x))


def _build_shortcut(in_channels: int, out_channels: int, stride: int) -> nn.Module:
    """Create a block's shortcut: the identity, or a 1x1 convolution if the block changes the shape.

    Args:
        in_channels: channels of the block's input.
        out_channels: channels of the block's output.
        stride: the stride of the block.
    """
    if stride == 1 and in_channels == out_channels:
        return nn.Identity()
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 1, stride, bias=False), nn.BatchNorm2d(out_channels)
    )


class ResNet(nn.Module):
    """A 3x3 stem, four stages of 64 to 512 channels, the mean over space, and a linear layer.

    Args:
        block: the class of the blocks, `BasicBlock` or `Bottleneck`.
        blocks: the number of blocks in each stage.
        classes: the number of classes.
    """

    def __init__(
        self, block: type[BasicBlock] | type[Bottleneck], blocks: tuple[int, ...], classes: int
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        in_channels = 64
        stages = []
        for i, n_blocks in enumerate(blocks):
            # From stage to stage, the channels double, while height and width are halved.
            width = 64 * 2**i
            stage = []
            stride = 1 if i == 0 else 2
            for _ in range(n_blocks):
                stage.append(block(in_channels, width, stride))
                # Only the first block of a stage changes channels and size.
                in_channels, stride = block.expansion * width, 1
            stages.append(nn.Sequential(*stage))
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.fc = nn.Linear(in_channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map [n, 3, 32, 32] to [n, classes]."""
        h = F.relu(self.bn1(self.conv1(x)))
        h = self.layer4(self.layer3(self.layer2(self.layer1(h))))
        return self.fc(h.mean((2, 3)))


def resnet18(classes: int = 10) -> ResNet:
    """Create ResNet-18: two basic blocks a stage."""
    return ResNet(BasicBlock, (2, 2, 2, 2), classes)


def resnet50(classes: int = 10) -> ResNet:
    """Create ResNet-50: stages of 3, 4, 6 and 3 bottlenecks."""
    return ResNet(Bottleneck, (3, 4, 6, 3), classes)


def resnet152(classes: int = 100) -> ResNet:
    """Create ResNet-152: stages of 3, 8, 36 and 3 bottlenecks."""
    return ResNet(Bottleneck, (3, 8, 36, 3), classes)
