"""The same scores by workers of a Ray cluster: Ray Data reads, schedules, retries and writes,
qualms scores batches.

What is there of a run that was killed is kept: Ray notes which images are in a file, and passes
over them. Files get their place when all are there. Rows come in any order.
"""

import logging
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qualms.data import Rejected
from qualms.data.decode import Unreadable
from qualms.data.parquet import explain_parquet_errors
from qualms.data.places import import_extra
from qualms.errors import QualmsError, reason
from qualms.scale.batch import BatchScorer, Columns, rejected_in
from qualms.scale.shard_folder import Done, arrow, begun, column, count_rows, finish, shards_in
from qualms.stream.sizes import BATCH
from qualms.stream.source import Source, Split

if TYPE_CHECKING:
    from ray.data import ReadTask

WRITING = ".writing"  # where Ray's files are until all are whole
NOTED = ".noted"  # where Ray notes which images are done
REJECTED = ".rejected"  # where workers list what cannot be read
# cores that Ray needs beside those of workers: to read, to pass over what is done, and to write
RAYS_OWN = 3
LOCAL = "local"  # Ray's word for a cluster on this machine, for this run alone


def score_on_ray(
    scorer: BatchScorer,
    source: Source,
    folder: Path,
    about: dict[str, Any],
    size: int,
    workers: int | None = None,
    address: str | None = None,
) -> Done:
    """Score all images that are in no file of the folder yet.

    Args:
        scorer: scores some images; each worker has it.
        source: all images, in files that every worker can read.
        folder: where the scores go; every worker can write there.
        about: what decides the scores, beside the images: a folder that was made with something
            else is refused.
        size: rows of a file, at least, but for the last.
        workers: processes that score; by default one for each core, three fewer on a cluster, and
            never more.
        address: of the cluster, as for `ray.init`; by default one is started on this machine, and
            stopped.
    """
    if source.splits is None:
        raise QualmsError(
            f"Ray cannot read {source.name}; name a folder, .parquet files or .tar files."
        )
    whole = {**about, "inputs": source.fingerprint, "shard_size": size, "runner": "ray"}
    folder = folder.absolute()  # workers have a working folder of their own
    with begun(folder, whole) as before:
        if before is None:
            shutil.rmtree(
                folder / REJECTED, ignore_errors=True
            )  # none of these is noted: all are tried again
            with cluster(address, workers) as ray:
                cores = int(ray.cluster_resources().get("CPU", 1))
                if cores <= RAYS_OWN:
                    raise QualmsError(
                        f"the cluster has {cores} cores, and Ray itself needs {RAYS_OWN}; use at least {RAYS_OWN + 1}."
                    )
                _run(
                    ray,
                    scorer,
                    source.splits(),
                    folder,
                    size,
                    min(workers or cores, cores - RAYS_OWN),
                )
            for shard in shards_in(folder / WRITING):
                shard.rename(folder / shard.name)
            rejected = not_scored(rejected_in(folder / REJECTED), folder)
            _require_all(count_rows(shards_in(folder)), len(rejected), source)
            require_once(folder)
            before = finish(folder, whole, shards_in(folder), rejected)
        elif count_rows(shards_in(folder)) != before.scored:
            raise QualmsError(
                f"{folder} lacks some of its {before.scored} rows; remove it, and score again."
            )
        for rest in (WRITING, NOTED, REJECTED):
            shutil.rmtree(folder / rest, ignore_errors=True)
    return before


def not_scored(rejected: list[Rejected], folder: Path) -> list[Rejected]:
    """Without those that another attempt could read."""
    left = {one.id: one for one in rejected}
    for shard in shards_in(folder):
        for name in column(shard, "id").to_pylist():
            left.pop(name, None)
    return list(left.values())


def _require_all(scored: int, rejected: int, source: Source) -> None:
    if scored == 0:
        raise QualmsError(
            f"no worker can read an image of {source.name}; check that they are still there."
        )
    if source.count not in (None, scored + rejected):
        raise QualmsError(
            f"{source.name} has {source.count} images, and {scored} were scored and {rejected} could not be read; they "
            "may have changed: remove the folder, and score again."
        )


def require_once(folder: Path) -> None:
    """An error if an image has two rows; in a count of all, it could stand for one that is lost."""
    tables = [arrow().table({"id": column(shard, "id")}) for shard in shards_in(folder)]
    with explain_parquet_errors(folder):
        ids = arrow().concat_tables(tables, promote_options="permissive").column(0)
        doubled = len(ids) - len(ids.unique())
    if doubled:
        raise QualmsError(
            f"{folder} has {doubled} rows too many, of images scored twice; remove it, and score again."
        )


