"""Shards written by the workers of a Ray cluster: Ray Data reads, schedules, retries and writes.

Ray records which images are in a file, and the run after one that was killed skips them. The files
move to their places once all are complete. Rows are in no particular order.
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
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qualms.data import Rejected
from qualms.data.decode import Unreadable
from qualms.data.parquet import explain_parquet_errors
from qualms.data.places import import_extra
from qualms.data.reading import File
from qualms.errors import QualmsError, explain_failure, reason
from qualms.scale.batch import BatchScorer, Columns, rejected_in
from qualms.scale.shard_folder import (
    Done,
    arrow,
    column,
    count_rows,
    finish,
    open_shard_folder,
    shards_in,
)
from qualms.stream.sizes import BATCH
from qualms.stream.source import Source, Split

if TYPE_CHECKING:
    from ray.data import ReadTask

# The subfolder of Ray's files until all are complete.
WRITING = ".writing"
NOTED = ".noted"  # where Ray records which images are done
# Where workers list the images that cannot be read.
REJECTED = ".rejected"
# Cores that Ray needs to read, to skip what is done, and to write.
RESERVED_CORES = 3
# The address of a cluster on this machine, for this run alone.
LOCAL = "local"


def score_on_ray(
    scorer: BatchScorer,
    source: Source,
    folder: Path,
    about: dict[str, Any],
    size: int,
    workers: int | None = None,
    address: str | None = None,
) -> Done:
    """Score all images that the folder has no scores of yet, on a Ray cluster.

    Args:
        scorer: Scores a batch; each worker has it.
        source: The source of all images, in files that every worker can read.
        folder: Where the scores go; every worker can write there.
        about: The settings that decide the scores, beside the images. A folder whose files were
            made with other settings is refused.
        size: The least number of rows in a file, except for the last file.
        workers: The number of processes that score; by default one for each core, three fewer on a
            cluster.
        address: The address of the cluster, as for `ray.init`; by default a cluster is started on
            this machine, and stopped at the end.

    Returns:
        What the folder holds in the end.
    """
    if source.splits is None:
        raise QualmsError(
            f"Ray cannot read {source.name}; name a folder, .parquet files or .tar files."
        )
    about = {
        **about,
        "inputs": source.fingerprint,
        "shard_size": size,
        "runner": "ray",
    }
    # Workers have a working directory of their own.
    folder = folder.absolute()
    with open_shard_folder(folder, about) as earlier:
        done = earlier
        if done is None:
            # Ray does not record these, so all are tried again.
            shutil.rmtree(folder / REJECTED, ignore_errors=True)
            with cluster(address, workers) as ray:
                count = _count_workers(ray, workers)
                _run(ray, scorer, source.splits(), folder, size, count)
            done = _collect(folder, about, source)
        elif count_rows(shards_in(folder)) != done.scored:
            raise QualmsError(
                f"{folder} is missing some of its {done.scored} rows; remove it, and score again."
            )
        for rest in (WRITING, NOTED, REJECTED):
            shutil.rmtree(folder / rest, ignore_errors=True)
    return done


def _count_workers(ray: Any, wanted: int | None) -> int:
    """Return how many workers the cluster has cores for, at most `wanted`.

    Args:
        ray: The package ray, connected to a cluster.
        wanted: The largest number of workers; None for one per free core.
    """
    cores = int(ray.cluster_resources().get("CPU", 1))
    if cores <= RESERVED_CORES:
        raise QualmsError(
            f"the cluster has {cores} cores, but Ray itself needs {RESERVED_CORES}; use at least "
            f"{RESERVED_CORES + 1}."
        )
    return min(wanted or cores, cores - RESERVED_CORES)


def _collect(folder: Path, about: dict[str, Any], source: Source) -> Done:
    """Move Ray's files to their places once Ray has written all of them, and write the manifest.

    Args:
        folder: The folder of the run.
        about: The settings that go into the manifest.
        source: The source, all of whose images must be scored or rejected.

    Returns:
        What the folder holds now.
    """
    for shard in shards_in(folder / WRITING):
        shard.rename(folder / shard.name)
    shards = shards_in(folder)
    rejected = rejected_in(folder / REJECTED)
    rejected = filter_rejections(rejected, folder)
    _require_all(count_rows(shards), len(rejected), source)
    require_once(folder)
    return finish(folder, about, shards, rejected)


def filter_rejections(rejected: list[Rejected], folder: Path) -> list[Rejected]:
    """Remove the images that another attempt could read from the list of rejected images.

    Args:
        rejected: The images that some attempt could not read.
        folder: The folder of the run, whose files hold the scores.
    """
    unreadable = {image.id: image for image in rejected}
    for shard in shards_in(folder):
        for name in column(shard, "id").to_pylist():
            unreadable.pop(name, None)
    return list(unreadable.values())


def _require_all(scored: int, rejected: int, source: Source) -> None:
    """Raise an error if images of the source are missing.

    Args:
        scored: The number of images with scores.
        rejected: The number of images that could not be read.
        source: The source of all images.
    """
    if scored == 0:
        raise QualmsError(
            f"no worker can read any image of {source.name}; check that every machine has the "
            "images."
        )
    if source.count not in (None, scored + rejected):
        raise QualmsError(
            f"{source.name} has {source.count} images, but {scored} were scored and {rejected} "
            "could not be read; if the images have changed, remove the folder, and score again."
        )


def require_once(folder: Path) -> None:
    """Raise an error if an image has two rows, which could hide that another has none.

    Args:
        folder: The folder of the run.
    """
    tables = []
    for shard in shards_in(folder):
        ids = column(shard, "id")
        tables.append(arrow().table({"id": ids}))
    with explain_parquet_errors(folder):
        table = arrow().concat_tables(tables, promote_options="permissive")
        ids = table.column(0)
        doubled = len(ids) - len(ids.unique())
    if doubled:
        raise QualmsError(
            f"{folder} has {doubled} rows of images that were scored twice; remove it, and score "
            "again."
        )


@contextmanager
def cluster(address: str | None, workers: int | None) -> Iterator[Any]:
    """Connect to a Ray cluster, and disconnect at the end; yields the package ray.

    Args:
        address: The address of the cluster; None starts a cluster on this machine.
        workers: The number of workers for which a started cluster has cores.
    """
    # Sends nothing over the network.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Errors are raised here, and are in Ray's log files.
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    ray = import_extra("ray", "ray", "a cluster", "ray")
    import_extra("ray.data", "ray[data]", "a cluster", "ray")
    if ray.is_initialized():
        yield ray  # the caller's connection, which stays open
        return
    _start(ray, address, workers)
    try:
        yield ray
    finally:
        ray.shutdown()


def _start(ray: Any, address: str | None, workers: int | None) -> None:
    """Connect to a cluster, or start one.

    Args:
        ray: The package ray.
        address: The address of the cluster; None starts a cluster on this machine.
        workers: The number of workers for which a started cluster has cores.
    """
    what = f"reach a cluster at {address}" if address else "start"

    def explain(error: Exception) -> QualmsError:
        """Create the error that Ray cannot be reached or started, with the reason."""
        return QualmsError(
            f"Ray cannot {what} ({reason(error)}); check the address, or try again when the "
            "machine is less busy."
        )

    cores = (workers or os.cpu_count() or 1) + RESERVED_CORES
    options = {} if address else {"num_cpus": cores, "include_dashboard": False}
    with explain_failure(explain):
        ray.init(address or LOCAL, log_to_driver=False, logging_level=logging.ERROR, **options)


class Worker:
    """A process that scores, with the scorer from Ray's object store.

    Args:
        stored: A list with the scorer's reference; a bare reference would be resolved by Ray before
            the call.
    """

    def __init__(self, stored: list[Any]) -> None:
        ray = import_extra("ray", "ray", "a cluster", "ray")
        self.scorer: BatchScorer = ray.get(stored[0])

    def __call__(self, batch: Columns) -> Columns:
        """Score one batch, as `BatchScorer` does."""
        return self.scorer(batch)


def _run(
    ray: Any,
    scorer: BatchScorer,
    splits: list[Split],
    folder: Path,
    size: int,
    workers: int,
) -> None:
    """Read, score and write all images.

    Args:
        ray: The package ray, connected to a cluster.
        scorer: The scorer that each worker gets.
        splits: The splits of the source; Ray reads each split in a task.
        folder: The folder of the run.
        size: The least number of rows in a file.
        workers: The largest number of processes that score.
    """
    from ray.data import ActorPoolStrategy, DataContext
    from ray.data.checkpoint import CheckpointConfig
    from ray.data.datasource import FilenameProvider

    logging.getLogger("ray.data").setLevel(logging.ERROR)
    context = DataContext.get_current()
    before = context.checkpoint_config, context.enable_progress_bars
    context.checkpoint_config = CheckpointConfig(
        "id",
        str(folder / NOTED),
        delete_checkpoint_on_success=False,
    )
    context.enable_progress_bars = sys.stderr.isatty()
    weight = next(scorer.network.model.parameters())
    on_gpu = weight.device.type == "cuda"
    try:
        with explain_failure(_explain_worker_error), _explain_worker_errors(ray):
            stored = ray.put(replace(scorer, rejected=folder / REJECTED))
            images = ray.data.read_datasource(
                _datasource(splits),
                override_num_blocks=len(splits),
            )
            scores = images.map_batches(
                Worker,
                batch_size=BATCH,
                compute=ActorPoolStrategy(min_size=1, max_size=workers),
                fn_constructor_args=([stored],),
                num_cpus=1,
                num_gpus=1 if on_gpu else 0,
            )
            scores.write_parquet(
                str(folder / WRITING),
                filename_provider=FilenameProvider("shard", "parquet"),
                min_rows_per_file=size,
            )
    finally:
        context.checkpoint_config, context.enable_progress_bars = before


@contextmanager
def _explain_worker_errors(ray: Any) -> Iterator[None]:
    """Explain errors of workers, even if Ray raises them as subclasses of `QualmsError`.

    `explain_failure` would let such a subclass through, with the worker's traceback in its text.

    Args:
        ray: The package ray.
    """
    try:
        yield
    except ray.exceptions.RayError as error:
        raise _explain_worker_error(error) from None


def _explain_worker_error(error: Exception) -> QualmsError:
    """Extract a worker's `QualmsError` from the traceback text in which Ray reports it."""
    qualms_messages = re.findall(r"^qualms\.[\w.]+: (.+)$", str(error), re.MULTILINE)
    if qualms_messages:
        return QualmsError(qualms_messages[-1])
    return QualmsError(
        f"Ray could not finish ({reason(error)}); run the same command again to resume."
    )


