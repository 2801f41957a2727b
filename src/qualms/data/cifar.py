"""CIFAR-10 and CIFAR-100: the Python version of the published files, which is pickles."""

from pathlib import Path

import numpy as np

from qualms.data.images import Images, build_images
from qualms.data.pickles import read_pickle
from qualms.data.places import find_first
from qualms.errors import QualmsError

CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CIFAR100 = tuple(
    """apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
    caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant
    flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree
    motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate
    poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider
    squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle
    wardrobe whale willow_tree wolf woman worm""".split()  # noqa: SIM905 (a hundred quotes are no easier to read)
)
BATCHES = {"train": [f"data_batch_{i}" for i in range(1, 6)], "test": ["test_batch"]}


def read_cifar10(root: Path, split: str) -> Images:
    """Ten kinds of things; the training images are in five files."""
    return _read(root, "cifar-10-batches-py", BATCHES[split], "labels", "cifar10", CIFAR10)


def read_cifar100(root: Path, split: str) -> Images:
    """A hundred kinds of things, the fine labels."""
    return _read(root, "cifar-100-python", [split], "fine_labels", "cifar100", CIFAR100)


def _read(
    root: Path, folder: str, files: list[str], key: str, name: str, classes: tuple[str, ...]
) -> Images:
    paths = [find_first([root / folder / file], file) for file in files]
    batches = [_batch(path, key, name, classes) for path in paths]
    pixels, labels = (np.concatenate(part) for part in zip(*batches, strict=True))
    return build_images(name, root / folder, pixels, labels, classes)


def _batch(
    path: Path, key: str, name: str, classes: tuple[str, ...]
) -> tuple[np.ndarray, np.ndarray]:
    found = read_pickle(path)
    if not isinstance(found, dict):
        raise QualmsError(f"{path} holds no dictionary, and CIFAR's files do; get it again.")
    by_name = {k.decode("latin1") if isinstance(k, bytes) else k: v for k, v in found.items()}
    data, labels = by_name.get("data"), by_name.get(key)
    if (
        not isinstance(data, np.ndarray)
        or data.ndim != 2
        or data.shape[1] != 3072
        or data.dtype != np.uint8
    ):
        raise QualmsError(
            f"{path} has no bytes of shape (n, 3072) under 'data', as CIFAR's files have; get it again."
        )
    if isinstance(labels, list) and all(
        type(label) is int and abs(label) < 2**63 for label in labels
    ):
        labels = np.array(labels, np.int64)
    if not isinstance(labels, np.ndarray):
        raise QualmsError(
            f"{path} has no list of whole numbers under '{key}', as CIFAR's files have; get it again."
        )
    # Each row is all the reds of an image, then all the greens, then all the blues.
    batch = build_images(name, path, data.reshape(-1, 3, 32, 32), labels, classes)
    assert batch.labels is not None
    return batch.pixels.numpy(), batch.labels.numpy()
