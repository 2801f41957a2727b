"""MobileNetV2 (Sandler et al., CVPR 2018), with the names that torchvision's published weights
have.
"""

from torch import Tensor, nn

# For each stage: expansion, channels, number of blocks, and stride of the first block.
STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
# Channels after the first convolution.
STEM_CHANNELS = 32
# Channels before the linear layer.
LAST_CHANNELS = 1280


def conv_norm_relu6(
    in_channels: int,
    out_channels: int,
    kernel: int = 1,
    stride: int = 1,
    groups: int = 1,
) -> nn.Sequential:
    """Create a convolution without bias, followed by batch normalization and ReLU6.

    The padding keeps height and width at stride 1.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output.
        kernel: side of the kernel.
        stride: the stride of the convolution.
        groups: the `groups` of `nn.Conv2d`.
    """
    conv = nn.Conv2d(
        in_channels, out_channels, kernel, stride, kernel // 2, groups=groups, bias=False
    )
    return nn.Sequential(conv, nn.BatchNorm2d(out_channels), nn.ReLU6())


class InvertedResidual(nn.Module):
    """A block that widens to more channels, convolves each channel separately, and narrows again.

    The widening and the narrowing are 1x1 convolutions. The block's input is added to its output if
    they have the same shape.
    """

    def __init__(self, in_channels: int, out_channels: int, expansion: int, stride: int) -> None:
        """Create a block with random weights.

        Args:
            in_channels: channels of the input.
            out_channels: channels of the output.
            expansion: the number of channels in between, as a multiple of `in_channels`; at 1,
                the block has no widening.
            stride: the stride of the middle convolution.
        """
        super().__init__()
        hidden = in_channels * expansion
        layers: list[nn.Module] = []
        if expansion > 1:
            layers.append(conv_norm_relu6(in_channels, hidden))
        layers.append(conv_norm_relu6(hidden, hidden, 3, stride, groups=hidden))
        layers.append(nn.Conv2d(hidden, out_channels, 1, bias=False))
        layers.append(nn.BatchNorm2d(out_channels))
        self.conv = nn.Sequential(*layers)
        self.has_shortcut = stride == 1 and in_channels == out_channels

    def forward(self, x: Tensor) -> Tensor:
        """Map [n, in_channels, h, w] to [n, out_channels, ceil(h/stride), ceil(w/stride)]."""
        h = self.conv(x)
        return x + h if self.has_shortcut else h


class MobileNetV2(nn.Module):
    """A 3x3 convolution of stride 2, seven stages of blocks, 1280 features, and a linear layer.

    Args:
        classes: the number of classes.
    """

    def __init__(self, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [conv_norm_relu6(3, STEM_CHANNELS, 3, stride=2)]
        in_channels = STEM_CHANNELS
        for expansion, out_channels, n_blocks, first_stride in STAGES:
            stride = first_stride
            for _ in range(n_blocks):
                layers.append(InvertedResidual(in_channels, out_channels, expansion, stride))
                # Only the first block of a stage changes channels and size.
                in_channels, stride = out_channels, 1
        layers.append(conv_norm_relu6(in_channels, LAST_CHANNELS))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(LAST_CHANNELS, classes))

    def forward(self, x: Tensor) -> Tensor:
        """Map [n, 3, h, w] to [n, classes]."""
        return self.classifier(self.features(x).mean((2, 3)))


def mobilenet_v2(classes: int = 1000) -> MobileNetV2:
    """Create MobileNetV2: 3.5 million parameters, for 224 pixels."""
    return MobileNetV2(classes)
