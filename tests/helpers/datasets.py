"""MNIST, SVHN and CIFAR-10 in their published layouts, made up and small."""

import gzip
import pickle
from pathlib import Path

import numpy as np
from scipy.io import savemat

from tests.helpers.layouts import idx_bytes


def write_datasets(root: Path, train: int, test: int) -> None:
    """Classes in turn; a class is a brightness, with noise on it, so there is something to learn."""
    numbers = np.random.default_rng(0)
    (root / "MNIST" / "raw").mkdir(parents=True)
    (root / "cifar-10-batches-py").mkdir()
    for stem, svhn, count in (("train", "train", train), ("t10k", "test", test)):
        labels = np.arange(count) % 10
        level = (20 * labels)[:, None, None]
        gray = (level + numbers.integers(0, 60, (count, 28, 28))).astype(np.uint8)
        color = (level[..., None] + numbers.integers(0, 60, (count, 32, 32, 3))).astype(np.uint8)
        for kind, values in (("images-idx3", gray), ("labels-idx1", labels.astype(np.uint8))):
            path = root / "MNIST" / "raw" / f"{stem}-{kind}-ubyte.gz"
            path.write_bytes(gzip.compress(idx_bytes(values)))
        columns = {
            "X": color.transpose(1, 2, 3, 0),
            "y": np.where(labels == 0, 10, labels)[:, None],
        }
        savemat(root / f"{svhn}_32x32.mat", columns)
        flat = (255 - color).transpose(0, 3, 1, 2).reshape(count, -1)
        names = ["test_batch"] if svhn == "test" else [f"data_batch_{i}" for i in range(1, 6)]
        for name, part in zip(names, np.array_split(np.arange(count), len(names)), strict=True):
            content = {"data": flat[part], "labels": labels[part].tolist()}
            (root / "cifar-10-batches-py" / name).write_bytes(pickle.dumps(content))
