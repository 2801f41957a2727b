"""Sources: images in a fixed order, read batch by batch, so that memory never holds all of them."""

import glob
import hashlib
import os
import platform
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice, repeat
from pathlib import Path

import torch

from qualms.data import Images, ImageTransform, Rejected, load
from qualms.data.folder import Listing, list_folder
from qualms.data.loading import dataset_name, datasets_root, find_data_path
from qualms.data.npz import count_npz_images, iter_npz_images
from qualms.data.parquet import iter_parquet_files, read_parquet_outline
from qualms.data.reading import File, read_images
from qualms.data.tar import iter_tar_files
from qualms.errors import QualmsError
from qualms.stream.sizes import BATCH, SPLIT_FILES, batch_sizes

Sizes = Iterator[int]  # the sizes of consecutive batches
THREADS = 2  # threads that decode images


@dataclass(frozen=True)
class ImageBatch:
    """Consecutive images of a source, as read from its files.

    Args:
        count: the number of images in this batch, including unreadable ones.
        images: the images that could be read; without ids if their files have no names.
        rejected: the images that could not be read, each with the reason.
        first: the position of the batch's first image in the source.
    """

    count: int
    images: Images
    rejected: tuple[Rejected, ...] = ()
    first: int = 0

    @property
    def is_empty(self) -> bool:
        """Whether none of the images could be read."""
        return len(self.images) == 0


# A function that reads one batch; it may run in a thread.
Reader = Callable[[], ImageBatch]
# A function that lists some files of a source; it may be sent to another process and run there.
Split = Callable[[], Iterable[File]]


@dataclass(frozen=True)
class Source:
    """Images in a fixed order.

    Args:
        name: the display name of the images.
        classes: the names of the images' classes; empty if they have none.
        fingerprint: a hash of the names, sizes and modification times of the files, not of their
            content.
        count: the number of images. None if the count is unknown until the files are read.
        readers: called with a start position and the sizes of batches; returns a reader for each
            batch from that position on.
        splits: returns functions that together list all files, to be called in several processes;
            None if one process must read all files.
    """

    name: str
    classes: tuple[str, ...]
    fingerprint: str
    count: int | None
    readers: Callable[[int, Sizes], Iterable[Reader]]
    splits: Callable[[], list[Split]] | None = None

    def batches(self, start: int, shard: int) -> Generator[ImageBatch]:
        """Yield the batches from a position on, in order; threads read ahead of the caller.

        Args:
            start: the position of the first image, where a shard begins.
            shard: the number of images in a shard; no batch reaches from one shard into the next.
        """
        # The position of the next batch's first image.
        first = start
        # The sizes of one shard's batches, repeated for each shard.
        sizes = cycle(batch_sizes(shard, BATCH))
        # `closing` stops the threads if the caller stops early.
        with closing(_read_ahead(self.readers(start, sizes))) as batches:
            for batch in batches:
                yield replace(batch, first=first)
                first += batch.count

    def first(self) -> Images:
        """Return the images of the first batch in which any can be read.

        Raises:
            QualmsError: if no image of the source can be read; it says why the first could not.
        """
        why = ""
        readers = self.readers(0, repeat(BATCH))
        with closing(_read_ahead(readers)) as batches:
            for batch in batches:
                if not batch.is_empty:
                    return batch.images
                rejected = batch.rejected[0]
                # The reason for the first image of all is kept.
                why = why or f": {rejected.id} is {rejected.reason}"
        raise QualmsError(
            f"no image of {self.name} can be read{why}; check that you passed the right path."
        )


def batches_in_memory(images: Images) -> Iterator[ImageBatch]:
    """Split images that are in memory into batches of the same sizes as those of a `Source`."""
    first = 0
    for size in batch_sizes(len(images)):
        part = images.take(slice(first, first + size))
        yield ImageBatch(size, part, first=first)
        first += size


