"""MobileNetV2 (Sandler et al., CVPR 2018), with the names that torchvision's published weights
have.
"""

from torch import Tensor, nn

# Expansion, channels, blocks and stride of each stage.
STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
STEM = 32
FEATURES = 1280


def conv_norm_relu6(
    inside: int, outside: int, kernel: int = 1, stride: int = 1, groups: int = 1
) -> nn.Sequential:
    """Create a convolution without bias, batch normalization, and ReLU6.

    Args:
        inside: channels of the input.
        outside: channels of the output.
        kernel: side of the kernel.
        stride: the stride of the convolution.
        groups: the `groups` of `nn.Conv2d`.
    """
    conv = nn.Conv2d(inside, outside, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outside), nn.ReLU6())


class InvertedResidual(nn.Module):
    """A block that widens to more channels, convolves each of them alone, and narrows again.

    The widening and the narrowing are 1x1 convolutions. Input and output are added if they have the
    same shape.
    """

    def __init__(self, inside: int, outside: int, expansion: int, stride: int) -> None:
        """Make a block.

        Args:
            inside: channels of the input.
            outside: channels of the output.
            expansion: the number of channels in between, as a multiple of `inside`; 1 leaves out
                the widening.
            stride: the stride of the middle convolution.
        """
        super().__init__()
        hidden = inside * expansion
        layers: list[nn.Module] = []
        if expansion > 1:
            layers.append(conv_norm_relu6(inside, hidden))
        layers.append(conv_norm_relu6(hidden, hidden, 3, stride, groups=hidden))
        layers.append(nn.Conv2d(hidden, outside, 1, bias=False))
        layers.append(nn.BatchNorm2d(outside))
        self.conv = nn.Sequential(*layers)
        self.has_shortcut = stride == 1 and inside == outside

    def forward(self, x: Tensor) -> Tensor:
        """Map [n, inside, h, w] to [n, outside, ceil(h/stride), ceil(w/stride)]."""
        h = self.conv(x)
        return x + h if self.has_shortcut else h


class MobileNetV2(nn.Module):
    """A 3x3 convolution of stride 2, seven stages of blocks, 1280 features, and a linear layer.

    Args:
        classes: the number of classes.
    """

    def __init__(self, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [conv_norm_relu6(3, STEM, 3, stride=2)]
        inside = STEM
        for expansion, outside, count, first_stride in STAGES:
            stride = first_stride
            for _ in range(count):
                layers.append(InvertedResidual(inside, outside, expansion, stride))
                inside, stride = outside, 1
        layers.append(conv_norm_relu6(inside, FEATURES))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(FEATURES, classes))

    def forward(self, x: Tensor) -> Tensor:
        """Map [n, 3, h, w] to [n, classes]."""
        return self.classifier(self.features(x).mean((2, 3)))


def mobilenet_v2(classes: int = 1000) -> MobileNetV2:
    """Create MobileNetV2: 3.5 million parameters, for 224 pixels."""
    return MobileNetV2(classes)
