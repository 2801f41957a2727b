"""EfficientNet-Lite 0 to 2: EfficientNet (Tan and Le, ICML 2019) without squeeze-and-excitation and
with ReLU6.

The published weights come from TensorFlow, so two habits of TensorFlow's are kept: padding "same",
which at stride 2 adds one row and column more below and to the right, and batch normalization with
eps = 0.001.
"""

import math
import re

import torch.nn.functional as F
from torch import Tensor, nn

# Expansion, kernel, stride, channels and blocks of each stage, for a width and depth of 1.
STAGES = (
    (1, 3, 1, 16, 1),
    (6, 3, 2, 24, 2),
    (6, 5, 2, 40, 2),
    (6, 3, 2, 80, 3),
    (6, 5, 1, 112, 3),
    (6, 5, 2, 192, 4),
    (6, 3, 1, 320, 1),
)
STEM = 32
FEATURES = 1280
EPS = 1e-3


def pad_same(x: Tensor, kernel: int, stride: int) -> Tensor:
    """Pad with zeros, so that a convolution gives ceil(h / stride) x ceil(w / stride).

    An odd number of zeros has the larger half below and to the right, as in TensorFlow.

    Args:
        x: images or feature maps, [n, c, h, w].
        kernel: the side of the convolution's kernel.
        stride: the stride of the convolution.
    """
    sides = []
    # F.pad takes the zeros of the last axis first.
    for length in (x.shape[-1], x.shape[-2]):
        positions = math.ceil(length / stride)
        zeros = max(0, (positions - 1) * stride + kernel - length)
        sides += [zeros // 2, zeros - zeros // 2]
    return F.pad(x, sides)


def _conv(
    inside: int, outside: int, kernel: int = 1, stride: int = 1, groups: int = 1
) -> nn.Conv2d:
    """Create a convolution without bias.

    At stride 1 it has padding "same"; at stride 2 none, and the caller applies `pad_same` first.

    Args:
        inside: channels of the input.
        outside: channels of the output.
        kernel: side of the kernel.
        stride: 1 or 2.
        groups: the `groups` of `nn.Conv2d`.
    """
    padding = 0
    if stride == 1:
        padding = kernel // 2
    return nn.Conv2d(inside, outside, kernel, stride, padding, groups=groups, bias=False)


class InvertedResidual(nn.Module):
    """A block that widens to more channels, convolves each of them alone, and narrows again.

    The widening and the narrowing are 1x1 convolutions. Input and output are added if they have the
    same shape.
    """

    def __init__(self, inside: int, outside: int, expansion: int, kernel: int, stride: int) -> None:
        """Make a block.

        Args:
            inside: channels of the input.
            outside: channels of the output.
            expansion: the number of channels in between, as a multiple of `inside`; 1 leaves out
                the widening.
            kernel: side of the middle convolution's kernel.
            stride: the stride of the middle convolution.
        """
        super().__init__()
        hidden = inside * expansion
        self.kernel = kernel
        self.stride = stride
        self.has_shortcut = stride == 1 and inside == outside
        self.has_expansion = expansion > 1
        if self.has_expansion:
            self.expand_conv = _conv(inside, hidden)
            self.bn0 = nn.BatchNorm2d(hidden, EPS)
        self.depthwise_conv = _conv(hidden, hidden, kernel, stride, groups=hidden)
        self.bn1 = nn.BatchNorm2d(hidden, EPS)
        self.project_conv = _conv(hidden, outside)
        self.bn2 = nn.BatchNorm2d(outside, EPS)

    def forward(self, x: Tensor) -> Tensor:
        """Map [n, inside, h, w] to [n, outside, ceil(h/stride), ceil(w/stride)]."""
        h = x
        if self.has_expansion:
            h = F.relu6(self.bn0(self.expand_conv(h)))
        if self.stride > 1:
            h = pad_same(h, self.kernel, self.stride)
        h = F.relu6(self.bn1(self.depthwise_conv(h)))
        h = self.bn2(self.project_conv(h))
        return x + h if self.has_shortcut else h


class EfficientNetLite(nn.Module):
    """A 3x3 convolution of stride 2, seven stages of blocks, 1280 features, and a linear layer."""

    def __init__(self, width: float, depth: float, dropout: float, classes: int) -> None:
        """Make the network with random weights.

        Args:
            width: the factor of the number of channels in each stage, rounded to multiples of 8;
                stem and features keep their numbers.
            depth: the factor of the number of blocks in each stage but the first and the last.
            dropout: the share that is dropped before the linear layer, in training.
            classes: the number of classes.
        """
        super().__init__()
        self.conv_stem = _conv(3, STEM, 3, stride=2)
        self.bn0 = nn.BatchNorm2d(STEM, EPS)
        blocks = []
        inside = STEM
        for number, (expansion, kernel, first_stride, channels, repeats) in enumerate(STAGES):
            outside = round_channels(channels * width)
            stride = first_stride
            count = repeats
            if 0 < number < len(STAGES) - 1:
                count = math.ceil(repeats * depth)
            for _ in range(count):
                blocks.append(InvertedResidual(inside, outside, expansion, kernel, stride))
                inside, stride = outside, 1
        self.blocks = nn.Sequential(*blocks)
        self.conv_head = _conv(inside, FEATURES)
        self.bn1 = nn.BatchNorm2d(FEATURES, EPS)
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(FEATURES, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map [n, 3, h, w] to [n, classes]."""
        h = F.relu6(self.bn0(self.conv_stem(pad_same(x, 3, 2))))
        h = F.relu6(self.bn1(self.conv_head(self.blocks(h))))
        return self.fc(self.dropout(h.mean((2, 3))))


def round_channels(channels: float) -> int:
    """Round to the nearest multiple of 8, or to the next one up if that is over 10 % less."""
    nearest = max(8, int(channels + 4) // 8 * 8)
    return nearest if nearest >= 0.9 * channels else nearest + 8


def rename_tensor(name: str) -> str:
    """Convert the name of a tensor in the published weights to the name in this network.

    `_blocks.0._bn1.bias` is `blocks.0.bn1.bias`.
    """
    return re.sub(r"(^|\.)_", r"\1", name)


def efficientnet_lite0(classes: int = 1000) -> EfficientNetLite:
    """Create EfficientNet-Lite0: 4.7 million parameters, for 224 pixels."""
    return EfficientNetLite(width=1.0, depth=1.0, dropout=0.2, classes=classes)


def efficientnet_lite1(classes: int = 1000) -> EfficientNetLite:
    """Create EfficientNet-Lite1: 5.4 million parameters, for 240 pixels."""
    return EfficientNetLite(width=1.0, depth=1.1, dropout=0.2, classes=classes)


def efficientnet_lite2(classes: int = 1000) -> EfficientNetLite:
    """Create EfficientNet-Lite2: 6.1 million parameters, for 260 pixels."""
    return EfficientNetLite(width=1.1, depth=1.2, dropout=0.3, classes=classes)
