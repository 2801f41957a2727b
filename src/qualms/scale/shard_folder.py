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
    """How many images of a completed folder are scored, rejected and accepted.

    Args:
        scored: The number of images with scores.
        rejected: The number of images that could not be read.
        accepted: The number of images that the threshold accepts; None without a threshold.
    """

    scored: int
    rejected: int
    accepted: int | None

    def require_counts(self) -> None:
        """Raise a ValueError if the numbers, as read from a file, cannot be counts of images."""
        accepted = 0 if self.accepted is None else self.accepted
        for count in (self.scored, self.rejected, accepted):
            # Not isinstance: True would count as an int.
            if type(count) is not int or count < 0:
                raise ValueError("not a count")
        if accepted > self.scored:
            raise ValueError("more images accepted than scored")


def require_shard_folder(folder: Path) -> None:
    """Create a folder for shards; raise an error if it holds other files.

    Args:
        folder: The path of the folder; its parents are created, too. If it exists, it must be empty
            or hold a manifest. Hidden files are ignored.
    """
    with explain_write_failure(folder):
        folder.mkdir(parents=True, exist_ok=True)
        names = sorted(path.name for path in folder.iterdir())
    visible_names = [name for name in names if not name.startswith(".")]
    if visible_names and not (folder / MANIFEST).exists():
        raise QualmsError(
            f"{folder} holds {visible_names[0]} but no {MANIFEST}; choose an empty or new folder."
        )


@contextmanager
def open_shard_folder(folder: Path, about: dict[str, Any]) -> Iterator[Done | None]:
    """Lock a folder of shards for one run, and create it if needed.

    Args:
        folder: The path of the folder.
        about: The settings that decide the scores. A folder whose shards were written with other
            settings is refused.

    Yields:
        The counts of images, if an earlier run with the same settings was completed; else None.
    """
    with lock_file(folder / LOCK):
        done = _read_manifest(folder, about)
        # Temporary files of `atomic_write`, which a killed run did not complete.
        for part in folder.glob(".*.part"):
            part.unlink()
        yield done


def finish(
    folder: Path,
    about: dict[str, Any],
    shards: Iterable[Path],
    rejected: Iterable[Rejected],
) -> Done:
    """Complete a folder: write the list of rejected images, and the manifest with all counts.

    Args:
        folder: The folder of the shards.
        about: The settings that decide the scores.
        shards: The paths of all shards.
        rejected: The images that could not be read.

    Returns:
        The counts that are written to the manifest.
    """
    shards, rejected = list(shards), list(rejected)
    accepted = None  # without a threshold there is no such column
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
    """Return the total number of rows of some .parquet files."""
    num_rows = 0
    for shard in shards:
        with explain_parquet_errors(shard):
            num_rows += parquet().read_metadata(shard).num_rows
    return num_rows


def column(shard: Path, name: str) -> Any:
    """Read one column of a .parquet file as a pyarrow array; raise an error if it is damaged.

    Args:
        shard: The path of the file.
        name: The name of the column.
    """
    with explain_parquet_errors(shard):
        values = parquet().read_table(shard, columns=[name]).column(name)
        # In full: the values are checked, too, such as that strings are valid UTF-8.
        values.validate(full=True)
        return values


def _count_true(shard: Path, decisions: Any) -> int:
    """Count the true values of a shard's column `accepted`.

    Args:
        shard: The path of the shard, for the error.
        decisions: The column, a pyarrow array.

    Raises:
        QualmsError: If a value is neither true nor false.
    """
    values = decisions.to_pylist()
    if not all(isinstance(value, bool) for value in values):
        raise QualmsError(
            f"the column `accepted` of {shard} has values other than true and false; remove the "
            "file, and score again."
        )
    return sum(values)


def write(path: Path, table: Any) -> None:
    """Write a pyarrow.Table to a .parquet file, completely or not at all."""
    with explain_write_failure(path), atomic_write(path) as part:
        parquet().write_table(table, part)


def arrow() -> Any:
    """Import pyarrow, or raise an error that says how to install it."""
    return import_extra("pyarrow", "pyarrow", ".parquet files")


def parquet() -> Any:
    """Import pyarrow.parquet, or raise an error that says how to install it."""
    return import_extra("pyarrow.parquet", "pyarrow", ".parquet files")


def _read_manifest(folder: Path, about: dict[str, Any]) -> Done | None:
    """Read the manifest of a folder, or begin a new one if there are no shards yet.

    Args:
        folder: The folder of the shards, which is created if needed.
        about: The settings that decide the scores.

    Returns:
        The counts of a completed folder; None if it is not completed.

    Raises:
        QualmsError: If the shards were written with other settings, which the error names; or if
            the manifest is damaged.
    """
    path = folder / MANIFEST
    # Converted as by writing and reading, for example tuples to lists, to compare them below.
    about = json.loads(json.dumps(about))
    require_shard_folder(folder)
    # `**` includes the shards in subfolders, which Ray has written so far.
    has_shards = any(folder.glob("**/shard*.parquet"))
    if not path.exists() or not has_shards:
        _write_json(path, about)
        return None
    try:
        # Raises a TypeError if the JSON is not an object.
        manifest = {**json.loads(path.read_text())}
        done = None
        if manifest.get("done") is not None:
            # Taken out, so that only settings are left to compare.
            done = Done(**manifest.pop("done"))
            done.require_counts()
    except (OSError, ValueError, TypeError, RecursionError):
        raise QualmsError(f"{path} cannot be read as a manifest; choose another folder.") from None
    differences = []
    for key in {**manifest, **about}:
        if manifest.get(key) != about.get(key):
            differences.append(f"{key} {manifest.get(key)}, not {about.get(key)}")
    if differences:
        raise QualmsError(
            f"{folder} holds shards made with other settings: {'; '.join(differences)}; use those "
            "settings, or choose another folder."
        )
    return done


def _write_json(path: Path, content: dict[str, Any]) -> None:
    """Write an indented JSON file, completely or not at all."""
    with explain_write_failure(path), atomic_write(path) as part:
        part.write_text(json.dumps(content, indent=2) + "\n")
