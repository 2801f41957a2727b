"""Shards written by one process: .parquet files with a fixed number of images each.

A shard is written once it is complete. So a run that is killed loses at most one shard, and the
next run begins with that one. A shard's metadata lists its images that could not be read.
"""

import json
from collections.abc import Callable, Generator
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
# The entry of a shard's metadata that lists rejected images.
REJECTED_KEY = b"qualms.rejected"
# Takes images, and the position of the first.
ScoreImages = Callable[[Images, int], Scored]


def score_shards(
    score: ScoreImages,
    source: Source,
    folder: Path,
    about: dict[str, Any],
    size: int = SIZE,
    progress: ProgressFn | None = None,
) -> Done:
    """Score all images that the folder has no shard of yet, in this process.

    Args:
        score: Scores some images, given the position of the first.
        source: The source of all images.
        folder: Where the shards go.
        about: The settings that decide the scores, beside the images. A folder whose shards were
            made with other settings is refused.
        size: The number of images in a shard.
        progress: Called with the number of images that are scored.

    Returns:
        What the folder holds in the end.
    """
    if size < 1:
        raise QualmsError(f"the shard size is {size}; pass at least 1.")
    about = {**about, "inputs": source.fingerprint, "shard_size": size}

    def score_batch(batch: ImageBatch) -> Scored:
        """Return the scores of a batch."""
        return score(batch.images, batch.first)

    def score_one() -> Scored:
        """Return the scores of the first image that can be read."""
        return score(source.first().take(slice(0, 1)), 0)

    with open_shard_folder(folder, about):
        sink = _ShardSink(folder, size, score_one)
        report = report_to(progress, source.name, source.count)
        with closing(sink.missing_batches(source)) as batches:
            score_stream(batches, score_batch, sink, report)
        sink.flush()
        return _finish(folder, about, sink.expected)


class _ShardSink:
    """The shards of a folder: collects the scores of a shard's batches, and writes its file.

    Args:
        folder: The folder of the shards.
        size: The number of images in a shard.
        score_one: Returns the scores of any single image. A shard of which no image could be read
            takes its columns from these scores.

    Attributes:
        expected: The number of shards that the folder must hold.
        number: The number of the shard that is being collected; None if there is none.
        tables: The scores of the shard so far, pyarrow tables.
        rejected: The images of the shard so far that could not be read.
    """

    def __init__(
        self,
        folder: Path,
        size: int,
        score_one: Callable[[], Scored],
    ) -> None:
        self.folder, self.size, self.score_one = folder, size, score_one
        self.expected = 0
        self.number: int | None = None
        self.tables: list[Any] = []
        self.rejected: list[Rejected] = []

    def missing_batches(self, source: Source) -> Generator[ImageBatch]:
        """Yield the batches of all shards that the folder lacks; other batches are not read.

        Args:
            source: The source of all images.
        """
        number, is_done = 0, False
        while not is_done:
            while _shard(self.folder, number).exists():
                number += 1
            self.expected = max(self.expected, number)
            is_done = True
            start = number * self.size
            with closing(source.batches(start, self.size)) as batches:
                for batch in batches:
                    number = batch.first // self.size
                    if _shard(self.folder, number).exists():
                        # The outer loop starts reading again at the next shard that is missing.
                        is_done = False
                        break
                    yield batch

    def restore(self, batch: ImageBatch) -> bool:
        """Return False: `missing_batches` yields no batch of a shard that the folder has."""
        return False

    def write(self, batch: ImageBatch, scored: Scored | None) -> None:
        """Collect the scores of a batch; write its shard if this batch is the last of a full shard.

        Args:
            batch: A batch of one shard; no batch reaches into another.
            scored: The scores of the batch; None if none of its images could be read.
        """
        self.number = batch.first // self.size
        if scored is not None:
            self.tables.append(scored.to_arrow())
        self.rejected += batch.rejected
        if (batch.first + batch.count) % self.size == 0:
            self.flush()

    def flush(self) -> None:
        """Write the shard that is being collected, if any; the next batch begins another one."""
        if self.number is None:
            return
        tables = self.tables or [self.score_one().to_arrow().slice(0, 0)]
        rejected = json.dumps([asdict(one) for one in self.rejected]).encode()
        table = arrow().concat_tables(tables)
        table = table.replace_schema_metadata({REJECTED_KEY: rejected})
        write(_shard(self.folder, self.number), table)
        self.expected = max(self.expected, self.number + 1)
        self.number, self.tables, self.rejected = None, [], []


def _finish(folder: Path, about: dict[str, Any], expected: int) -> Done:
    """Write the manifest, once all shards are there.

    Args:
        folder: The folder of the shards.
        about: The settings that decide the scores.
        expected: The number of shards; an error is raised if one of them is missing.
    """
    shards = [_shard(folder, number) for number in range(expected)]
    rejected = []
    for shard in shards:
        if not shard.exists():
            raise QualmsError(
                f"shards in {folder} were deleted during the run; run the same command again."
            )
        rejected += _rejected_of(shard)
    return finish(folder, about, shards, rejected)


def _rejected_of(shard: Path) -> list[Rejected]:
    """Read the list of a shard's images that could not be read, from its metadata."""
    with explain_parquet_errors(shard), parquet().ParquetFile(shard) as file:
        rejected = json.loads(file.schema_arrow.metadata[REJECTED_KEY])
        return [Rejected(str(one["id"]), str(one["reason"])) for one in rejected]


def _shard(folder: Path, number: int) -> Path:
    """Return the path of the shard with this number, from 0."""
    return folder / f"shard-{number:05d}.parquet"
