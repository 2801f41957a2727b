"""The same images in every format that long runs read."""

import io
import tarfile
from pathlib import Path

import numpy as np
import pyarrow
import torch
from pyarrow import parquet

from qualms.data import Images
from tests.helpers import layouts

COUNT = 70


METHODS = ("regrad+layers(0.2)+smooth(0.05,2)", "entropy")


def png(image: torch.Tensor) -> bytes:
    return layouts.png(image[0].numpy())


def as_folder(images: Images, place: Path) -> str:
    place.mkdir()
    for i, image in enumerate(images.pixels):
        (place / f"{i:03d}.png").write_bytes(png(image))
    return str(place)


def as_npz(images: Images, place: Path) -> str:
    np.savez(place.with_suffix(".npz"), x=images.pixels[:, 0].numpy())
    return str(place.with_suffix(".npz"))


def as_parquet(images: Images, place: Path) -> str:
    """Three files with several groups of rows, none of them as long as a part or a shard."""
    place.mkdir()
    for number, part in enumerate(images.pixels.split(27)):
        table = pyarrow.table({"image": [{"bytes": png(image), "path": None} for image in part]})
        parquet.write_table(table, place / f"{number}.parquet", row_group_size=10)
    return f"{place}/*.parquet"


def as_tar(images: Images, place: Path) -> str:
    place.mkdir()
    for number, part in enumerate(images.pixels.split(27)):
        with tarfile.open(place / f"{number}.tar", "w") as file:
            for i, image in enumerate(part):
                for ending, content in (("cls", b"3"), ("png", png(image))):
                    entry = tarfile.TarInfo(f"{27 * number + i:03d}.{ending}")
                    entry.size = len(content)
                    file.addfile(entry, io.BytesIO(content))
    return f"{place}/*.tar"


FORMATS = {"folder": as_folder, "npz": as_npz, "parquet": as_parquet, "tar": as_tar}
