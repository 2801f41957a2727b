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
from itertools import accumulate, cycle, islice, repeat
from pathlib import Path

import torch

from qualms.data import Images, ImageTransform, Rejected, load
from qualms.data.folder import Listing, list_folder
from qualms.data.loading import dataset_name, place_of, root_of
from qualms.data.npz import npz_count, npz_parts
from qualms.data.parquet import parquet_files, parquet_outline
from qualms.data.reading import File, read_images
from qualms.data.tar import tar_files
from qualms.errors import QualmsError
from qualms.stream.sizes import BATCH, SPLIT_FILES, batch_sizes

Sizes = Iterator[int]  # the sizes of consecutive batches
THREADS = 2  # threads that decode images


@dataclass(frozen=True)
class ImageBatch:
    """Consecutive images of a source.

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


# Reads one batch; may run in a thread.
Reader = Callable[[], ImageBatch]
# Lists some of the files; may be sent to another process.
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
        splits: lists all files, in parts for several processes; None if one process must read
            all of them.
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
        first = start
        # Each shard has the same sizes of batches.
        sizes = cycle(batch_sizes(shard, BATCH))
        with closing(_read_ahead(self.readers(start, sizes))) as batches:
            for batch in batches:
                yield replace(batch, first=first)
                first += batch.count

    def first(self) -> Images:
        """Read the first batch with a readable image; raise an error if no image can be read."""
        why = ""
        readers = self.readers(0, repeat(BATCH))
        with closing(_read_ahead(readers)) as batches:
            for batch in batches:
                if len(batch.images):
                    return batch.images
                rejected = batch.rejected[0]
                why = why or f": {rejected.id} is {rejected.reason}"
        raise QualmsError(
            f"no image of {self.name} can be read{why}; check that you passed the right path."
        )


def batches_in_memory(images: Images) -> Iterator[ImageBatch]:
    """Yield images that are in memory already, in batches of the same sizes as a source's."""
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
    kinds = {file.suffix.lower() for file in files}
    if kinds == {".parquet"}:
        return _parquet_source(files, reader)
    if kinds == {".tar"}:
        return _tar_source(files, reader)
    if len(files) > 1:
        raise QualmsError(
            f"{data} matches {files[0].name} and {len(files) - 1} more; a pattern must match only "
            ".parquet or only .tar files."
        )
    if kinds == {".npz"}:
        return _npz_source(data, files[0], transform)
    if files and files[0].is_dir():
        return _folder_source(list_folder(files[0], "test"), reader)
    return _memory_source(data, load(data, root, transform=transform, strict=strict))


def _find_files(data: str, root: Path | None) -> list[Path]:
    """Find the file or folder, or the files of a pattern; none for a dataset or a missing file."""
    if dataset_name(data, root) is not None:
        return []
    place = place_of(data, root_of(root))
    if place is not None:
        return [place]
    for pattern in (data, str(root_of(root) / data)):
        matches = sorted(map(Path, glob.glob(pattern)))
        if matches and glob.has_magic(data):
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
        """Read one batch of files."""
        read = read_images(files, self.name, self.transform, self.strict, may_be_empty=True)
        ids = tuple(files[place].id for place in read.kept)
        images = Images(self.name, torch.from_numpy(read.pixels), None, ids=ids)
        return ImageBatch(len(files), images, read.rejected)


def _parquet_source(files: list[Path], reader: _FileReader) -> Source:
    """Build a Source over the rows of .parquet files, in order; each row group is a split."""
    groups, classes = zip(*map(parquet_outline, files), strict=True)
    rows = list(map(sum, groups))

    def readers(start: int, sizes: Sizes) -> Iterator[Reader]:
        """Read the rows from `start` on, in batches of these sizes."""
        return reader.readers(_parquet_rows_from(files, rows, start), sizes)

    def splits() -> list[Split]:
        """Return a split for each group of rows; a worker lists its rows later."""
        return list(_row_group_splits(_absolute(files), groups))

    return Source(
        name=reader.name,
        classes=classes[0],
        fingerprint=_fingerprint(files),
        count=sum(rows),
        readers=readers,
        splits=splits,
    )


def _parquet_rows_from(paths: list[Path], rows: Sequence[int], start: int) -> Iterator[File]:
    """Yield the images of .parquet files from a position on.

    Args:
        paths: the files.
        rows: the number of rows in each file.
        start: the position of the first image, counted over all files.
    """
    for (path, prefix), count in zip(_id_prefixes(paths).items(), rows, strict=True):
        if start < count:
            yield from _parquet_rows(path, prefix, max(0, start), count)
        # Counted from the first row of the next file; below 0 once a file has been read.
        start -= count


def _row_group_splits(paths: list[Path], groups: Iterable[list[int]]) -> Iterator[Split]:
    """Yield a split for each group of rows of .parquet files.

    Args:
        paths: the files.
        groups: for each file, the number of rows in each of its groups.
    """
    for (path, prefix), counts in zip(_id_prefixes(paths).items(), groups, strict=True):
        for end, count in zip(accumulate(counts), counts, strict=True):
            yield partial(_parquet_rows, path, prefix, end - count, end)