def open_source(
    data: str,
    root: Path | None,
    transform: ImageTransform | None,
    strict: bool = False,
) -> Source:
    """Open a folder, a .npz file, .parquet or .tar files, or a dataset as a `Source`.

    Args:
        data: the name of a dataset or the path of images, as for `qualms.data.load`; also a .tar
            file, or a pattern such as `shards/*.tar`.
        root: the folder with the datasets.
        transform: resizes and crops each image for a network; None keeps its size.
        strict: whether an image that cannot be read is an error.
    """
    files = _find_files(data, root)
    reader = _FileReader(data, transform, strict)
    suffixes = {file.suffix.lower() for file in files}
    if suffixes == {".parquet"}:
        return _parquet_source(files, reader)
    if suffixes == {".tar"}:
        return _tar_source(files, reader)
    if len(files) > 1:
        raise QualmsError(
            f"{data} matches {files[0].name} and {len(files) - 1} more; a pattern must match only "
            ".parquet or only .tar files."
        )
    if suffixes == {".npz"}:
        return _npz_source(data, files[0], transform)
    if files and files[0].is_dir():
        return _folder_source(list_folder(files[0], "test"), reader)
    # A dataset, or a file that is loaded as a whole.
    return _memory_source(data, load(data, root, transform=transform, strict=strict))


def _find_files(data: str, root: Path | None) -> list[Path]:
    """Find the files that `data` names.

    Args:
        data: a path, a pattern such as `shards/*.tar`, or the name of a dataset; paths and patterns
            may be relative to `root`.
        root: the folder with the datasets; None for the default one.

    Returns:
        A single file or folder, or the sorted files of a pattern; none for a dataset, or if there
        is no such file.
    """
    if dataset_name(data, root) is not None:
        return []
    path = find_data_path(data, datasets_root(root))
    if path is not None:
        return [path]
    if not glob.has_magic(data):  # no pattern
        return []
    for pattern in (data, str(datasets_root(root) / data)):
        matches = sorted(map(Path, glob.glob(pattern)))
        if matches:
            return matches
    return []


@dataclass(frozen=True)
class _FileReader:
    """Reads the files of a source, with the same settings for all of them.

    Args:
        name: the display name of the images.
        transform: applied to each image; None keeps its size.
        strict: whether an image that cannot be read is an error.
    """

    name: str
    transform: ImageTransform | None
    strict: bool

    def readers(self, files: Iterable[File], sizes: Sizes) -> Iterator[Reader]:
        """Yield a reader for each batch of consecutive files.

        Args:
            files: the files of the source, from the first one that is read.
            sizes: yields the number of files in each batch, without end.
        """
        remaining = iter(files)
        while batch := tuple(islice(remaining, next(sizes))):
            yield partial(self.read, batch)

    def read(self, files: tuple[File, ...]) -> ImageBatch:
        """Read and decode one batch of files."""
        read = read_images(files, self.name, self.transform, self.strict, may_be_empty=True)
        # `kept` are the indices of the files that could be read.
        ids = tuple(files[index].id for index in read.kept)
        pixels = torch.from_numpy(read.pixels)
        images = Images(self.name, pixels, labels=None, ids=ids)
        return ImageBatch(len(files), images, read.rejected)


def _parquet_source(files: list[Path], reader: _FileReader) -> Source:
    """Build a `Source` over the rows of .parquet files, in order.

    Args:
        files: the paths of the files.
        reader: reads the images of the rows.
    """
    # For each file the number of rows in each of its row groups, and its class names.
    groups, classes = zip(*map(read_parquet_outline, files), strict=True)
    rows_per_file = list(map(sum, groups))

    def readers(start: int, sizes: Sizes) -> Iterator[Reader]:
        """Yield readers of the rows from index `start` on, in batches of these sizes."""
        return reader.readers(_parquet_rows_from(files, rows_per_file, start), sizes)

    def splits() -> list[Split]:
        """Return a function for each row group, which lists the images of its rows."""
        return list(_row_group_splits(_absolute(files), groups))

    return Source(
        name=reader.name,
        classes=classes[0],  # the files are taken to be parts of one dataset
        fingerprint=_fingerprint(files),
        count=sum(rows_per_file),
        readers=readers,
        splits=splits,
    )


