"""The table of named datasets."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from qualms.data.bundled import read_digits, read_letters, read_photos
from qualms.data.cifar import read_cifar10, read_cifar100
from qualms.data.folder import read_lsun
from qualms.data.idx import read_fashion_mnist, read_mnist
from qualms.data.images import Images
from qualms.data.normalization import Normalization
from qualms.data.omniglot import read_omniglot
from qualms.data.svhn import read_svhn
from qualms.deprecated import RenamedAttribute


@dataclass(frozen=True)
class Dataset:
    """How to read a named dataset, the shape of its images, and where to download it.

    Args:
        read: a function that is called with the folder of datasets and a split, and returns the
            images.
        classes: the number of classes; None if it depends on the files.
        channels: the number of channels of the images.
        size: the height and width of the images, in pixels.
        normalization: the usual normalization; networks may use others.
        get: how to get the files, a clause that errors contain.
        package: the Python package that contains the images; None if they are read from files.
    """

    read: Callable[[Path, str], Images]
    classes: int | None
    channels: int
    size: int
    normalization: Normalization
    get: str
    package: str | None = None

    normalisation = RenamedAttribute("normalization")


MNIST = Normalization((0.1307,), (0.3081,))
FASHION = Normalization((0.2860,), (0.3530,))
CIFAR10 = Normalization((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
CIFAR100 = Normalization((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))
HALF = Normalization((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
DIGITS = Normalization((0.3053,), (0.3760,))

DATASETS: dict[str, Dataset] = {
    "mnist": Dataset(
        read_mnist, 10, 1, 28, MNIST,
        "get the four files from https://github.com/cvdfoundation/mnist "
        "and put them into MNIST/raw",
    ),
    "fashion-mnist": Dataset(
        read_fashion_mnist, 10, 1, 28, FASHION,
        "get the four files from https://github.com/zalandoresearch/fashion-mnist "
        "and put them into FashionMNIST/raw",
    ),
    "cifar10": Dataset(
        read_cifar10, 10, 3, 32, CIFAR10,
        "get the Python version from https://www.cs.toronto.edu/~kriz/cifar.html "
        "and unpack it to cifar-10-batches-py",
    ),
    "cifar100": Dataset(
        read_cifar100, 100, 3, 32, CIFAR100,
        "get the Python version from https://www.cs.toronto.edu/~kriz/cifar.html "
        "and unpack it to cifar-100-python",
    ),
    "svhn": Dataset(
        read_svhn, 10, 3, 32, HALF,
        "get train_32x32.mat and test_32x32.mat from http://ufldl.stanford.edu/housenumbers "
        "and put them into svhn",
    ),
    "omniglot": Dataset(
        read_omniglot, None, 1, 28, MNIST,
        "get images_background.zip and images_evaluation.zip from "
        "https://github.com/brendenlake/omniglot and unpack them to omniglot-py",
    ),
    "lsun": Dataset(
        read_lsun, None, 3, 32, CIFAR10,
        "get LSUN (resize) from https://github.com/facebookresearch/odin, or any images from "
        "https://www.yf.io/p/lsun, and unpack them to LSUN_resize",
    ),
    "digits": Dataset(
        read_digits, 10, 1, 8, DIGITS, "they come with scikit-learn", "scikit-learn"
    ),
    "letters": Dataset(read_letters, 52, 1, 28, MNIST, "they come with Pillow", "Pillow"),
    "photos": Dataset(
        read_photos, 2, 3, 32, CIFAR10, "they come with scikit-learn", "scikit-learn"
    ),
}  # fmt: skip
"""The datasets that `load` knows by name.

Example:
    ```python
    from qualms.data import DATASETS

    for name, dataset in DATASETS.items():
        print(name, dataset.classes, dataset.channels, dataset.size, dataset.get)
    ```
"""
