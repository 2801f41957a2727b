"""Readers of images and texts: a small valid file of each kind, how it is made wrong, and how it is
read.

What a reader returns is looked at, since memory that is not the file's shows only then.
"""

import io
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qualms.data import Images, load
from tests.helpers import layouts
from tests.helpers.mutations import (
    damaged,
    damaged_lines,
    damaged_pickle,
    either,
    in_gzip,
    in_mat,
    in_png,
    in_tar,
    in_zip,
)
from tests.helpers.reader import IMAGE, PAGES, Reader, content, one


def _looked_at(images: Images) -> None:
    assert images.pixels.dtype == torch.uint8
    assert len(images) > 0
    assert images.pixels.ndim == 4
    assert images.pixels.shape[1] in (1, 3)
    images.fingerprint()
    if images.labels is not None:
        assert int(images.labels.min()) >= 0
        assert not images.classes or int(images.labels.max()) < len(images.classes)


def _dataset(name: str) -> Callable[[Path, Path], None]:
    return lambda folder, path: _looked_at(load(name, folder))


def _at(folder: Path, path: Path) -> None:
    _looked_at(load(path))


def _in_parts(folder: Path, path: Path) -> None:
    from qualms.stream.source import open_source

    source = open_source(str(path), None, None)
    for part in source.batches(1, 8):
        assert len(part.images) + len(part.rejected) == part.count
    _looked_at(source.first())


def _cifar10(folder: Path) -> Path:
    """As Python 2 wrote the published files: names as bytes, protocol 2."""
    return layouts.write_cifar10(folder, pickle.dumps(layouts.cifar_dict(), 2))


def _cifar100(folder: Path) -> Path:
    (folder / "cifar-100-python").mkdir()
    path = folder / "cifar-100-python" / "test"
    path.write_bytes(pickle.dumps(layouts.cifar_dict("fine_labels"), 5))
    return path


def _plain_svhn(folder: Path) -> Path:
    from scipy.io import savemat

    labels = np.array([3, 10, 9], np.uint8)[:, None]
    savemat(folder / "test_32x32.mat", {"X": layouts.IMAGES.transpose(2, 3, 1, 0), "y": labels})
    return folder / "test_32x32.mat"


def _pictures(*kinds: tuple[str, str, dict[str, Any]]) -> Callable[[Path], list[Path]]:
    """An image in color or another mode, in files of these endings, written with these options."""

    def make(folder: Path) -> list[Path]:
        from PIL import Image

        paths = []
        color = Image.fromarray(layouts.IMAGES[1].transpose(1, 2, 0))
        for i, (ending, mode, options) in enumerate(kinds):
            path = folder / f"{i}.{ending}"
            image = (
                Image.fromarray(layouts.GRAY[1].astype(np.uint16) * 257)
                if mode == "I;16"
                else color.convert(mode)
            )
            image.save(path, **options)
            paths.append(path)
        return paths

    return make


def _other_pictures(folder: Path) -> list[Path]:
    """All that Pillow both reads and writes, beside the formats that have a row of their own."""
    from PIL import Image

    from qualms.data.folder import readable_endings

    own = {"PNG", "JPEG", "GIF", "BMP", "WEBP", "TIFF", "PDF"}
    paths = []
    for ending, kind in Image.registered_extensions().items():
        if (
            ending not in readable_endings()
            or kind in own
            or kind not in Image.SAVE
            or kind == "EPS"
        ):
            continue
        for mode in ("RGB", "L", "1"):
            try:
                Image.fromarray(layouts.IMAGES[1].transpose(1, 2, 0)).convert(mode).save(
                    folder / f"a{mode}{ending}"
                )
                load(folder / f"a{mode}{ending}")
            except (OSError, ValueError, KeyError):
                continue
            paths.append(folder / f"a{mode}{ending}")
            break
    return paths


def _npz(folder: Path) -> list[Path]:
    images = layouts.IMAGES.astype(np.float32) / 255
    np.savez_compressed(folder / "floats.npz", images=images, labels=np.array(layouts.LABELS))
    return [layouts.write_npz(folder), folder / "floats.npz"]


def _parquets(folder: Path) -> list[Path]:
    import pyarrow
    from pyarrow import parquet

    plain = pyarrow.table(
        {"img": [layouts.png(image.transpose(1, 2, 0)) for image in layouts.IMAGES]}
    )
    features = {"label": {"names": list("abcdefghij"), "_type": "ClassLabel"}}
    told = json.dumps({"info": {"features": features}}).encode()
    named = plain.append_column("label", pyarrow.array(layouts.LABELS)).replace_schema_metadata(
        {b"huggingface": told}
    )
    paths = [layouts.write_parquet(folder)]
    for compression in ("none", "gzip", "zstd"):
        paths.append(folder / f"{compression}.parquet")
        parquet.write_table(named, paths[-1], compression=compression, row_group_size=2)
    return paths


