"""Scores of any number of images: a parquet file for each shard of them, in a folder that a later run goes on with.

    shard-00000.parquet …   the scores of the first `size` images, and so on; its metadata has what could not be read
    rejected.parquet        all that could not be read, once all shards are there
    manifest.json           what decides the scores and, at the end, how many there are

A file is written beside its place and moved there when it is whole. So what is there is right, a run that was killed
has lost the shard that it was at, and the next run begins with it. A run that would give other scores is refused.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

from qualms.data import Images, Rejected
from qualms.data.places import extra
from qualms.disk import locked, written_whole
from qualms.errors import QualmsError
from qualms.progress import Tell
from qualms.scale.source import Part, Source
from qualms.scored import Scored

SIZE = 4096  # images in a shard
MANIFEST, REJECTED, LOCK = "manifest.json", "rejected.parquet", ".lock"
LEFT_OUT = b"qualms.rejected"  # the key of a shard's metadata
ScoreImages = Callable[[Images, int], Scored]  # some images, and the place of the first


@dataclass(frozen=True)
class Done:
    """What the shards of a folder hold."""

    scored: int
    rejected: int
    accepted: int | None  # of those scored, if there is a threshold


def score_shards(
    score: ScoreImages,
    source: Source,
    folder: Path,
    about: dict[str, Any],
    size: int = SIZE,
    tell: Tell | None = None,
) -> Done:
    """Score all images that are in no shard of the folder yet.

    Args:
        score: scores some images.
        source: all images.
        folder: where the shards go.
        about: what decides the scores, beside the images: a folder that was made with something else is refused.
        size: images in a shard.
        tell: is told how many are scored.
    """
    if size < 1:
        raise QualmsError(f"a shard of {size} images was asked for; take at least 1.")
    with locked(folder / LOCK):
        whole = {**about, "inputs": source.fingerprint, "shard_size": size}
        _require_same(folder, whole)
        number, ended = 0, False
        while not ended:
            while _shard(folder, number).exists():
                number += 1
            with closing(source.parts(number * size, size)) as parts:
                while not ended and not _shard(folder, number).exists():
                    ended = _write_shard(score, parts, folder, number, size, source, tell) < size
                    number += 1
        done = _finished(folder)
        _write_json(folder / MANIFEST, {**whole, "done": asdict(done)})
    return done


def require_own(folder: Path) -> None:
    """An error if the folder holds something else than shards, or cannot be made."""
    with _writable(folder):
        folder.mkdir(parents=True, exist_ok=True)
        others = sorted(p.name for p in folder.iterdir() if not p.name.startswith("."))
    if others and not (folder / MANIFEST).exists():
        raise QualmsError(f"{folder} holds {others[0]} and no {MANIFEST}; choose a folder of its own.")


def _write_shard(
    score: ScoreImages,
    parts: Iterator[Part],
    folder: Path,
    number: int,
    size: int,
    source: Source,
    tell: Tell | None,
) -> int:
    """The next `size` images, or as many as there are, which is returned; no file if there are none."""
    arrow, read = _arrow(), 0
    tables: list[Any] = []
    rejected: list[Rejected] = []
    while read < size and (part := next(parts, None)) is not None:
        place = number * size + read
        if len(part.images):
            tables.append(score(part.images, place).to_arrow())
        rejected += part.rejected
        read += part.count
        if tell is not None:
            tell(f"{source.name} scored", place + part.count, source.count or place + part.count)
    if not read:
        return 0
    if not tables and number == 0:
        raise QualmsError(
            f"none of the first {read} images of {source.name} can be read: {rejected[0].id} is {rejected[0].reason}; "
            "check that it is the one you meant."
        )
    # A shard of which nothing can be read has the columns of the first.
    table = arrow.concat_tables(tables) if tables else _parquet().read_table(_shard(folder, 0)).slice(0, 0)
    told = json.dumps([asdict(one) for one in rejected]).encode()
    _write(_shard(folder, number), table.replace_schema_metadata({LEFT_OUT: told}))
    return read


def _finished(folder: Path) -> Done:
    """What all shards hold together; says in a file of its own what could not be read."""
    parquet, scored, accepted = _parquet(), 0, None
    rejected: list[dict[str, str]] = []
    for number in count():
        if not _shard(folder, number).exists():
            break
        with parquet.ParquetFile(_shard(folder, number)) as file:
            scored += file.metadata.num_rows
            rejected += json.loads(file.schema_arrow.metadata[LEFT_OUT])
            if "accepted" in file.schema_arrow.names:
                accepted = (accepted or 0) + sum(file.read(["accepted"]).column(0).to_pylist())
    columns = {key: [one[key] for one in rejected] for key in ("id", "reason")}
    _write(folder / REJECTED, _arrow().table({key: _arrow().array(v, _arrow().string()) for key, v in columns.items()}))
    return Done(scored, len(rejected), accepted)


def _require_same(folder: Path, about: dict[str, Any]) -> None:
    """An error that says what differs if the folder's shards were made otherwise; a new folder is begun."""
    path, about = folder / MANIFEST, json.loads(json.dumps(about))
    require_own(folder)
    if not path.exists():
        _write_json(path, about)
        return
    try:
        found = {**json.loads(path.read_text())}
    except (OSError, ValueError, TypeError):
        raise QualmsError(f"{path} cannot be read as a manifest; choose another folder.") from None
    found.pop("done", None)
    differ = [f"{k} {found.get(k)}, not {about.get(k)}" for k in {**found, **about} if found.get(k) != about.get(k)]
    if differ:
        raise QualmsError(
            f"{folder} holds shards that were made otherwise: {'; '.join(differ)}; score as they were, or choose "
            "another folder."
        )


def _shard(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}.parquet"


def _write(path: Path, table: Any) -> None:
    with _writable(path), written_whole(path) as part:
        _parquet().write_table(table, part)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    with _writable(path), written_whole(path) as part:
        part.write_text(json.dumps(content, indent=2) + "\n")


@contextmanager
def _writable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise QualmsError(
            f"{path} cannot be written ({error.strerror or error}); make room for it, and run the same again."
        ) from None


def _arrow() -> Any:
    return extra("pyarrow", "pyarrow", ".parquet files")


def _parquet() -> Any:
    return extra("pyarrow.parquet", "pyarrow", ".parquet files")
