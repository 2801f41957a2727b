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

# The subfolder that Ray writes files of scores to, until all files are complete.
WRITING = ".writing"
# The subfolder in which Ray records the ids of the images whose scores are written.
CHECKPOINT = ".noted"
# The subfolder in which workers list the images that cannot be read.
REJECTED = ".rejected"
# Cores that Ray needs to read, to skip images that are done, and to write.
RESERVED_CORES = 3
# The address that makes `ray.init` start a cluster on this machine, for this run alone.
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
        scorer: Scores a batch of images; each worker gets a copy.
        source: The source of all images, in files that every worker can read.
        folder: The folder for the scores, to which every worker can write.
        about: The settings that decide the scores, besides the images. A folder whose files were
            written with other settings is refused.
        size: The least number of rows in a file, except for the last file.
        workers: The number of processes that score; by default one for each core of this machine,
            or of the cluster but for three, which Ray itself needs.
        address: The address of the cluster, as for `ray.init`; by default a cluster is started on
            this machine, and stopped at the end.

    Returns:
        How many images of the folder are scored, rejected and accepted.
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
    # Absolute, since each worker has a working directory of its own.
    folder = folder.absolute()
    with open_shard_folder(folder, about) as completed:
        done = completed
        if done is None:  # no earlier run was completed
            # From a run that was stopped. Only images with scores are skipped by this run, so those
            # that could not be read are tried, and listed, again.
            shutil.rmtree(folder / REJECTED, ignore_errors=True)
            with cluster(address, workers) as ray:
                num_workers = _count_workers(ray, workers)
                _run(ray, scorer, source.splits(), folder, size, num_workers)
            done = _collect(folder, about, source)
        elif count_rows(shards_in(folder)) != done.scored:
            raise QualmsError(
                f"{folder} is missing some of its {done.scored} rows; remove it, and score again."
            )
        # Needed only to resume a run.
        for subfolder in (WRITING, CHECKPOINT, REJECTED):
            shutil.rmtree(folder / subfolder, ignore_errors=True)
    return done


def _count_workers(ray: Any, wanted: int | None) -> int:
    """Return how many workers to start: as many as asked for, if the cluster has enough cores.

    Args:
        ray: The package ray, connected to a cluster.
        wanted: The number of workers that the user asked for; None for one per free core.
    """
    cores = int(ray.cluster_resources().get("CPU", 1))
    if cores <= RESERVED_CORES:
        raise QualmsError(
            f"the cluster has {cores} cores, but Ray itself needs {RESERVED_CORES}; use at least "
            f"{RESERVED_CORES + 1}."
        )
    return min(wanted or cores, cores - RESERVED_CORES)


def _collect(folder: Path, about: dict[str, Any], source: Source) -> Done:
    """Move Ray's files to the folder, check that no image is missing, and write the manifest.

    Args:
        folder: The folder of the run.
        about: The settings that go into the manifest.
        source: The source, all of whose images must be scored or rejected.

    Returns:
        How many images of the folder are scored, rejected and accepted.
    """
    for shard in shards_in(folder / WRITING):
        shard.rename(folder / shard.name)
    shards = shards_in(folder)
    rejected = filter_rejections(rejected_in(folder / REJECTED), folder)
    _require_all(count_rows(shards), len(rejected), source)
    require_once(folder)
    return finish(folder, about, shards, rejected)


def filter_rejections(rejected: list[Rejected], folder: Path) -> list[Rejected]:
    """Leave out rejected images that have scores, as another attempt could read them.

    Args:
        rejected: The images that some attempt could not read.
        folder: The folder of the run, whose files hold the scores.
    """
    rejected_by_id = {image.id: image for image in rejected}
    for shard in shards_in(folder):
        for image_id in column(shard, "id").to_pylist():
            # The default None, since most images were never rejected.
            rejected_by_id.pop(image_id, None)
    return list(rejected_by_id.values())