def _parquet_rows_from(
    paths: list[Path],
    rows_per_file: Sequence[int],
    start: int,
) -> Iterator[File]:
    """Yield the images of .parquet files, file by file, from a position on.

    Args:
        paths: the paths of the files.
        rows_per_file: the number of rows in each file.
        start: the position of the first image to yield, counted over all files.
    """
    prefixes = _id_prefixes(paths)
    file_start = 0  # the position of a file's first row, counted over all files
    for path, num_rows in zip(paths, rows_per_file, strict=True):
        first_row = max(0, start - file_start)
        if first_row < num_rows:
            yield from _parquet_rows(path, prefixes[path], first_row, num_rows)
        file_start += num_rows


def _row_group_splits(paths: list[Path], groups: Iterable[list[int]]) -> Iterator[Split]:
    """Yield a function for each row group of .parquet files, which lists the images of its rows.

    Args:
        paths: the paths of the files.
        groups: for each file, the number of rows in each of its groups.
    """
    prefixes = _id_prefixes(paths)
    for path, group_sizes in zip(paths, groups, strict=True):
        start = 0
        for size in group_sizes:
            end = start + size
            yield partial(_parquet_rows, path, prefixes[path], start, end)
            start = end


def _parquet_rows(path: Path, prefix: str, start: int, end: int) -> Iterator[File]:
    """Yield the images of consecutive rows of one file.

    Args:
        path: the .parquet file.
        prefix: the start of every image's id.
        start: the first row.
        end: the row after the last row.
    """
    # `iter_parquet_files` yields lists of `BATCH` rows up to the end of the file.
    row = start
    for files in iter_parquet_files(path, start, BATCH, prefix):
        for file in files:
            if row == end:
                return
            yield file
            row += 1


def _tar_source(files: list[Path], reader: _FileReader) -> Source:
    """Build a `Source` over the images of .tar files, in order.

    Args:
        files: the paths of the .tar files, whose number of images is unknown until they are read.
        reader: reads the images.
    """

    def readers(start: int, sizes: Sizes) -> Iterator[Reader]:
        """Yield readers of the images from index `start` on, in batches of these sizes."""
        # Images before `start` are skipped, not decoded.
        remaining = islice(_tar_members(files), start, None)
        return reader.readers(remaining, sizes)

    def splits() -> list[Split]:
        """Return a function for each .tar file, which lists its images."""
        prefixes = _id_prefixes(_absolute(files))
        return [partial(iter_tar_files, path, prefix) for path, prefix in prefixes.items()]

    return Source(
        name=reader.name,
        classes=(),
        fingerprint=_fingerprint(files),
        count=None,
        readers=readers,
        splits=splits,
    )


def _tar_members(paths: list[Path]) -> Iterator[File]:
    """Yield the images of .tar files, file by file."""
    for path, prefix in _id_prefixes(paths).items():
        yield from iter_tar_files(path, prefix)


def _folder_source(listing: Listing, reader: _FileReader) -> Source:
    """Build a `Source` over the images of a folder.

    Args:
        listing: the folder and its image files.
        reader: reads the files.
    """
    files, folder = listing.files, listing.path
    if not files:
        raise QualmsError(f"{folder} contains no images; check the path.")

    def readers(start: int, sizes: Sizes) -> Iterator[Reader]:
        """Yield readers of the files from index `start` on, in batches of these sizes."""
        return reader.readers(listing.to_read(start), sizes)

    def splits() -> list[Split]:
        """Return functions that each list up to `SPLIT_FILES` files, with absolute paths."""
        file_listers: list[Split] = []
        for start in range(0, len(files), SPLIT_FILES):
            split_files = _absolute(files[start : start + SPLIT_FILES])
            listing_of_split = Listing(
                path=folder.absolute(),
                files=split_files,
                labels=None,
                classes=(),
                other_files=[],
            )
            file_listers.append(partial(_list_split, listing_of_split))
        return file_listers

    return Source(
        name=reader.name,
        classes=listing.classes,
        fingerprint=_fingerprint(files, folder),
        count=len(files),
        readers=readers,
        splits=splits,
    )


