"""The paper's small convolutional networks (Wang & Ji, CVPR 2024, appendix B).

Conv(32,4x4)-ReLU-Conv(32,4x4)-ReLU-MaxPool2-Dense128-ReLU-Dense for MNIST and for active learning;
SVHN has one more Dense128.
"""

from torch import nn


def paper_cnn(channels: int, size: int, classes: int = 10, hidden_layers: int = 1) -> nn.Sequential:
    """The CNN for square images of `size` pixels."""
    side = (size - 6) // 2  # two 4x4 convolutions without padding, then pooling
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
    """For 28x28 gray images."""
    return paper_cnn(1, 28, classes)


def svhn_cnn(classes: int = 10) -> nn.Sequential:
    """For 32x32 color images, with a second hidden layer."""
    return paper_cnn(3, 32, classes, hidden_layers=2)