def _require_all(scored: int, rejected: int, source: Source) -> None:
    """Raise an error unless all images of the source were scored or rejected, and one was scored.

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
    """Raise an error if any image was scored twice.

    Otherwise the number of rows could be right although another image has no scores.

    Args:
        folder: The folder of the run, whose files hold the scores.
    """
    id_tables = []
    for shard in shards_in(folder):
        id_tables.append(arrow().table({"id": column(shard, "id")}))
    with explain_parquet_errors(folder):
        # Permissive, since files may hold ids as string or as large_string.
        table = arrow().concat_tables(id_tables, promote_options="permissive")
        ids = table.column(0)
        num_repeated = len(ids) - len(ids.unique())
    if num_repeated:
        raise QualmsError(
            f"{folder} has {num_repeated} rows of images that were scored twice; remove it, and "
            "score again."
        )


@contextmanager
def cluster(address: str | None, workers: int | None) -> Iterator[Any]:
    """Connect to a Ray cluster, yield the package ray, and disconnect at the end.

    Args:
        address: The address of the cluster; None starts a cluster on this machine.
        workers: The number of workers that a started cluster gets cores for; None for one per core
            of this machine.
    """
    # Keeps Ray from sending usage statistics over the network.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Keeps Ray from printing errors: they are raised here, and are in Ray's log files.
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    ray = import_extra("ray", "ray", "a cluster", "ray")
    import_extra("ray.data", "ray[data]", "a cluster", "ray")
    if ray.is_initialized():
        # The caller has connected already, and the caller's connection stays open.
        yield ray
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
        workers: The number of workers that a started cluster gets cores for; None for one per core
            of this machine.
    """
    what = f"reach a cluster at {address}" if address else "start"

    def explain(error: Exception) -> QualmsError:
        """Create the error that Ray cannot be reached or started, with Ray's reason."""
        return QualmsError(
            f"Ray cannot {what} ({reason(error)}); check the address, or try again when the "
            "machine is less busy."
        )

    cores = (workers or os.cpu_count() or 1) + RESERVED_CORES
    options = {} if address else {"num_cpus": cores, "include_dashboard": False}
    with explain_failure(explain):
        ray.init(address or LOCAL, log_to_driver=False, logging_level=logging.ERROR, **options)


class Worker:
    """Scores batches in a process of the cluster, with a scorer from Ray's object store.

    Args:
        references: A list of one entry, the reference of the `BatchScorer` in the object store. If
            the reference itself were the argument, Ray would pass the scorer in its place.
    """

    def __init__(self, references: list[Any]) -> None:
        ray = import_extra("ray", "ray", "a cluster", "ray")
        # Once for each worker, not for each batch.
        self.scorer: BatchScorer = ray.get(references[0])

    def __call__(self, batch: Columns) -> Columns:
        """Score one batch of image files; see `BatchScorer`."""
        return self.scorer(batch)


def _run(
    ray: Any,
    scorer: BatchScorer,
    splits: list[Split],
    folder: Path,
    size: int,
    workers: int,
) -> None:
    """Read, score and write all images on the cluster, except for those that are written already.

    Args:
        ray: The package ray, connected to a cluster.
        scorer: The scorer that each worker gets.
        splits: Functions that each list some files of the source; Ray calls each in a task.
        folder: The folder of the run; Ray writes to its subfolders.
        size: The least number of rows in a file, except for the last file.
        workers: The largest number of processes that score.
    """
    from ray.data import ActorPoolStrategy, DataContext
    from ray.data.checkpoint import CheckpointConfig
    from ray.data.datasource import FilenameProvider

    logging.getLogger("ray.data").setLevel(logging.ERROR)
    context = DataContext.get_current()
    # Ray's settings are global, so those of the caller are restored at the end.
    callers_checkpoint = context.checkpoint_config
    callers_progress = context.enable_progress_bars
    # A later run skips the images that are recorded there.
    context.checkpoint_config = CheckpointConfig(
        "id",  # the column that identifies images
        str(folder / CHECKPOINT),
        delete_checkpoint_on_success=False,
    )
    context.enable_progress_bars = sys.stderr.isatty()
    weight = next(scorer.network.model.parameters())
    on_gpu = weight.device.type == "cuda"
    try:
        with explain_failure(_explain_worker_error), _explain_worker_errors(ray):
            # Stored on the cluster once, instead of sent with each task.
            reference = ray.put(replace(scorer, rejected=folder / REJECTED))
            images = ray.data.read_datasource(
                _datasource(splits),
                override_num_blocks=len(splits),
            )
            scores = images.map_batches(
                Worker,
                batch_size=BATCH,
                compute=ActorPoolStrategy(min_size=1, max_size=workers),
                # In a list, since Ray replaces a bare reference by the scorer.
                fn_constructor_args=([reference],),
                num_cpus=1,
                num_gpus=1 if on_gpu else 0,
            )
            scores.write_parquet(
                str(folder / WRITING),
                filename_provider=FilenameProvider("shard", "parquet"),
                min_rows_per_file=size,
            )
    finally:
        context.checkpoint_config = callers_checkpoint
        context.enable_progress_bars = callers_progress