def _tar(folder: Path) -> Path:
    import tarfile

    with tarfile.open(folder / "things.tar", "w") as file:
        for i, image in enumerate(layouts.GRAY):
            for ending, content in (("cls", b"3"), ("png", layouts.png(image))):
                entry = tarfile.TarInfo(f"{i:03d}.{ending}")
                entry.size = len(content)
                file.addfile(entry, io.BytesIO(content))
    return folder / "things.tar"


LINES = b"".join(
    json.dumps({"id": i, "text": text}).encode() + b"\n"
    for i, text in enumerate(("One.", "Zwei ä.", "三"))
)


def _text_parquet(folder: Path) -> Path:
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.table(
        {"text": ["One.", "Zwei ä.", "三"], "id": [1, 2, 3], "more": [[1], [2, 3], []]}
    )
    parquet.write_table(table, folder / "texts.parquet")
    return folder / "texts.parquet"


def _texts(folder: Path, path: Path) -> None:
    from qualms.data.texts import read_texts

    for strict in (True, False):
        found = read_texts(path, strict=strict)
        assert found.documents
        for document in found.documents:
            assert document.text.strip()
            document.text.encode()
            document.name.encode()


READERS_OF_DATA: dict[str, Reader] = {
    "idx": Reader(one(layouts.write_plain_mnist), _dataset("mnist"), damaged),
    "idx.gz": Reader(
        one(layouts.write_mnist), _dataset("mnist"), either(damaged, in_gzip(damaged))
    ),
    "cifar10": Reader(one(_cifar10), _dataset("cifar10"), either(damaged, damaged_pickle)),
    "cifar100": Reader(one(_cifar100), _dataset("cifar100"), either(damaged, damaged_pickle)),
    "svhn": Reader(one(_plain_svhn), _dataset("svhn"), damaged),
    "svhn-compressed": Reader(
        one(layouts.write_svhn), _dataset("svhn"), either(damaged, in_mat, in_mat)
    ),
    "omniglot": Reader(
        one(layouts.write_omniglot), _dataset("omniglot"), either(damaged, in_png), bound=IMAGE
    ),
    "folder": Reader(
        one(layouts.write_folder), _dataset("things"), either(damaged, in_png), bound=IMAGE
    ),
    "png": Reader(
        _pictures(
            ("png", "RGB", {}),
            ("png", "P", {}),
            ("png", "1", {}),
            ("png", "RGBA", {}),
            ("png", "I;16", {}),
        ),
        _at,
        either(damaged, in_png, in_png),
        bound=IMAGE,
    ),
    "jpeg": Reader(
        _pictures(
            ("jpg", "RGB", {}),
            ("jpg", "L", {"progressive": True}),
            ("jpg", "CMYK", {"quality": 90}),
        ),
        _at,
        damaged,
        bound=IMAGE,
    ),
    "gif": Reader(
        _pictures(("gif", "P", {}), ("gif", "L", {"interlace": False}), ("gif", "1", {})),
        _at,
        damaged,
        bound=IMAGE,
    ),
    "bmp": Reader(
        _pictures(("bmp", "RGB", {}), ("bmp", "P", {}), ("bmp", "1", {}), ("dib", "L", {})),
        _at,
        damaged,
        bound=IMAGE,
    ),
    "webp": Reader(
        _pictures(
            ("webp", "RGB", {}),
            ("webp", "RGBA", {"lossless": True}),
            ("webp", "RGB", {"quality": 10}),
        ),
        _at,
        damaged,
        bound=IMAGE,
    ),
    "tiff": Reader(
        _pictures(
            ("tif", "RGB", {}),
            ("tif", "L", {"compression": "tiff_lzw"}),
            ("tif", "RGB", {"compression": "tiff_adobe_deflate"}),
            ("tif", "RGB", {"compression": "jpeg"}),
            ("tif", "1", {"compression": "group4"}),
            ("tif", "RGBA", {"compression": "packbits"}),
            ("tif", "I;16", {}),
        ),
        _at,
        damaged,
        bound=IMAGE,
    ),
    "other images": Reader(_other_pictures, _at, damaged, bound=IMAGE),
    "npz": Reader(_npz, _at, either(damaged, in_zip(damaged), in_zip(damaged))),
    "npz in parts": Reader(_npz, _in_parts, either(damaged, in_zip(damaged), in_zip(damaged))),
    "parquet": Reader(_parquets, _at, damaged, bound=PAGES),
    "parquet in parts": Reader(_parquets, _in_parts, damaged, bound=PAGES),
    "tar": Reader(
        one(_tar), _in_parts, either(damaged, in_tar(either(damaged, in_png))), bound=IMAGE
    ),
    "txt": Reader(content("a.txt", "Once upon a time. Zwölf.\r\n三".encode()), _texts, damaged),
    "jsonl": Reader(content("a.jsonl", LINES), _texts, either(damaged, damaged_lines)),
    "text parquet": Reader(one(_text_parquet), _texts, damaged, bound=PAGES),
}
