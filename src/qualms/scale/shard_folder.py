"""A folder of scores: its manifest, which says what they were made with, its lock, and the files
that it holds.

    shard….parquet     the scores of some images
    rejected.parquet   all that could not be read, at the end
    manifest.json      what decides the scores and, at the end, how many there are

A file is written beside its place and moved there when it is whole, so what is there is right.
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
    """What the shards of a folder hold."""

    scored: int
    rejected: int
    accepted: int | None  # of those scored, if there is a threshold

    def require_counts(self) -> None:
        """A ValueError if these are not numbers that things have."""
        counts = [self.scored, self.rejected, *([] if self.accepted is None else [self.accepted])]
        if (
            not all(type(count) is int and count >= 0 for count in counts)
            or (self.accepted or 0) > self.scored
        ):
            raise ValueError("no counts")


def require_own(folder: Path) -> None:
    """An error if the folder holds something else than shards, or cannot be made."""
    with explain_write_failure(folder):
        folder.mkdir(parents=True, exist_ok=True)
        others = sorted(p.name for p in folder.iterdir() if not p.name.startswith("."))
    if others and not (folder / MANIFEST).exists():
        raise QualmsError(
            f"{folder} holds {others[0]} but no {MANIFEST}; choose an empty or new folder."
        )


@contextmanager
def begun(folder: Path, about: dict[str, Any]) -> Iterator[Done | None]:
    """The folder for one run alone, and what an earlier run of the same has done, if it came to its
    end.

    Args:
        folder: where the shards go.
        about: what decides the scores: a folder that was made with something else is refused.
    """
    with lock_file(folder / LOCK):
        done = _of_the_same(folder, about)
        for half in folder.glob(".*.part"):  # of a run that was killed
            half.unlink()
        yield done


def finish(
    folder: Path, about: dict[str, Any], shards: Iterable[Path], rejected: Iterable[Rejected]
) -> Done:
    """List what could not be read, and write into the manifest how many there are."""
    shards, accepted, listed = list(shards), None, list(rejected)
    for shard in shards:
        with explain_parquet_errors(shard), parquet().ParquetFile(shard) as file:
            if "accepted" in file.schema_arrow.names:
                accepted = (accepted or 0) + _count_true(shard, file.read(["accepted"]).column(0))
    write_rejected(folder / REJECTED, listed)
    done = Done(count_rows(shards), len(listed), accepted)
    _write_json(folder / MANIFEST, {**about, "done": asdict(done)})
    return done


def write_rejected(path: Path, rejected: Iterable[Rejected]) -> None:
    """What could not be read, and why."""
    listed = list(rejected)
    columns = {key: [getattr(one, key) for one in listed] for key in ("id", "reason")}
    write(
        path,
        arrow().table(
            {key: arrow().array(values, arrow().string()) for key, values in columns.items()}
        ),
    )


def shards_in(folder: Path) -> list[Path]:
    """All files of scores."""
    return sorted(folder.glob("shard*.parquet"))


def count_rows(shards: Iterable[Path]) -> int:
    """Of all of them together."""
    return sum(map(_rows, shards))


def column(shard: Path, name: str) -> Any:
    """One column of a file, as pyarrow has it; what is text in it is text."""
    with explain_parquet_errors(shard):
        found = parquet().read_table(shard, columns=[name]).column(name)
        found.validate(full=True)
        return found


def _rows(shard: Path) -> int:
    with explain_parquet_errors(shard):
        return parquet().read_metadata(shard).num_rows


def _count_true(shard: Path, decisions: Any) -> int:
    found = decisions.to_pylist()
    if not all(isinstance(one, bool) for one in found):
        raise QualmsError(
            f"the column accepted of {shard} is not all yes or no; remove the file, and score again."
        )
    return sum(found)


def write(path: Path, table: Any) -> None:
    """A table of pyarrow's as a .parquet file."""
    with explain_write_failure(path), atomic_write(path) as part:
        parquet().write_table(table, part)


def arrow() -> Any:
    """The package pyarrow."""
    return import_extra("pyarrow", "pyarrow", ".parquet files")


def parquet() -> Any:
    """Its part for .parquet files."""
    return import_extra("pyarrow.parquet", "pyarrow", ".parquet files")


def _of_the_same(folder: Path, about: dict[str, Any]) -> Done | None:
    """An error that says what differs if the folder's shards were made otherwise; a new folder is
    begun.
    """
    path, about = folder / MANIFEST, json.loads(json.dumps(about))
    require_own(folder)
    if not path.exists() or not any(
        folder.glob("**/shard*.parquet")
    ):  # also those that Ray has written so far
        _write_json(path, about)
        return None
    try:
        found = {**json.loads(path.read_text())}
        done = None if found.get("done") is None else Done(**found.pop("done"))
        if done is not None:
            done.require_counts()
    except (OSError, ValueError, TypeError, RecursionError):
        raise QualmsError(f"{path} cannot be read as a manifest; choose another folder.") from None
    differ = [
        f"{k} {found.get(k)}, not {about.get(k)}"
        for k in {**found, **about}
        if found.get(k) != about.get(k)
    ]
    if differ:
        raise QualmsError(
            f"{folder} holds shards made with other settings: {'; '.join(differ)}; use those settings, or choose "
            "another folder."
        )
    return done


def _write_json(path: Path, content: dict[str, Any]) -> None:
    with explain_write_failure(path), atomic_write(path) as part:
        part.write_text(json.dumps(content, indent=2) + "\n")