def _list_split(listing: Listing) -> Iterator[File]:
    """Return the images of one split of a folder; called on any machine of a cluster.

    Args:
        listing: the folder with the files of this split alone.

    Raises:
        QualmsError: if this machine does not have the folder.
    """
    if not listing.path.is_dir():
        raise QualmsError(
            f"{listing.path} does not exist on {platform.node()}; every machine must find the "
            "images at the same path."
        )
    return listing.to_read()


def _npz_source(data: str, path: Path, transform: ImageTransform | None) -> Source:
    """Build a `Source` over the test images of a .npz file.

    Args:
        data: the display name of the images.
        path: the path of the file.
        transform: applied to the images while reading; None keeps their size.
    """

    def readers(start: int, sizes: Sizes) -> Iterator[Reader]:
        """Yield readers of the images from index `start` on, in batches of these sizes.

        The file is read here; the readers only transform its images.
        """
        for pixels in iter_npz_images(path, "test", start, sizes):
            images = Images(data, torch.from_numpy(pixels), labels=None)
            yield partial(_transform_batch, images, transform)

    return Source(
        name=data,
        classes=(),
        fingerprint=_fingerprint([path]),
        count=count_npz_images(path, "test"),
        readers=readers,
    )


def _transform_batch(images: Images, transform: ImageTransform | None) -> ImageBatch:
    """Return images in memory as a batch, after the transform if there is one."""
    transformed = images if transform is None else transform.apply(images)
    return ImageBatch(len(images), transformed)


def _memory_source(data: str, images: Images) -> Source:
    """Build a `Source` over images that are in memory.

    Args:
        data: the display name of the images.
        images: the images of a dataset, or a single image.
    """

    def readers(start: int, sizes: Sizes) -> Iterator[Reader]:
        """Yield readers of the images from index `start` on, in batches of these sizes."""
        while start < len(images):
            part = images.take(slice(start, start + next(sizes)))
            start += len(part)
            yield partial(ImageBatch, len(part), part)

    return Source(
        name=data,
        classes=images.classes,
        fingerprint=images.fingerprint(),
        count=len(images),
        readers=readers,
    )


def _read_ahead(readers: Iterable[Reader]) -> Generator[ImageBatch]:
    """Run readers in threads, and yield their batches in order.

    While the caller works on a batch, the threads read the next ones: at most `THREADS` batches, to
    limit memory.
    """
    with ThreadPoolExecutor(THREADS) as pool:
        pending: deque[Future[ImageBatch]] = deque()
        for reader in readers:
            pending.append(pool.submit(reader))
            if len(pending) > THREADS:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def _id_prefixes(paths: list[Path]) -> dict[Path, str]:
    """Return what the ids of each file's images begin with, by the path of the file.

    It is the file's name below the folder of all files, and a space, so that ids from different
    files differ. For a single file it is empty.
    """
    if len(paths) == 1:
        return {paths[0]: ""}
    return {path: f"{name} " for path, name in _relative_names(paths).items()}


def _absolute(paths: list[Path]) -> list[Path]:
    """Make paths absolute, so that they are valid in processes with another working directory."""
    return [path.absolute() for path in paths]


def _relative_names(files: list[Path], folder: Path | None = None) -> dict[Path, str]:
    """Name each file by its path below `folder`, or else below the closest folder of all files.

    The names stay the same if all files are moved together.
    """
    common = folder or os.path.commonpath([file.parent for file in files])
    return {file: file.relative_to(common).as_posix() for file in files}


def _fingerprint(files: list[Path], folder: Path | None = None) -> str:
    """Hash the names, sizes and modification times of files, without reading their content."""
    digest = hashlib.sha256()
    for file, name in _relative_names(files, folder).items():
        try:
            status = file.stat()
            digest.update(f"{name}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
        # A broken symbolic link, which counts as an image that cannot be read.
        except OSError:
            digest.update(f"{name}\0\n".encode())
    return digest.hexdigest()[:16]
