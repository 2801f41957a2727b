"""Networks that others trained, and the real test images inside and outside of what they know.

    QUALMS_DATA=folder python benchmarks/checkpoints.py         (prints the accuracy of each on its own test set)

A benchmark on random weights and random images can flatter a method: this file is the one place where benchmarks get
the real ones. The folder in the environment variable QUALMS_DATA holds the datasets as they are published (idx files,
CIFAR's pickles, SVHN's .mat) and the checkpoints in `weights`; the networks are written out here, as their authors'
code is needed for nothing else.
"""

import argparse
import gzip
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from scipy.io import loadmat
from torch import Tensor, nn

SHUFFLE_SEED = 0
NOISE = 0.02  # of smoothing, where pixels are in [0, 1]
ARRAYS = ("numpy.ndarray", "numpy.dtype", "numpy.core.multiarray._reconstruct")
Images = tuple[np.ndarray, np.ndarray]  # [n, channels, h, w] of bytes, and [n] classes


def root() -> Path:
    """The folder with the data."""
    if "QUALMS_DATA" not in os.environ:
        raise SystemExit("QUALMS_DATA is not set: name the folder with the datasets and checkpoints in it.")
    return Path(os.environ["QUALMS_DATA"])


def _idx(path: Path) -> np.ndarray:
    with gzip.open(path) as file:
        content = file.read()
    axes = content[3]
    shape = np.frombuffer(content, ">u4", axes, 4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * axes).reshape(*map(int, shape))


def mnist(folder: str = "MNIST") -> Images:
    """Test images of MNIST, or of what is laid out as it is."""
    raw = root() / folder / "raw"
    return _idx(raw / "t10k-images-idx3-ubyte.gz")[:, None], _idx(raw / "t10k-labels-idx1-ubyte.gz")


def fashion_mnist() -> Images:
    """Test images of Fashion-MNIST."""
    return mnist("FashionMNIST")


class _ArraysOnly(pickle.Unpickler):
    """A pickle can run any code as it is read. This one makes arrays, and refuses everything else by name."""

    def find_class(self, module: str, name: str) -> Any:
        """What a pickle asks for by name."""
        if f"{module}.{name}".replace("._core.", ".core.") not in ARRAYS:
            raise pickle.UnpicklingError(f"{module}.{name} is no part of an array")
        return super().find_class(module, name)


def _cifar(path: Path, key: str) -> Images:
    with open(path, "rb") as file:
        # The published pickles were written by Python 2.
        found = _ArraysOnly(file, encoding="latin1").load()
    return found["data"].reshape(-1, 3, 32, 32), np.asarray(found[key])


def cifar10() -> Images:
    """Test images of CIFAR-10."""
    return _cifar(root() / "cifar-10-batches-py" / "test_batch", "labels")


def cifar100() -> Images:
    """Test images of CIFAR-100, with the 100 fine classes."""
    return _cifar(root() / "cifar-100-python" / "test", "fine_labels")


def svhn() -> Images:
    """Test images of SVHN; it writes the digit 0 as class 10."""
    found = loadmat(root() / "test_32x32.mat")
    return found["X"].transpose(3, 2, 0, 1), found["y"].ravel() % 10


class MnistNet(nn.Module):
    """Two 5x5 convolutions with pooling, two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 10, 5), nn.Conv2d(10, 20, 5)
        self.fc1, self.fc2 = nn.Linear(320, 50), nn.Linear(50, 10)

    def forward(self, x: Tensor) -> Tensor:
        """[n, 1, 28, 28] to [n, 10]."""
        h = _quick_gelu(F.max_pool2d(self.conv1(x), 2))
        h = _quick_gelu(F.max_pool2d(self.conv2(h), 2))
        return self.fc2(_quick_gelu(self.fc1(h.flatten(1))))


def _quick_gelu(x: Tensor) -> Tensor:
    return x * (1.702 * x).sigmoid()


class SvhnNet(nn.Module):
    """Four 3x3 convolutions with pooling, two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inside, outside in ((3, 32), (32, 64), (64, 128), (128, 256)):
            layers += [nn.Conv2d(inside, outside, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        self.layers = nn.Sequential(*layers)
        self.fc1, self.fc2 = nn.Linear(1024, 64), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """[n, 3, 32, 32] to [n, 10]."""
        return self.fc2(F.relu(self.fc1(self.layers(x).flatten(1))))


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    def __init__(self, inside: int, outside: int, projected: bool) -> None:
        super().__init__()
        stride = 1 if inside == outside else 2
        self.conv1, self.bn1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False), nn.BatchNorm2d(outside)
        self.conv2, self.bn2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False), nn.BatchNorm2d(outside)
        self.stride, self.more = stride, (outside - inside) // 2
        self.downsample: nn.Module | None = None
        if stride == 2 and projected:
            self.downsample = nn.Sequential(nn.Conv2d(inside, outside, 1, 2, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        """[n, inside, h, w] to [n, outside, h/stride, w/stride]."""
        h = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.downsample is not None:
            x = self.downsample(x)
        elif self.stride == 2:  # no parameters: every second pixel, and channels of zeros on both sides
            x = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.more, self.more))
        return F.relu(h + x)