def _datasource(splits: list[Split]) -> Any:
    """Build a Ray datasource that reads each split in a task.

    Ray is imported here, as it is an optional package.
    """
    from ray.data import Datasource, ReadTask
    from ray.data.block import BlockMetadata

    class Files(Datasource):
        """The splits of a source, in the form that Ray asks for."""

        def get_read_tasks(self, parallelism: int, *_: Any, **__: Any) -> "list[ReadTask]":
            """Return a task for each split, whatever parallelism Ray wants."""
            unknown = BlockMetadata(
                num_rows=None,
                size_bytes=None,
                input_files=None,
                exec_stats=None,
            )
            return [ReadTask(partial(_blocks, split), unknown) for split in splits]

        def estimate_inmemory_data_size(self) -> int | None:
            """Return None: the size is unknown until the files are read."""
            return None

    return Files()  # type: ignore[no-untyped-call]


def _blocks(split: Split) -> Iterable[Any]:
    """Read the files of a split; yield tables of `BATCH` rows, the last one of fewer."""
    files = iter(split())
    while rows := [_row(file) for file in islice(files, BATCH)]:
        yield _table(rows)


def _row(file: File) -> dict[str, Any]:
    """Read one file into a row with the columns that a `BatchScorer` takes."""
    try:
        return {"id": file.id, "content": file.content(), "reason": ""}
    except Unreadable as error:
        return {"id": file.id, "content": None, "reason": error.reason}


def _table(rows: list[dict[str, Any]]) -> Any:
    """Convert rows of `_row` to a pyarrow.Table."""
    kinds = {"id": arrow().string(), "content": arrow().large_binary(), "reason": arrow().string()}
    columns = {}
    for name, kind in kinds.items():
        values = [row[name] for row in rows]
        columns[name] = arrow().array(values, kind)
    return arrow().table(columns)
