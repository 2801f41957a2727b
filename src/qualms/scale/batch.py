"""Files of images to columns of scores, a batch at a time: what a worker of any engine for many
inputs runs.
"""

import hashlib
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from qualms.data import Images, Rejected
from qualms.data.decode import Unreadable
from qualms.data.reading import File, read_available
from qualms.errors import QualmsError
from qualms.result import Scored
from qualms.scale.shard_folder import column, write_rejected
from qualms.scorer import Scorer
from qualms.stream.network import Network
from qualms.tasks.scoring import scored_images

Columns = dict[str, np.ndarray]


@dataclass(frozen=True)
class BatchScorer:
    """Columns in, columns out: of image files to those of `Scored.columns`.

    What comes in has the columns `id` and `content`, the bytes of a file (an array of objects:
    those of numpy's bytes drop zeros at the end), and perhaps `reason`: why there are none. Images
    that cannot be read have no row in what comes out.

    Args:
        network: how images become inputs.
        scorer: of its model.
        name: what people call the images.
        classes: names of their classes, if they have some.
        size: height and width of all of them; None if the network fits them.
        strict: whether an image that cannot be read is an error.
        rejected: a folder in which a file for each batch lists what cannot be read.
    """

    network: Network
    scorer: Scorer
    name: str
    classes: tuple[str, ...] = ()
    size: tuple[int, int] | None = None
    strict: bool = False
    rejected: Path | None = None

    def __call__(self, batch: Columns) -> Columns:
        """One batch of files."""
        if batch["content"].dtype.kind == "S":
            raise QualmsError(
                "`content` is an array of numpy's bytes, which drops zeros; pass one of dtype object."
            )
        reasons = batch.get("reason", np.full(len(batch["id"]), ""))
        files = [
            File(name, f"{name} in {self.name}", partial(_content, name, content, reason))
            for name, content, reason in zip(batch["id"], batch["content"], reasons, strict=True)
        ]
        read = read_available(files, self.name, self.network.transform, self.strict)
        if read.rejected and self.rejected is not None:
            _list(self.rejected, read.rejected)
        ids = tuple(files[place].id for place in read.kept)
        if not ids:  # the columns of any image, without its row
            return {
                name: values[:0] for name, values in _columns(self.scored(self._gray())).items()
            }
        return _columns(
            self.scored(Images(self.name, torch.from_numpy(read.pixels), None, ids=ids))
        )

    def _gray(self) -> Images:
        size = self.network.transform.size if self.network.transform is not None else self.size
        assert size is not None
        return Images(
            self.name, torch.full((1, 3, *size), 128, dtype=torch.uint8), None, ids=("gray",)
        )

    def scored(self, images: Images, first: int = 0) -> Scored:
        """Some images; `first` is the place of the first, which is its id where images have no
        names.
        """
        if self.size not in (None, images.size):
            raise QualmsError(
                f"the images of {self.name} differ in size: the first are {_by(self.size)} and "
                f"{images.ids[0] if images.ids else f'number {first}'} is {_by(images.size)}; pass size= to resize "
                "them while reading."
            )
        return scored_images(
            self.network, self.scorer, replace(images, classes=self.classes), first
        )


def rejected_in(folder: Path) -> list[Rejected]:
    """What all workers listed in a folder; an image that several attempts met counts once."""
    found: dict[str, str] = {}
    for file in sorted(folder.glob("*.parquet")):
        ids, reasons = (column(file, name).to_pylist() for name in ("id", "reason"))
        if len(ids) != len(reasons) or not all(isinstance(one, str) for one in (*ids, *reasons)):
            raise QualmsError(
                f"{file} is no list of what could not be read; remove it, and score again."
            )
        found.update(zip(ids, reasons, strict=True))
    return [Rejected(name, why) for name, why in sorted(found.items())]


def _list(folder: Path, rejected: tuple[Rejected, ...]) -> None:
    """In a file that the same images always have, so that a batch that is run again adds nothing."""
    name = hashlib.sha256("\n".join(one.id for one in rejected).encode()).hexdigest()[:16]
    folder.mkdir(exist_ok=True)
    write_rejected(folder / f"{name}.parquet", rejected)


def _columns(scored: Scored) -> Columns:
    return {name: np.array(values) for name, values in scored.columns().items()}


def _content(name: str, content: bytes | None, reason: str) -> bytes:
    if reason or content is None:
        raise Unreadable(name, reason or "no image file's bytes")
    return content


def _by(size: tuple[int, int] | None) -> str:
    assert size is not None
    return f"{size[1]} x {size[0]}"
