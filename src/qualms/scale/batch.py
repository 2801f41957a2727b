"""Files of images to columns of scores, a batch at a time: what a worker of any engine for many inputs runs."""

import hashlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qualms.data import Images
from qualms.data.decode import Unreadable
from qualms.data.reading import File, read_some
from qualms.scorer import Scorer
from qualms.tasks.network import Network
from qualms.tasks.scoring import scored_images

Columns = dict[str, np.ndarray]


@dataclass(frozen=True)
class BatchScorer:
    """Columns in, columns out: `id` and `content`, the bytes of an image file, to those of `Scored.columns`.

    Images that cannot be read have no row in what comes out.

    Args:
        network: how images become inputs.
        scorer: of its model.
        classes: names of the classes, if the images have some.
        rejected: a folder in which a file for each batch lists what cannot be read.
    """

    network: Network
    scorer: Scorer
    classes: tuple[str, ...] = ()
    rejected: Path | None = None

    def __call__(self, batch: Columns) -> Columns:
        """One batch."""
        files = [
            File(str(i), str(i), partial(_content, i, c)) for i, c in zip(batch["id"], batch["content"], strict=True)
        ]
        read = read_some(files, "a batch", self.network.fit, strict=False)
        if read.rejected and self.rejected is not None:
            self._list([(one.id, one.reason) for one in read.rejected])
        ids = tuple(files[place].id for place in read.kept)
        if not ids:
            return {"id": np.array([], dtype=str)}
        images = Images("a batch", torch.from_numpy(read.pixels), None, self.classes, ids)
        return {
            name: np.array(values)
            for name, values in scored_images(self.network, self.scorer, images).columns().items()
        }

    def _list(self, rows: list[tuple[str, str]]) -> None:
        """In a file that the same images always have, so that a batch that is run again adds nothing."""
        import pyarrow
        from pyarrow import parquet

        assert self.rejected is not None
        name = hashlib.sha256("\n".join(one for one, _ in rows).encode()).hexdigest()[:16]
        table = pyarrow.table({"id": [one for one, _ in rows], "reason": [why for _, why in rows]})
        parquet.write_table(table, self.rejected / f"{name}.parquet")


def _content(where: Any, value: Any) -> bytes:
    content = value.get("bytes") if isinstance(value, dict) else value
    if not isinstance(content, bytes):
        raise Unreadable(str(where), "no image file's bytes")
    return content