class CifarResNet(nn.Module):
    """He et al.'s ResNet for CIFAR: three stages of 16, 32 and 64 channels."""

    def __init__(self, blocks: int, classes: int, projected: bool) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)
        stages = [
            nn.Sequential(*(Block(inside if i == 0 else width, width, projected) for i in range(blocks)))
            for inside, width in ((16, 16), (16, 32), (32, 64))
        ]
        self.layer1, self.layer2, self.layer3 = stages
        self.fc = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        """[n, 3, 32, 32] to [n, classes]."""
        h = self.layer3(self.layer2(self.layer1(F.relu(self.bn1(self.conv1(x))))))
        return self.fc(h.mean((2, 3)))


def resnet20() -> nn.Module:
    """For CIFAR-10."""
    return CifarResNet(3, 10, projected=False)


def resnet56() -> nn.Module:
    """For CIFAR-100."""
    return CifarResNet(9, 100, projected=True)


@dataclass(frozen=True)
class Checkpoint:
    """A trained network, images like those it was trained on, and images of other things."""

    name: str
    file: str
    network: Callable[[], nn.Module]
    known: Callable[[], Images]
    unknown: Callable[[], Images]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def build(self) -> nn.Module:
        """The network with its weights, in evaluation mode."""
        state = torch.load(root() / "weights" / self.file, weights_only=True, map_location="cpu")
        state = state.get("state_dict", state)
        model = self.network()
        model.load_state_dict({k.removeprefix("module.").replace("linear.", "fc."): v for k, v in state.items()})
        return model.eval()

    def inside(self, count: int) -> Tensor:
        """`count` normalised test images of the network's own dataset, the same ones every time."""
        return self._normalised(self.known()[0], count)

    def outside(self, count: int) -> Tensor:
        """As many of another dataset, normalised as the network's own."""
        return self._normalised(self.unknown()[0], count)

    def labels(self, count: int) -> Tensor:
        """The classes of `inside`."""
        return torch.from_numpy(_shuffled(self.known()[1], count).astype(np.int64))

    @property
    def sigma(self) -> float | tuple[float, ...]:
        """The noise of smoothing in normalised units, for each channel."""
        noise = tuple(NOISE / s for s in self.std)
        return noise if len(noise) > 1 else noise[0]

    def _normalised(self, images: np.ndarray, count: int) -> Tensor:
        x = torch.from_numpy(_shuffled(images, count)).float() / 255
        mean, std = (torch.tensor(v)[:, None, None] for v in (self.mean, self.std))
        return (x - mean) / std


def _shuffled(values: np.ndarray, count: int) -> np.ndarray:
    order = torch.randperm(len(values), generator=torch.Generator().manual_seed(SHUFFLE_SEED))
    return values[order[:count].numpy()]


IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
CIFAR = {"mean": (0.5070, 0.4865, 0.4409), "std": (0.2673, 0.2564, 0.2761)}
HALF = {"mean": (0.5,) * 3, "std": (0.5,) * 3}
PLAIN = {"mean": (0.0,), "std": (1.0,)}

CHECKPOINTS = {
    c.name: c
    for c in (
        Checkpoint("MNIST CNN", "mnist_hendrycks_baseline_epoch_9.pt", MnistNet, mnist, fashion_mnist, **PLAIN),
        Checkpoint("CIFAR-10 ResNet-20", "cifar10_akamaster_resnet20-12fca82f.th", resnet20, cifar10, svhn, **IMAGENET),
        Checkpoint("CIFAR-100 ResNet-56", "cifar100_chenyaofo_resnet56-f2eff4c8.pt", resnet56, cifar100, svhn, **CIFAR),
        Checkpoint("SVHN CNN", "svhn_agrimakhanna_de_1.pth", SvhnNet, svhn, cifar10, **HALF),
    )
}


def main() -> None:
    """Print each network's accuracy, which shows that weights, architecture and normalisation belong together."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10000, help="test images of each dataset")
    count = parser.parse_args().count
    print("| network | test images | accuracy, % |\n|---|---|---|")
    for checkpoint in CHECKPOINTS.values():
        model, x = checkpoint.build(), checkpoint.inside(count)
        with torch.no_grad():
            predicted = torch.cat([model(part).argmax(1) for part in x.split(500)])
        right = (predicted == checkpoint.labels(count)).double().mean()
        print(f"| {checkpoint.name} | {len(x)} | {100 * float(right):.2f} |", flush=True)


if __name__ == "__main__":
    main()
