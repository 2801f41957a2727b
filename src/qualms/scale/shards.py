"""Scores of any number of images, by one process: a parquet file for each shard of them.

A shard is written when it is whole. So a run that was killed has lost the shard that it was at, and
the next run begins with it. What could not be read of a shard is in the metadata of its file.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict
from itertools import count, takewhile
from pathlib import Path
from typing import Any

from qualms.data import Images, Rejected
from qualms.data.parquet import explain_parquet_errors
from qualms.errors import QualmsError
from qualms.progress import ProgressFn
from qualms.result import Scored
from qualms.scale.shard_folder import Done, arrow, begun, finish, parquet, write
from qualms.stream.source import Part, Source

SIZE = 4096  # images in a shard
LEFT_OUT = b"qualms.rejected"  # the key of a shard's metadata
ScoreImages = Callable[[Images, int], Scored]  # some images, and the place of the first


def score_shards(
    score: ScoreImages,
    source: Source,
    folder: Path,
    about: dict[str, Any],
    size: int = SIZE,
    progress: ProgressFn | None = None,
) -> Done:
    """Score all images that are in no shard of the folder yet.

    Args:
        score: scores some images.
        source: all images.
        folder: where the shards go.
        about: what decides the scores, beside the images: a folder that was made with something
            else is refused.
        size: images in a shard.
        progress: is told how many are scored.
    """
    if size < 1:
        raise QualmsError(f"a shard of {size} images was asked for; take at least 1.")
    whole = {**about, "inputs": source.fingerprint, "shard_size": size}
    with begun(folder, whole):
        number, ended = 0, False
        while not ended:
            while _shard(folder, number).exists():
                number += 1
            with closing(source.parts(number * size, size)) as parts:
                while not ended and not _shard(folder, number).exists():
                    ended = (
                        _write_shard(score, parts, folder, number, size, source, progress) < size
                    )
                    number += 1
        shards = list(takewhile(Path.exists, (_shard(folder, number) for number in count())))
        if len(shards) < number - 1:  # the last may have been empty
            raise QualmsError(
                f"{folder} has lost shards while it was filled; run the same command again."
            )
        return finish(folder, whole, shards, (one for shard in shards for one in _left_out(shard)))


def _write_shard(
    score: ScoreImages,
    parts: Iterator[Part],
    folder: Path,
    number: int,
    size: int,
    source: Source,
    progress: ProgressFn | None,
) -> int:
    """The next `size` images, or as many as there are, which is returned; no file if there are
    none.
    """
    read = 0
    tables: list[Any] = []
    rejected: list[Rejected] = []
    while read < size and (part := next(parts, None)) is not None:
        place = number * size + read
        if len(part.images):
            tables.append(score(part.images, place).to_arrow())
        rejected += part.rejected
        read += part.count
        if progress is not None:
            progress(
                f"images of {source.name} scored",
                place + part.count,
                source.count or place + part.count,
            )
    if not read:
        return 0
    if not tables:  # the columns of any image, without its row
        tables = [score(source.first().take(slice(0, 1)), 0).to_arrow().slice(0, 0)]
    table = arrow().concat_tables(tables)
    told = json.dumps([asdict(one) for one in rejected]).encode()
    write(_shard(folder, number), table.replace_schema_metadata({LEFT_OUT: told}))
    return read


def _left_out(shard: Path) -> list[Rejected]:
    with explain_parquet_errors(shard), parquet().ParquetFile(shard) as file:
        return [
            Rejected(str(one["id"]), str(one["reason"]))
            for one in json.loads(file.schema_arrow.metadata[LEFT_OUT])
        ]


def _shard(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}.parquet"
