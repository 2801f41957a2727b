"""`BatchScorer`: columns of image files in, columns of scores out, for engines of large data."""

import hashlib
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from qualms.data import Images, Rejected
from qualms.data.decode import Unreadable
from qualms.data.reading import File, read_images
from qualms.errors import QualmsError
from qualms.result import Scored
from qualms.scale.shard_folder import column, write_rejections
from qualms.scorer import Scorer
from qualms.stream.image_scorer import ImageScorer
from qualms.stream.network import Network

Columns = dict[str, np.ndarray]


@dataclass(frozen=True)
class BatchScorer:
    """Scores a batch of image files.

    A batch has the columns `id` and `content`, the bytes of each file, as an array of objects
    (NumPy arrays of fixed-length bytes drop trailing zeros). It may have a column `reason`, which
    says why the bytes of a file are missing, and is empty for others. The result has the columns of
    `Scored.columns`, without rows for images that cannot be read.

    Args:
        network: The network, which turns images into inputs.
        scorer: The scorer of the network's model.
        name: The display name of the images.
        classes: The names of the images' classes, if they have some.
        size: The height and width of all images; None if the network's transform resizes them.
        strict: Whether an image that cannot be read is an error.
        rejected: The folder to write lists of images that cannot be read to, a file for each batch
            that has some; None to write none.
    """

    network: Network
    scorer: Scorer
    name: str
    classes: tuple[str, ...] = ()
    size: tuple[int, int] | None = None
    strict: bool = False
    rejected: Path | None = None

    def __call__(self, batch: Columns) -> Columns:
        """Score one batch of files.

        Args:
            batch: The columns `id` and `content`, and maybe `reason`, each of length n.

        Returns:
            Columns with a row for each image that could be read.
        """
        files = self._make_files(batch)
        read = read_images(
            files,
            self.name,
            self.network.transform,
            self.strict,
            may_be_empty=True,
        )
        if read.rejected and self.rejected is not None:
            _write_batch_rejections(self.rejected, read.rejected)
        if not read.kept:
            return self._make_empty_columns()
        # `kept` are the indices of the files that could be read.
        ids = tuple(files[index].id for index in read.kept)
        pixels = torch.from_numpy(read.pixels)
        images = Images(self.name, pixels, labels=None, ids=ids)
        return _to_columns(self.score(images))

    def score(self, images: Images, first: int = 0) -> Scored:
        """Score images that are in memory.

        Args:
            images: Images of one size.
            first: The position of the first image; images without names have positions as ids.

        Raises:
            QualmsError: If the images have another size than `size`.
        """
        if self.size is not None and self.size != images.size:
            which = images.ids[0] if images.ids else f"number {first}"
            raise QualmsError(
                f"the images of {self.name} differ in size: the first are {_show(self.size)} and "
                f"{which} is {_show(images.size)}; pass size= to resize them while reading."
            )
        named = replace(images, classes=self.classes)
        return ImageScorer(self.network, self.scorer).score(named, first)

    def _make_files(self, batch: Columns) -> list[File]:
        """Convert the rows of a batch to the files that `read_images` takes, still undecoded.

        Args:
            batch: The columns `id` and `content`, and maybe `reason`, as `__call__` takes them.
        """
        if batch["content"].dtype.kind == "S":
            raise QualmsError(
                "`content` is a numpy array of fixed-length bytes, which drops trailing zeros; "
                "pass an array of dtype object."
            )
        reasons = batch.get("reason", np.full(len(batch["id"]), ""))
        files = []
        for name, content, reason in zip(batch["id"], batch["content"], reasons, strict=True):
            read = partial(_require_content, name, content, reason)
            files.append(File(name, f"{name} in {self.name}", read))
        return files

    def _make_empty_columns(self) -> Columns:
        """Return the columns of scores without any row, for a batch without readable images.

        A gray image is scored to learn the names and dtypes of the columns.
        """
        transform = self.network.transform
        size = transform.size if transform is not None else self.size
        assert size is not None  # it is known where there is no transform
        gray = torch.full((1, 3, *size), 128, dtype=torch.uint8)
        images = Images(self.name, gray, labels=None, ids=("gray",))
        columns = _to_columns(self.score(images))
        return {name: values[:0] for name, values in columns.items()}


def rejected_in(folder: Path) -> list[Rejected]:
    """Read the lists of images that workers could not read; return these images sorted by id.

    An image that is in several lists, as its batch ran again, is returned once.

    Args:
        folder: The folder of the lists, a .parquet file for each batch that had such images.
    """
    reasons_by_id: dict[str, str] = {}
    for file in sorted(folder.glob("*.parquet")):
        ids, reasons = (column(file, name).to_pylist() for name in ("id", "reason"))
        if len(ids) != len(reasons) or not all(isinstance(text, str) for text in (*ids, *reasons)):
            raise QualmsError(
                f"{file} is not a valid list of rejected images; remove it, and score again."
            )
        reasons_by_id.update(zip(ids, reasons, strict=True))
    return [Rejected(name, why) for name, why in sorted(reasons_by_id.items())]


def _write_batch_rejections(folder: Path, rejected: tuple[Rejected, ...]) -> None:
    """Write the images of a batch that could not be read to a file of their own.

    The name of the file is a hash of their ids, so a batch that is run again writes the same file.

    Args:
        folder: The folder that all workers write to; it is created if needed.
        rejected: The images of the batch that could not be read, with reasons.
    """
    ids = "\n".join(image.id for image in rejected)
    digest = hashlib.sha256(ids.encode()).hexdigest()[:16]
    folder.mkdir(exist_ok=True)
    write_rejections(folder / f"{digest}.parquet", rejected)


def _to_columns(scored: Scored) -> Columns:
    """Convert scores to a table of NumPy arrays by column, with a row for each image."""
    return {name: np.array(values) for name, values in scored.columns().items()}


def _require_content(name: str, content: bytes | None, reason: str) -> bytes:
    """Return the bytes of a file, or raise an error with the reason why they are missing.

    Args:
        name: The id of the image.
        content: The bytes; None if they could not be read.
        reason: Why there are no bytes; empty if there are.

    Raises:
        Unreadable: If there are no bytes.
    """
    if reason or content is None:
        raise Unreadable(name, reason or "not the bytes of an image file")
    return content


def _show(size: tuple[int, int]) -> str:
    """Format a height and width as `WIDTH x HEIGHT`."""
    return f"{size[1]} x {size[0]}"
