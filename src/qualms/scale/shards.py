"""Shards by one process: a .parquet file for each so many images, of any number of them.

A shard is written once it is complete. So a run that is killed loses at most one shard, and the next
run begins with that one. A shard's metadata lists its images that could not be read.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from qualms.data import Images, Rejected
from qualms.data.parquet import explain_parquet_errors
from qualms.errors import QualmsError
from qualms.progress import ProgressFn
from qualms.result import Scored
from qualms.scale.shard_folder import Done, arrow, finish, open_shard_folder, parquet, write
from qualms.stream.sink import report_to, score_stream
from qualms.stream.source import ImageBatch, Source

SIZE = 4096  # images in a shard
LEFT_OUT = b"qualms.rejected"  # the key of a shard's metadata
ScoreImages = Callable[[Images, int], Scored]  # some images, and the position of the first


def score_shards(
    score: ScoreImages,
    source: Source,
    folder: Path,
    about: dict[str, Any],
    size: int = SIZE,
    progress: ProgressFn | None = None,
) -> Done:
    """Score all images that are not in a shard of the folder yet.

    Args:
        score: scores some images.
        source: all images.
        folder: where the shards go.
        about: what decides the scores, beside the images. A folder whose shards were made with
            something else is refused.
        size: images in a shard.
        progress: called with the number of images that are scored.
    """
    if size < 1:
        raise QualmsError(f"a shard of {size} images was asked for; take at least 1.")
    about = {**about, "inputs": source.fingerprint, "shard_size": size}
    report = report_to(progress, source.name, source.count)

    def score_batch(batch: ImageBatch) -> Scored:
        return score(batch.images, batch.first)

    with open_shard_folder(folder, about):
        number, is_last = 0, False
        while not is_last:
            if _shard(folder, number).exists():
                number += 1
                continue
            with closing(source.batches(number * size, size)) as batches:
                while not is_last and not _shard(folder, number).exists():
                    shard = _ShardSink(_shard(folder, number))
                    score_stream(_take(batches, size), score_batch, shard, report)
                    shard.close(lambda: score(source.first().take(slice(0, 1)), 0))
                    is_last = shard.count < size
                    number += 1
        return _finish(folder, about, number)


def _finish(folder: Path, about: dict[str, Any], number: int) -> Done:
    """Write the manifest, once there are shards up to a number; the last may have been empty."""
    shards: list[Path] = []
    while _shard(folder, len(shards)).exists():
        shards.append(_shard(folder, len(shards)))
    if len(shards) < number - 1:
        raise QualmsError(
            f"{folder} has lost shards while it was filled; run the same command again."
        )
    rejected = []
    for shard in shards:
        rejected += _rejected_of(shard)
    return finish(folder, about, shards, rejected)


def _take(batches: Iterator[ImageBatch], size: int) -> Iterator[ImageBatch]:
    """The batches of the next shard; no batch reaches into another one."""
    left = size
    while left > 0 and (batch := next(batches, None)) is not None:
        left -= batch.count
        yield batch


class _ShardSink:
    """One shard: collects the scores of its batches, and writes them at the end.

    Args:
        path: of its file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.count = 0
        self.tables: list[Any] = []
        self.rejected: list[Rejected] = []

    def has(self, batch: ImageBatch) -> bool:
        """Nothing: shards that are there are not read again."""
        return False

    def write(self, batch: ImageBatch, scored: Scored | None) -> None:
        """Add a batch."""
        if scored is not None:
            self.tables.append(scored.to_arrow())
        self.rejected += batch.rejected
        self.count += batch.count

    def close(self, score_any: Callable[[], Scored]) -> None:
        """Write the file, unless the shard is empty.

        Args:
            score_any: the scores of any image; their columns serve if no image could be read.
        """
        if self.count == 0:
            return
        tables = self.tables or [score_any().to_arrow().slice(0, 0)]
        rejected = json.dumps([asdict(one) for one in self.rejected]).encode()
        table = arrow().concat_tables(tables)
        write(self.path, table.replace_schema_metadata({LEFT_OUT: rejected}))


def _rejected_of(shard: Path) -> list[Rejected]:
    with explain_parquet_errors(shard), parquet().ParquetFile(shard) as file:
        listed = json.loads(file.schema_arrow.metadata[LEFT_OUT])
        return [Rejected(str(one["id"]), str(one["reason"])) for one in listed]


def _shard(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}.parquet"