@contextmanager
def _explain_worker_errors(ray: Any) -> Iterator[None]:
    """Convert errors of workers to a `QualmsError` with a message of one sentence.

    Ray raises a worker's `QualmsError` as a subclass of it, whose message holds the worker's
    traceback. `explain_failure` would not convert such an error.

    Args:
        ray: The package ray.
    """
    try:
        yield
    except ray.exceptions.RayError as error:
        raise _explain_worker_error(error) from None


def _explain_worker_error(error: Exception) -> QualmsError:
    """Create a `QualmsError` from Ray's error, whose message holds the worker's traceback.

    If a worker raised a `QualmsError`, its message is extracted from the traceback.
    """
    qualms_messages = re.findall(r"^qualms\.[\w.]+: (.+)$", str(error), re.MULTILINE)
    if qualms_messages:
        return QualmsError(qualms_messages[-1])
    return QualmsError(
        f"Ray could not finish ({reason(error)}); run the same command again to resume."
    )


def _datasource(splits: list[Split]) -> Any:
    """Build a Ray datasource of image files.

    Args:
        splits: Functions that each list some of the files; Ray calls each in a task of its own.
    """
    # Imported here, as Ray is an optional package.
    from ray.data import Datasource, ReadTask
    from ray.data.block import BlockMetadata

    class Files(Datasource):
        """The files of a source, as a class that Ray calls for its tasks."""

        def get_read_tasks(self, parallelism: int, *_: Any, **__: Any) -> "list[ReadTask]":
            """Return a task for each split; the number of tasks that Ray suggests is ignored."""
            unknown = BlockMetadata(
                num_rows=None,
                size_bytes=None,
                input_files=None,
                exec_stats=None,
            )
            return [ReadTask(partial(_read_tables, split), unknown) for split in splits]

        def estimate_inmemory_data_size(self) -> int | None:
            """Return None, as the size of the data is unknown until the files are read."""
            return None

    return Files()  # type: ignore[no-untyped-call]


def _read_tables(split: Split) -> Iterable[Any]:
    """Read the files of a split, and yield a table of each `BATCH` files; the last may have fewer.

    Args:
        split: Returns the files.
    """
    files = iter(split())
    while rows := [_read_row(file) for file in islice(files, BATCH)]:
        yield _make_table(rows)


def _read_row(file: File) -> dict[str, Any]:
    """Read the bytes of one file, as a row with the columns that a `BatchScorer` takes."""
    try:
        return {"id": file.id, "content": file.content(), "reason": ""}
    except Unreadable as error:
        return {"id": file.id, "content": None, "reason": error.reason}


def _make_table(rows: list[dict[str, Any]]) -> Any:
    """Convert rows with the keys `id`, `content` and `reason` to a pyarrow.Table."""
    types = {"id": arrow().string(), "content": arrow().large_binary(), "reason": arrow().string()}
    columns = {}
    for name, column_type in types.items():
        values = [row[name] for row in rows]
        columns[name] = arrow().array(values, column_type)
    return arrow().table(columns)
