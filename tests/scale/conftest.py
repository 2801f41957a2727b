"""Digits in every format, and a small network for them."""

import io
import tarfile
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import torch
from PIL import Image
from pyarrow import parquet

import qualms
from qualms.data import DATASETS, Images, load
from qualms.models import load_model
from qualms.scale.shards import ScoreImages
from qualms.tasks.network import Network
from qualms.tasks.scoring import scored_images

COUNT = 70
METHODS = ("regrad+layers(0.2)+smooth(0.05,2)", "entropy")


@pytest.fixture(scope="module")
def digits() -> Images:
    return load("digits").take(slice(0, COUNT))


@pytest.fixture(scope="module")
def network() -> Network:
    torch.manual_seed(0)
    return Network("digits-cnn", load_model("digits-cnn"), DATASETS["digits"].normalization)


@pytest.fixture
def score(network: Network) -> ScoreImages:
    methods = {name: network.in_its_units(qualms.methods.parse(name)) for name in METHODS}
    return partial(scored_images, network, qualms.Scorer(network.model, methods))


def png(image: torch.Tensor) -> bytes:
    content = io.BytesIO()
    Image.fromarray(image[0].numpy()).save(content, "PNG")
    return content.getvalue()


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