@contextmanager
def cluster(address: str | None, workers: int | None) -> Iterator[Any]:
    """Ray, connected to a cluster."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # it would tell its makers
    os.environ.setdefault(
        "RAY_BACKEND_LOG_LEVEL", "fatal"
    )  # what goes wrong is raised here, and is in Ray's own files
    ray = import_extra("ray", "ray", "a cluster", "ray")
    import_extra("ray.data", "ray[data]", "a cluster", "ray")
    if ray.is_initialized():
        yield ray
        return
    cores = (workers or os.cpu_count() or 1) + RAYS_OWN
    own = {} if address else {"num_cpus": cores, "include_dashboard": False}
    try:
        ray.init(address or LOCAL, log_to_driver=False, logging_level=logging.ERROR, **own)
    except Exception as error:  # whatever comes up
        raise QualmsError(
            f"Ray cannot {f'reach a cluster at {address}' if address else 'start'} ({reason(error)}); check the "
            "address, or try again when the machine is less busy."
        ) from None
    try:
        yield ray
    finally:
        ray.shutdown()


class Worker:
    """What each process that scores is made of: the scorer, from the store that all of them share."""

    def __init__(self, stored: list[Any]) -> None:
        ray = import_extra("ray", "ray", "a cluster", "ray")
        self.scorer: BatchScorer = ray.get(stored[0])

    def __call__(self, batch: Columns) -> Columns:
        """One batch."""
        return self.scorer(batch)


def _run(
    ray: Any, scorer: BatchScorer, splits: list[Split], folder: Path, size: int, workers: int
) -> None:
    from ray.data import ActorPoolStrategy, DataContext
    from ray.data.checkpoint import CheckpointConfig
    from ray.data.datasource import FilenameProvider

    logging.getLogger("ray.data").setLevel(logging.ERROR)
    context = DataContext.get_current()
    before = context.checkpoint_config, context.enable_progress_bars
    context.checkpoint_config = CheckpointConfig(
        "id", str(folder / NOTED), delete_checkpoint_on_success=False
    )
    context.enable_progress_bars = sys.stderr.isatty()
    on_gpu = next(scorer.network.model.parameters()).device.type == "cuda"
    try:
        stored = ray.put(replace(scorer, rejected=folder / REJECTED))
        ray.data.read_datasource(_files(splits), override_num_blocks=len(splits)).map_batches(
            Worker,
            batch_size=BATCH,
            compute=ActorPoolStrategy(min_size=1, max_size=workers),
            fn_constructor_args=(
                [stored],
            ),  # in a list, so that each worker fetches it from the store itself
            num_cpus=1,
            num_gpus=1 if on_gpu else 0,
        ).write_parquet(
            str(folder / WRITING),
            filename_provider=FilenameProvider("shard", "parquet"),
            min_rows_per_file=size,
        )
    except Exception as error:
        raise _told(error) from None
    finally:
        context.checkpoint_config, context.enable_progress_bars = before


def _files(splits: list[Split]) -> Any:
    """A source of Ray's: a task for each split."""
    from ray.data import Datasource, ReadTask
    from ray.data.block import BlockMetadata

    class Files(Datasource):
        def get_read_tasks(self, parallelism: int, *_: Any, **__: Any) -> "list[ReadTask]":
            unknown = BlockMetadata(
                num_rows=None, size_bytes=None, input_files=None, exec_stats=None
            )
            return [ReadTask(partial(_blocks, split), unknown) for split in splits]

        def estimate_inmemory_data_size(self) -> int | None:
            return None

    return Files()  # type: ignore[no-untyped-call]


def _blocks(split: Split) -> Iterable[Any]:
    """The images of a split, some in each table."""
    rows: list[dict[str, Any]] = []
    for file in split():
        rows.append(_row(file))
        if len(rows) == BATCH:
            yield _table(rows)
            rows = []
    if rows:
        yield _table(rows)


def _row(file: Any) -> dict[str, Any]:
    try:
        return {"id": file.id, "content": file.content(), "reason": ""}
    except Unreadable as error:
        return {"id": file.id, "content": None, "reason": error.reason}


def _table(rows: list[dict[str, Any]]) -> Any:
    kinds = {"id": arrow().string(), "content": arrow().large_binary(), "reason": arrow().string()}
    return arrow().table(
        {key: arrow().array([row[key] for row in rows], kind) for key, kind in kinds.items()}
    )


def _told(error: Exception) -> QualmsError:
    """The error of a worker; one of ours in its own words, which Ray hands on as the text of a
    trace.
    """
    ours = re.findall(r"^qualms\.[\w.]+: (.+)$", str(error), re.MULTILINE)
    if ours:
        return QualmsError(ours[-1])
    return QualmsError(
        f"Ray could not finish ({reason(error)}); run the same command again to resume."
    )
