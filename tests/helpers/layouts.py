"""Every layout on disk, written small: what the readers are held to.

Each writer puts `IMAGES` or `GRAY` with `LABELS` below a folder. The first image has one red pixel
in row 1, column 5: it shows the order of the channels and the orientation.
"""

import gzip
import io
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Writer = Callable[[Path], Path]
COUNT = 3
LABELS = [3, 0, 9]
_random = np.random.default_rng(0)
IMAGES = _random.integers(0, 256, (COUNT, 3, 32, 32), np.uint8)
IMAGES[0] = 0
IMAGES[0, 0, 1, 5] = 255
GRAY = _random.integers(0, 256, (COUNT, 28, 28), np.uint8)
GRAY[0] = 0
GRAY[0, 1, 5] = 255


def idx_bytes(numbers: np.ndarray) -> bytes:
    header = struct.pack(">HBB", 0, 8, numbers.ndim) + struct.pack(
        f">{numbers.ndim}I", *numbers.shape
    )
    return header + numbers.astype(np.uint8).tobytes()


def write_idx(folder: Path, images: str, labels: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, numbers in ((images, GRAY), (labels, np.array(LABELS))):
        content = idx_bytes(numbers)
        (folder / name).write_bytes(
            gzip.compress(content, mtime=0) if name.endswith(".gz") else content
        )


def write_mnist(root: Path) -> Path:
    write_idx(root / "MNIST" / "raw", "t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz")
    return root / "MNIST" / "raw" / "t10k-images-idx3-ubyte.gz"


def write_plain_mnist(root: Path) -> Path:
    write_idx(root, "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
    return root / "t10k-images-idx3-ubyte"


def cifar_dict(key: str = "labels") -> dict[str, Any]:
    return {
        "data": IMAGES.reshape(COUNT, -1),
        key: LABELS,
        "filenames": ["a", "b", "c"],
        "batch_label": "one",
    }


def write_cifar10(root: Path, content: bytes | None = None) -> Path:
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "test_batch").write_bytes(pickle.dumps(cifar_dict()) if content is None else content)
    return folder / "test_batch"


def write_svhn(root: Path, **variables: Any) -> Path:
    from scipy.io import savemat

    labels = np.array([10 if label == 0 else label for label in LABELS], np.uint8)[:, None]
    path = root / "test_32x32.mat"
    savemat(path, {"X": IMAGES.transpose(2, 3, 1, 0), "y": labels} | variables, do_compression=True)
    return path


def png(image: np.ndarray, kind: str = "PNG") -> bytes:
    from PIL import Image

    stream = io.BytesIO()
    Image.fromarray(image).save(stream, kind)
    return stream.getvalue()


def write_folder(root: Path) -> Path:
    for label, image in zip(LABELS, IMAGES, strict=True):
        folder = root / "things" / f"class{label}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "picture.png").write_bytes(png(image.transpose(1, 2, 0)))
    return root / "things" / "class3" / "picture.png"


def write_omniglot(root: Path) -> Path:
    for character, image in enumerate(GRAY, 1):
        folder = root / "omniglot-py" / "images_evaluation" / "Greek" / f"character{character:02d}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "0001_01.png").write_bytes(png(255 - image))
    return root / "omniglot-py" / "images_evaluation" / "Greek" / "character01" / "0001_01.png"


def write_npz(root: Path) -> Path:
    np.savez(root / "things.npz", x=IMAGES, y=np.array(LABELS))
    return root / "things.npz"


def write_parquet(root: Path) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"bytes": png(image.transpose(1, 2, 0)), "path": None} for image in IMAGES]
    pq.write_table(pa.table({"image": rows, "label": LABELS}), root / "things.parquet")
    return root / "things.parquet"
