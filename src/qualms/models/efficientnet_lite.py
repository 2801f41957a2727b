"""EfficientNet-Lite 0 to 2: EfficientNet (Tan and Le, ICML 2019) without squeeze-and-excitation and
with ReLU6.

The published weights were trained with TensorFlow, so two of its conventions are kept: padding
"same", which at stride 2 can add one more row below and one more column to the right; and batch
normalization with eps = 0.001.
"""

import math
import re

import torch.nn.functional as F
from torch import Tensor, nn

# For each stage: expansion, side of the kernel, stride of the first block, channels and number of
# blocks, at a width and a depth of 1.
STAGES = (
    (1, 3, 1, 16, 1),
    (6, 3, 2, 24, 2),
    (6, 5, 2, 40, 2),
    (6, 3, 2, 80, 3),
    (6, 5, 1, 112, 3),
    (6, 5, 2, 192, 4),
    (6, 3, 1, 320, 1),
)
# Channels after the first convolution.
STEM_CHANNELS = 32
# Channels before the linear layer.
LAST_CHANNELS = 1280
# TensorFlow's eps of batch normalization.
EPS = 1e-3


def pad_same(x: Tensor, kernel: int, stride: int) -> Tensor:
    """Pad with zeros, so that a convolution returns ceil(h / stride) x ceil(w / stride) positions.

    If the number of zeros is odd, one more is added below or to the right, as in TensorFlow.

    Args:
        x: images or feature maps, [n, c, h, w].
        kernel: the side of the convolution's kernel.
        stride: the stride of the convolution.
    """
    # Left, right, top, bottom: `F.pad` takes the last axis first.
    padding = []
    for length in (x.shape[-1], x.shape[-2]):
        positions = math.ceil(length / stride)
        zeros = max(0, (positions - 1) * stride + kernel - length)
        padding += [zeros // 2, zeros - zeros // 2]
    return F.pad(x, padding)


def _build_conv(
    in_channels: int,
    out_channels: int,
    kernel: int = 1,
    stride: int = 1,
    groups: int = 1,
) -> nn.Conv2d:
    """Create a convolution without bias.

    At stride 1 it has padding "same". At stride 2, where TensorFlow's padding depends on the size
    of the input, it has none; the caller applies `pad_same` first.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output.
        kernel: side of the kernel.
        stride: 1 or 2.
        groups: the `groups` of `nn.Conv2d`.
    """
    padding = 0
    if stride == 1:
        padding = kernel // 2
    return nn.Conv2d(in_channels, out_channels, kernel, stride, padding, groups=groups, bias=False)


class InvertedResidual(nn.Module):
    """A block that widens to more channels, convolves each channel separately, and narrows again.

    The widening and the narrowing are 1x1 convolutions. The block's input is added to its output if
    they have the same shape.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        expansion: int,
        kernel: int,
        stride: int,
    ) -> None:
        """Create a block with random weights.

        Args:
            in_channels: channels of the input.
            out_channels: channels of the output.
            expansion: the number of channels in between, as a multiple of `in_channels`; at 1,
                the block has no widening.
            kernel: side of the middle convolution's kernel.
            stride: the stride of the middle convolution.
        """
        super().__init__()
        hidden = in_channels * expansion
        self.kernel = kernel
        self.stride = stride
        self.has_shortcut = stride == 1 and in_channels == out_channels
        self.has_expansion = expansion > 1
        if self.has_expansion:
            self.expand_conv = _build_conv(in_channels, hidden)
            self.bn0 = nn.BatchNorm2d(hidden, EPS)
        self.depthwise_conv = _build_conv(hidden, hidden, kernel, stride, groups=hidden)
        self.bn1 = nn.BatchNorm2d(hidden, EPS)
        self.project_conv = _build_conv(hidden, out_channels)
        self.bn2 = nn.BatchNorm2d(out_channels, EPS)

    def forward(self, x: Tensor) -> Tensor:
        """Map [n, in_channels, h, w] to [n, out_channels, ceil(h/stride), ceil(w/stride)]."""
        h = x
        if self.has_expansion:
            h = F.relu6(self.bn0(self.expand_conv(h)))
        # At stride 1, the convolution itself pads.
        if self.stride > 1:
            h = pad_same(h, self.kernel, self.stride)
        h = F.relu6(self.bn1(self.depthwise_conv(h)))
        h = self.bn2(self.project_conv(h))
        return x + h if self.has_shortcut else h


class EfficientNetLite(nn.Module):
    """A 3x3 convolution of stride 2, seven stages of blocks, 1280 features, and a linear layer."""

    def __init__(self, width: float, depth: float, dropout: float, classes: int) -> None:
        """Create the network with random weights.

        Args:
            width: a factor for the number of channels in each stage, which is then rounded to a
                multiple of 8; the numbers `STEM_CHANNELS` and `LAST_CHANNELS` are fixed.
            depth: a factor for the number of blocks in each stage except the first and the last.
            dropout: the dropout probability before the linear layer.
            classes: the number of classes.
        """
        super().__init__()
        self.conv_stem = _build_conv(3, STEM_CHANNELS, 3, stride=2)
        self.bn0 = nn.BatchNorm2d(STEM_CHANNELS, EPS)
        blocks = []
        in_channels = STEM_CHANNELS
        for i, (expansion, kernel, first_stride, channels, base_blocks) in enumerate(STAGES):
            out_channels = round_channels(channels * width)
            stride = first_stride
            n_blocks = base_blocks
            if 0 < i < len(STAGES) - 1:
                n_blocks = math.ceil(base_blocks * depth)
            for _ in range(n_blocks):
                blocks.append(
                    InvertedResidual(in_channels, out_channels, expansion, kernel, stride)
                )
                # Only the first block of a stage changes channels and size.
                in_channels, stride = out_channels, 1
        self.blocks = nn.Sequential(*blocks)
        self.conv_head = _build_conv(in_channels, LAST_CHANNELS)
        self.bn1 = nn.BatchNorm2d(LAST_CHANNELS, EPS)
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(LAST_CHANNELS, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map [n, 3, h, w] to [n, classes]."""
        h = F.relu6(self.bn0(self.conv_stem(pad_same(x, kernel=3, stride=2))))
        h = F.relu6(self.bn1(self.conv_head(self.blocks(h))))
        return self.fc(self.dropout(h.mean((2, 3))))


def round_channels(channels: float) -> int:
    """Round a number of channels to the nearest multiple of 8, or up if that loses more than 10 %.

    All versions of EfficientNet round in this way when they scale the width.
    """
    nearest = max(8, int(channels + 4) // 8 * 8)
    return nearest if nearest >= 0.9 * channels else nearest + 8


def rename_tensor(name: str) -> str:
    """Convert the name of a tensor in the published weights to its name in `EfficientNetLite`.

    Underscores at the start of each part are removed: `_blocks.0._bn1.bias` becomes
    `blocks.0.bn1.bias`.
    """
    return re.sub(r"(^|\.)_", r"\1", name)


def efficientnet_lite0(classes: int = 1000) -> EfficientNetLite:
    """Create EfficientNet-Lite0: 4.7 million parameters, for 224 pixels."""
    return EfficientNetLite(
        width=1.0,
        depth=1.0,
        dropout=0.2,
        classes=classes,
    )


def efficientnet_lite1(classes: int = 1000) -> EfficientNetLite:
    """Create EfficientNet-Lite1: 5.4 million parameters, for 240 pixels."""
    return EfficientNetLite(
        width=1.0,
        depth=1.1,
        dropout=0.2,
        classes=classes,
    )


def efficientnet_lite2(classes: int = 1000) -> EfficientNetLite:
    """Create EfficientNet-Lite2: 6.1 million parameters, for 260 pixels."""
    return EfficientNetLite(
        width=1.1,
        depth=1.2,
        dropout=0.3,
        classes=classes,
    )
