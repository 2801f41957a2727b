"""A folder of scores: its lock, its manifest, and the files that it holds.

    shard….parquet     the scores of some images
    rejected.parquet   all images that could not be read, written at the end
    manifest.json      what decides the scores and, at the end, how many there are

Each file is written completely or not at all (`atomic_write`).
"""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qualms.data import Rejected
from qualms.data.parquet import explain_parquet_errors
from qualms.data.places import import_extra
from qualms.disk import atomic_write, explain_write_failure, lock_file
from qualms.errors import QualmsError

MANIFEST, REJECTED, LOCK = "manifest.json", "rejected.parquet", ".lock"


@dataclass(frozen=True)
class Done:
    """What the shards of a folder hold.

    Args:
        scored: The number of images with scores.
        rejected: The number of images that could not be read.
        accepted: The number of images that the threshold accepts; None without a threshold.
    """

    scored: int
    rejected: int
    accepted: int | None

    def require_counts(self) -> None:
        """Raise a ValueError if these cannot be counts of images."""
        accepted = 0 if self.accepted is None else self.accepted
        for count in (self.scored, self.rejected, accepted):
            if type(count) is not int or count < 0:
                raise ValueError("not a count")
        if accepted > self.scored:
            raise ValueError("more images accepted than scored")


def require_shard_folder(folder: Path) -> None:
    """Create the folder; raise an error if it holds files but no manifest.

    Args:
        folder: Where shards go; its parents are created, too.
    """
    with explain_write_failure(folder):
        folder.mkdir(parents=True, exist_ok=True)
        names = sorted(path.name for path in folder.iterdir())
    others = [name for name in names if not name.startswith(".")]
    if others and not (folder / MANIFEST).exists():
        raise QualmsError(
            f"{folder} holds {others[0]} but no {MANIFEST}; choose an empty or new folder."
        )


@contextmanager
def open_shard_folder(folder: Path, about: dict[str, Any]) -> Iterator[Done | None]:
    """Lock the folder for one run.

    Args:
        folder: Where the shards go.
        about: The settings that decide the scores. A folder whose shards were made with other
            settings is refused.

    Yields:
        What the folder holds, if an earlier run with the same settings was completed; else None.
    """
    with lock_file(folder / LOCK):
        done = _read_manifest(folder, about)
        # A file that a killed run did not complete.
        for half in folder.glob(".*.part"):
            half.unlink()
        yield done


def finish(
    folder: Path,
    about: dict[str, Any],
    shards: Iterable[Path],
    rejected: Iterable[Rejected],
) -> Done:
    """Write the list of rejected images, and the counts into the manifest.

    Args:
        folder: The folder of the shards.
        about: The settings that decide the scores.
        shards: The paths of all shards.
        rejected: The images that could not be read.

    Returns:
        The counts.
    """
    shards, rejected = list(shards), list(rejected)
    accepted = None
    for shard in shards:
        with explain_parquet_errors(shard), parquet().ParquetFile(shard) as file:
            if "accepted" in file.schema_arrow.names:
                decisions = file.read(["accepted"]).column(0)
                accepted = (accepted or 0) + _count_true(shard, decisions)
    write_rejections(folder / REJECTED, rejected)
    done = Done(count_rows(shards), len(rejected), accepted)
    _write_json(folder / MANIFEST, {**about, "done": asdict(done)})
    return done


def write_rejections(path: Path, rejected: Iterable[Rejected]) -> None:
    """Write the images that could not be read, with reasons, as a .parquet file.

    Args:
        path: The file, with the columns `id` and `reason`.
        rejected: The images.
    """
    rejected = list(rejected)
    columns = {}
    for key in ("id", "reason"):
        values = [getattr(image, key) for image in rejected]
        columns[key] = arrow().array(values, arrow().string())
    write(path, arrow().table(columns))


def shards_in(folder: Path) -> list[Path]:
    """Return the paths of all shards in a folder, sorted."""
    return sorted(folder.glob("shard*.parquet"))


def count_rows(shards: Iterable[Path]) -> int:
    """Return the number of rows in some files together."""
    rows = 0
    for shard in shards:
        with explain_parquet_errors(shard):
            rows += parquet().read_metadata(shard).num_rows
    return rows


def column(shard: Path, name: str) -> Any:
    """Read one column of a .parquet file as pyarrow's array, after checking that it is valid.

    Args:
        shard: The path of the file.
        name: The name of the column.
    """
    with explain_parquet_errors(shard):
        values = parquet().read_table(shard, columns=[name]).column(name)
        values.validate(full=True)  # text must be valid UTF-8, too
        return values


def _count_true(shard: Path, decisions: Any) -> int:
    """Count the true values of the column `accepted`, all of which must be true or false.

    Args:
        shard: The path of the file, for the error.
        decisions: The column, a pyarrow array.
    """
    values = decisions.to_pylist()
    if not all(isinstance(value, bool) for value in values):
        raise QualmsError(
            f"the column `accepted` of {shard} has values other than true and false; remove the "
            "file, and score again."
        )
    return sum(values)


def write(path: Path, table: Any) -> None:
    """Write a pyarrow.Table as a .parquet file, completely or not at all."""
    with explain_write_failure(path), atomic_write(path) as part:
        parquet().write_table(table, part)


def arrow() -> Any:
    """Import pyarrow, or raise an error that says how to install it."""
    return import_extra("pyarrow", "pyarrow", ".parquet files")


def parquet() -> Any:
    """Import pyarrow.parquet, or raise an error that says how to install it."""
    return import_extra("pyarrow.parquet", "pyarrow", ".parquet files")


def _read_manifest(folder: Path, about: dict[str, Any]) -> Done | None:
    """Read the manifest: return what a complete folder holds, None for an incomplete one.

    A folder without shards is created if needed, and gets a manifest without counts.

    Args:
        folder: The folder of the shards.
        about: The settings that decide the scores.

    Raises:
        QualmsError: If the shards were made with other settings, which the error names; or if the
            manifest is damaged.
    """
    # The settings as they would be read again, for example with lists in place of tuples.
    path, about = folder / MANIFEST, json.loads(json.dumps(about))
    require_shard_folder(folder)
    # Also counts the shards in subfolders, which Ray has written so far.
    has_shards = any(folder.glob("**/shard*.parquet"))
    if not path.exists() or not has_shards:
        _write_json(path, about)
        return None
    try:
        manifest = {**json.loads(path.read_text())}
        done = None if manifest.get("done") is None else Done(**manifest.pop("done"))
        if done is not None:
            done.require_counts()
    except (OSError, ValueError, TypeError, RecursionError):
        raise QualmsError(f"{path} cannot be read as a manifest; choose another folder.") from None
    differ = []
    for key in {**manifest, **about}:
        if manifest.get(key) != about.get(key):
            differ.append(f"{key} {manifest.get(key)}, not {about.get(key)}")
    if differ:
        raise QualmsError(
            f"{folder} holds shards made with other settings: {'; '.join(differ)}; use those "
            "settings, or choose another folder."
        )
    return done


def _write_json(path: Path, content: dict[str, Any]) -> None:
    """Write an indented JSON file, completely or not at all."""
    with explain_write_failure(path), atomic_write(path) as part:
        part.write_text(json.dumps(content, indent=2) + "\n")
