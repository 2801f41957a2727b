"""Small convolutional networks: the paper's, and others with published weights.

The paper's (Wang & Ji, CVPR 2024, appendix B) are
Conv(32,4x4)-ReLU-Conv(32,4x4)-ReLU-MaxPool2-Dense128-ReLU-Dense for MNIST and for active learning;
SVHN has one more Dense128. The others have the names that their authors' weights go by.
"""

import torch.nn.functional as F
from torch import Tensor, nn


def paper_cnn(channels: int, size: int, classes: int = 10, hidden_layers: int = 1) -> nn.Sequential:
    """Create the paper's network for square images.

    Args:
        channels: the number of channels of the images.
        size: the height and width of the images, in pixels.
        classes: the number of classes.
        hidden_layers: the number of linear layers of 128 features before the last layer.

    Returns:
        A network that maps [n, channels, size, size] to [n, classes].
    """
    # Each of two 4x4 convolutions without padding removes 3 pixels; pooling halves the rest.
    side = (size - 6) // 2
    layers: list[nn.Module] = [
        nn.Conv2d(channels, 32, 4),
        nn.ReLU(),
        nn.Conv2d(32, 32, 4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
    ]
    features = 32 * side * side
    for _ in range(hidden_layers):
        layers += [nn.Linear(features, 128), nn.ReLU()]
        features = 128
    return nn.Sequential(*layers, nn.Linear(features, classes))


def mnist_cnn(classes: int = 10) -> nn.Sequential:
    """Create the paper's network for 28x28 gray images."""
    return paper_cnn(1, 28, classes)


def svhn_cnn(classes: int = 10) -> nn.Sequential:
    """Create the paper's network for 32x32 color images, with a second hidden layer."""
    return paper_cnn(3, 32, classes, hidden_layers=2)


class MnistCnn5x5(nn.Module):
    """Two 5x5 convolutions with pooling and two linear layers.

    The baseline of Hendrycks et al., ICLR 2019.

    Args:
        classes: the number of classes.
    """

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, 5)
        self.conv2 = nn.Conv2d(10, 20, 5)
        # 20 channels of 4x4 pixels.
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map [n, 1, 28, 28] to [n, classes]."""
        h = _quick_gelu(F.max_pool2d(self.conv1(x), 2))
        h = _quick_gelu(F.max_pool2d(self.conv2(h), 2))
        return self.fc2(_quick_gelu(self.fc1(h.flatten(1))))


def _quick_gelu(x: Tensor) -> Tensor:
    """Compute x · sigmoid(1.702 x), an approximation of GELU."""
    return x * (1.702 * x).sigmoid()


class SvhnCnn4(nn.Module):
    """Four 3x3 convolutions with pooling, and two linear layers.

    Args:
        width: the number of channels of the first convolution; each further convolution has twice
            as many as the one before it.
        hidden: the number of features before the last layer.
        classes: the number of classes.
    """

    def __init__(self, width: int, hidden: int, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        in_channels = 3
        for out_channels in (width, 2 * width, 4 * width, 8 * width):
            layers += [
                nn.Conv2d(in_channels, out_channels, 3, padding=1),
                nn.ReLU(),
                nn.MaxPool2d(2),
            ]
            in_channels = out_channels
        self.layers = nn.Sequential(*layers)
        # 32x32 pixels, halved four times.
        self.fc1 = nn.Linear(2 * 2 * in_channels, hidden)
        self.fc2 = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map [n, 3, 32, 32] to [n, classes]."""
        return self.fc2(F.relu(self.fc1(self.layers(x).flatten(1))))


def mnist_cnn_5x5(classes: int = 10) -> MnistCnn5x5:
    """Create `MnistCnn5x5`, for 28x28 gray images."""
    return MnistCnn5x5(classes)


def svhn_cnn_4(classes: int = 10) -> SvhnCnn4:
    """Create `SvhnCnn4` with 32 to 256 channels, then 64 features."""
    return SvhnCnn4(
        width=32,
        hidden=64,
        classes=classes,
    )


def svhn_cnn_4_dropout(classes: int = 10) -> SvhnCnn4:
    """Create `SvhnCnn4` with 16 to 128 channels, then 256 features.

    The published weights were trained with dropout, at unknown positions; in evaluation mode that
    makes no difference.
    """
    return SvhnCnn4(
        width=16,
        hidden=256,
        classes=classes,
    )