def _parquet_rows(path: Path, prefix: str, start: int, end: int) -> Iterator[File]:
    """Yield the images of consecutive rows of one file.

    Args:
        path: the .parquet file.
        prefix: the start of every image's id.
        start: the first row.
        end: the row after the last row.
    """
    left = end - start
    for files in parquet_files(path, start, BATCH, prefix):
        for file in files:
            if left == 0:
                return
            yield file
            left -= 1


def _tar_source(files: list[Path], reader: _FileReader) -> Source:
    """Build a Source over the images of .tar files, in order; each file is a split.

    The count is unknown until the files are read.
    """

    def readers(start: int, sizes: Sizes) -> Iterator[Reader]:
        """Read the images from `start` on, in batches of these sizes."""
        # Images before `start` are skipped, not decoded.
        remaining = islice(_tar_members(files), start, None)
        return reader.readers(remaining, sizes)

    def splits() -> list[Split]:
        """Return a split for each file."""
        prefixes = _id_prefixes(_absolute(files))
        return [partial(tar_files, path, prefix) for path, prefix in prefixes.items()]

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
        yield from tar_files(path, prefix)


def _folder_source(listing: Listing, reader: _FileReader) -> Source:
    """Build a Source over a folder's files, in splits of SPLIT_FILES."""
    files, folder = listing.files, listing.path
    if not files:
        raise QualmsError(f"{folder} contains no images; check the path.")

    def readers(start: int, sizes: Sizes) -> Iterator[Reader]:
        """Read the files from `start` on, in batches of these sizes."""
        return reader.readers(listing.to_read(start), sizes)

    def splits() -> list[Split]:
        """Return splits of `SPLIT_FILES` files, with absolute paths for other processes."""
        parts: list[Split] = []
        for start in range(0, len(files), SPLIT_FILES):
            split_files = _absolute(files[start : start + SPLIT_FILES])
            listing_of_split = Listing(
                path=folder.absolute(), files=split_files, labels=None, classes=(), others=[]
            )
            parts.append(partial(_files_of_split, listing_of_split))
        return parts

    return Source(
        name=reader.name,
        classes=listing.classes,
        fingerprint=_fingerprint(files, folder),
        count=len(files),
        readers=readers,
        splits=splits,
    )


def _files_of_split(listing: Listing) -> Iterator[File]:
    """List the files of one split of a folder; raise an error if this machine lacks the folder."""
    if not listing.path.is_dir():
        raise QualmsError(
            f"{listing.path} does not exist on {platform.node()}; every machine must find the "
            "images at the same path."
        )
    return listing.to_read()


def _npz_source(data: str, path: Path, transform: ImageTransform | None) -> Source:
    """Build a Source over the test images of a .npz file.

    Args:
        data: the display name of the images.
        path: the path of the file.
        transform: applied to the images while reading; None keeps their size.
    """

    def readers(start: int, sizes: Sizes) -> Iterator[Reader]:
        """Read the images from `start` on; each part is in memory before its reader is yielded."""
        for pixels in npz_parts(path, "test", start, sizes):
            yield partial(
                _transformed_batch, Images(data, torch.from_numpy(pixels), None), transform
            )

    return Source(
        name=data,
        classes=(),
        fingerprint=_fingerprint([path]),
        count=npz_count(path, "test"),
        readers=readers,
    )


def _transformed_batch(images: Images, transform: ImageTransform | None) -> ImageBatch:
    """Transform images that were read, and return them as a batch."""
    transformed = images if transform is None else transform.apply(images)
    return ImageBatch(len(images), transformed)


def _memory_source(data: str, images: Images) -> Source:
    """Build a Source over images that are in memory: a dataset, or a single image."""

    def readers(start: int, sizes: Sizes) -> Iterator[Reader]:
        """Yield readers that return the images from `start` on, in batches of these sizes."""
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
    """Yield the batches in order; while the caller works on a batch, threads read the next ones.

    At most `THREADS` batches are read ahead, which bounds memory.
    """
    with ThreadPoolExecutor(THREADS) as pool:
        running: deque[Future[ImageBatch]] = deque()
        for reader in readers:
            running.append(pool.submit(reader))
            if len(running) > THREADS:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()


def _id_prefixes(paths: list[Path]) -> dict[Path, str]:
    """Return an id prefix per file, so that ids from different files do not collide.

    The prefix of a single file is empty.
    """
    if len(paths) == 1:
        return {paths[0]: ""}
    return {path: f"{name} " for path, name in _relative_names(paths).items()}


def _absolute(paths: list[Path]) -> list[Path]:
    """Return absolute paths, valid in processes with another working directory."""
    return [path.absolute() for path in paths]


def _relative_names(files: list[Path], folder: Path | None = None) -> dict[Path, str]:
    """Return each file's path relative to `folder`, by default to the closest common folder."""
    common = folder or os.path.commonpath([file.parent for file in files])
    return {file: file.relative_to(common).as_posix() for file in files}


def _fingerprint(files: list[Path], folder: Path | None = None) -> str:
    """Hash the names, sizes and modification times of files, without reading their content."""
    digest = hashlib.sha256()
    for file, name in _relative_names(files, folder).items():
        try:
            status = file.stat()
            digest.update(f"{name}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
        # A dangling symlink, which is an image that cannot be read.
        except OSError:
            digest.update(f"{name}\0\n".encode())
    return digest.hexdigest()[:16]
