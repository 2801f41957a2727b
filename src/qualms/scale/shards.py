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
# The entry of a shard's metadata that lists, as JSON, its images that could not be read.
REJECTED_KEY = b"qualms.rejected"
# A function of images, and of the position of the first one in the source.
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
        score: Scores some images, given the position of the first one in the source.
        source: The source of all images.
        folder: The folder for the shards.
        about: The settings that decide the scores, besides the images. A folder whose shards were
            written with other settings is refused.
        size: The number of images in a shard.
        progress: Called with a text, the number of images that are scored, and the total.

    Returns:
        How many images of the folder are scored, rejected and accepted.
    """
    if size < 1:
        raise QualmsError(f"the shard size is {size}; pass at least 1.")
    about = {**about, "inputs": source.fingerprint, "shard_size": size}

    def score_batch(batch: ImageBatch) -> Scored:
        """Score the images of a batch that could be read."""
        return score(batch.images, batch.first)

    def score_one() -> Scored:
        """Score the first image of the source that can be read."""
        return score(source.first().take(slice(0, 1)), 0)

    with open_shard_folder(folder, about):
        sink = _ShardSink(folder, size, score_one)
        report = report_to(progress, source.name, source.count)
        # `closing` stops the threads that read ahead, also after an error.
        with closing(sink.missing_batches(source)) as batches:
            score_stream(batches, score_batch, sink, report)
        # The last shard may have fewer images than the others.
        sink.flush()
        return _finish(folder, about, sink.expected)


class _ShardSink:
    """Collects the scores of a shard's batches, and writes them to its file; shard by shard.

    Args:
        folder: The folder of the shards.
        size: The number of images in a shard.
        score_one: Returns the scores of any single image. They give a shard of which no image could
            be read its columns.

    Attributes:
        expected: The number of shards that the folder must hold, as far as they are known.
        number: The index of the shard that is being collected; None if there is none.
        tables: The scores of this shard's batches so far, as pyarrow tables.
        rejected: The images of this shard so far that could not be read.
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
        """Yield the batches of all shards that the folder lacks, without reading the others.

        Args:
            source: The source of all images.
        """
        number = 0
        is_at_end = False
        while not is_at_end:
            # Reads from the next shard that is missing, up to one that exists or to the end.
            while _shard_path(self.folder, number).exists():
                number += 1
            self.expected = max(self.expected, number)
            is_at_end = True  # unless the loop below comes to a shard that exists
            start = number * self.size
            with closing(source.batches(start, self.size)) as batches:
                for batch in batches:
                    number = batch.first // self.size
                    if _shard_path(self.folder, number).exists():
                        is_at_end = False
                        break
                    yield batch

    def restore(self, batch: ImageBatch) -> bool:
        """Return False: each batch has to be scored, as `missing_batches` leaves out the others."""
        return False

    def write(self, batch: ImageBatch, scored: Scored | None) -> None:
        """Collect the scores of a batch, and write the shard if this completes it.

        Args:
            batch: A batch whose images all belong to one shard.
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
        if not self.tables:
            # No image could be read: a table with the columns of scores, but without rows.
            self.tables.append(self.score_one().to_arrow().slice(0, 0))
        rejected = json.dumps([asdict(image) for image in self.rejected]).encode()
        table = arrow().concat_tables(self.tables)
        table = table.replace_schema_metadata({REJECTED_KEY: rejected})
        write(_shard_path(self.folder, self.number), table)
        self.expected = max(self.expected, self.number + 1)
        self.number = None
        self.tables = []
        self.rejected = []


def _finish(folder: Path, about: dict[str, Any], expected: int) -> Done:
    """Collect the rejected images of all shards, and complete the folder; see `finish`.

    Args:
        folder: The folder of the shards.
        about: The settings that decide the scores.
        expected: The number of shards that the folder must hold.

    Returns:
        How many images of the folder are scored, rejected and accepted.

    Raises:
        QualmsError: If a shard is missing, as it was removed during the run.
    """
    shards = [_shard_path(folder, number) for number in range(expected)]
    rejected = []
    for shard in shards:
        if not shard.exists():
            raise QualmsError(
                f"shards in {folder} were deleted during the run; run the same command again."
            )
        rejected += _read_rejections(shard)
    return finish(folder, about, shards, rejected)


def _read_rejections(shard: Path) -> list[Rejected]:
    """Read which images of a shard could not be read, with reasons, from the shard's metadata."""
    with explain_parquet_errors(shard), parquet().ParquetFile(shard) as file:
        images = json.loads(file.schema_arrow.metadata[REJECTED_KEY])
        return [Rejected(str(image["id"]), str(image["reason"])) for image in images]


def _shard_path(folder: Path, number: int) -> Path:
    """Return the path of a shard in a folder by its index, from 0."""
    return folder / f"shard-{number:05d}.parquet"
