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

Sizes = Iterator[int]  # of consecutive batches
THREADS = 2  # that decode


@dataclass(frozen=True)
class ImageBatch:
    """Consecutive images of a source.

    Args:
        count: how many there are, with those that could not be read.
        images: those that could be read; without ids if their files have no names.
        rejected: the others, each with the reason.
        first: the position of the first one in the source.
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
        name: what people call them.
        classes: names of their classes; empty if they have none.
        fingerprint: of the names, sizes and times of the files, whose content it does not read.
        count: how many there are; None if that is known only after reading them.
        readers: given a position and the sizes of batches, a reader for each batch from there on.
        splits: all files, in parts for several processes; None if one process must read them.
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
            shard: images in a shard; no batch reaches from one shard into the next.
        """
        first = start
        sizes = cycle(batch_sizes(shard, BATCH))
        readers = self.readers(start, sizes)
        with closing(_read_ahead(readers)) as found:
            for batch in found:
                yield replace(batch, first=first)
                first += batch.count

    def first(self) -> Images:
        """Return the first images that can be read; raise an error if there are none."""
        why = ""
        readers = self.readers(0, repeat(BATCH))
        with closing(_read_ahead(readers)) as batches:
            for batch in batches:
                if len(batch.images):
                    return batch.images
                rejected = batch.rejected[0]
                why = why or f": {rejected.id} is {rejected.reason}"
        raise QualmsError(
            f"no image of {self.name} can be read{why}; check that it is the one you meant."
        )


def batches_in_memory(images: Images) -> Iterator[ImageBatch]:
    """Yield images that are already in memory, as the batches of a source."""
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
    """Open a folder, a .npz file, .parquet or .tar files, or a dataset as a source of images.

    Args:
        data: as for `qualms.data.load`; also a .tar file, or a pattern such as `shards/*.tar`.
        root: the folder with the datasets.
        transform: how images become a network's inputs; None keeps their size.
        strict: whether an image that cannot be read is an error.
    """
    files = _find_files(data, root)
    reader = _FileReader(data, transform, strict)
    kinds = {file.suffix.lower() for file in files}
    if kinds == {".parquet"}:
        return _of_parquet(files, reader)
    if kinds == {".tar"}:
        return _of_tar(files, reader)
    if len(files) > 1:
        raise QualmsError(
            f"{data} matches {files[0].name} and {len(files) - 1} more; a pattern must match only "
            ".parquet or only .tar files."
        )
    if kinds == {".npz"}:
        return _of_arrays(data, files[0], transform)
    if files and files[0].is_dir():
        return _of_folder(list_folder(files[0], "test"), reader)
    images = load(data, root, transform=transform, strict=strict)
    return _of_memory(data, images)


def _find_files(data: str, root: Path | None) -> list[Path]:
    """Return a file or folder, or a pattern's files; none for a dataset or a missing file."""
    if dataset_name(data, root) is not None:
        return []
    place = place_of(data, root_of(root))
    if place is not None:
        return [place]
    for pattern in (data, str(root_of(root) / data)):
        found = sorted(map(Path, glob.glob(pattern)))
        if found and glob.has_magic(data):
            return found
    return []


@dataclass(frozen=True)
class _FileReader:
    """How the files of a source are read.

    Args:
        name: what people call the images.
        transform: applied to each image; None keeps its size.
        strict: whether an image that cannot be read is an error.
    """

    name: str
    transform: ImageTransform | None
    strict: bool

    def readers(self, files: Iterable[File], sizes: Sizes) -> Iterator[Reader]:
        """Yield a reader for each batch of consecutive files."""
        rest = iter(files)
        while some := tuple(islice(rest, next(sizes))):
            yield partial(self.read, some)

    def read(self, files: tuple[File, ...]) -> ImageBatch:
        """Read one batch of files."""
        read = read_images(files, self.name, self.transform, self.strict, may_be_empty=True)
        ids = tuple(files[place].id for place in read.kept)
        images = Images(self.name, torch.from_numpy(read.pixels), None, ids=ids)
        return ImageBatch(len(files), images, read.rejected)


def _of_parquet(files: list[Path], reader: _FileReader) -> Source:
    """Return a source of the rows of .parquet files, in order; a split is a row group."""
    groups, classes = zip(*map(parquet_outline, files), strict=True)
    rows = list(map(sum, groups))

    def readers(start: int, sizes: Sizes) -> Iterator[Reader]:
        return reader.readers(_rows_of(files, rows, start), sizes)

    def splits() -> list[Split]:
        return list(_splits_of_rows(_absolute(files), groups))

    fingerprint = _fingerprint(files)
    return Source(reader.name, classes[0], fingerprint, sum(rows), readers, splits)


def _rows_of(
    paths: list[Path],
    rows: Sequence[int],
    start: int,
) -> Iterator[File]:
    """Yield the images of .parquet files from a position on."""
    prefixes = _prefixes(paths).items()
    for (path, prefix), count in zip(prefixes, rows, strict=True):
        if start < count:
            yield from _rows(path, prefix, max(0, start), count)
        start -= count


def _splits_of_rows(paths: list[Path], groups: Iterable[list[int]]) -> Iterator[Split]:
    prefixes = _prefixes(paths).items()
    for (path, prefix), counts in zip(prefixes, groups, strict=True):
        for end, count in zip(accumulate(counts), counts, strict=True):
            yield partial(_rows, path, prefix, end - count, end)


def _rows(path: Path, prefix: str, start: int, end: int) -> Iterator[File]:
    """Yield the images of some rows.

    Args:
        path: a .parquet file.
        prefix: of the ids.
        start: the first row.
        end: the row after the last one.
    """
    left = end - start
    for files in parquet_files(path, start, BATCH, prefix):
        for file in files:
            if left == 0:
                return
            yield file
            left -= 1


def _of_tar(files: list[Path], reader: _FileReader) -> Source:
    """Return a source of the images of .tar files, in order; a split is a file.

    Their number is known only after reading them all.
    """

    def readers(start: int, sizes: Sizes) -> Iterator[Reader]:
        # Those before are skipped, not decoded.
        rest = islice(_members(files), start, None)
        return reader.readers(rest, sizes)

    def splits() -> list[Split]:
        prefixes = _prefixes(_absolute(files))
        return [partial(tar_files, path, prefix) for path, prefix in prefixes.items()]

    return Source(reader.name, (), _fingerprint(files), None, readers, splits)


def _members(paths: list[Path]) -> Iterator[File]:
    for path, prefix in _prefixes(paths).items():
        yield from tar_files(path, prefix)


def _of_folder(listing: Listing, reader: _FileReader) -> Source:
    """Return a source of the files of a folder; a split is some of them."""
    files, folder = listing.files, listing.path
    if not files:
        raise QualmsError(f"{folder} holds no images; check that it is the one you meant.")

    def readers(start: int, sizes: Sizes) -> Iterator[Reader]:
        return reader.readers(listing.to_read(start), sizes)

    def splits() -> list[Split]:
        found: list[Split] = []
        for start in range(0, len(files), SPLIT_FILES):
            some = _absolute(files[start : start + SPLIT_FILES])
            part = Listing(folder.absolute(), some, None, (), [])
            found.append(partial(_some_files, part))
        return found

    fingerprint = _fingerprint(files, folder)
    return Source(reader.name, listing.classes, fingerprint, len(files), readers, splits)


def _some_files(listing: Listing) -> Iterator[File]:
    """Return some of a folder's files, on a machine that may not have them."""
    if not listing.path.is_dir():
        raise QualmsError(
            f"{listing.path} does not exist on {platform.node()}; every machine must find the "
            "images at the same path."
        )
    return listing.to_read()


def _of_arrays(
    data: str,
    path: Path,
    transform: ImageTransform | None,
) -> Source:
    """Return a source of the test images of a .npz file.

    Args:
        data: what people call them.
        path: of the file.
        transform: applied while reading; None keeps their size.
    """

    def readers(start: int, sizes: Sizes) -> Iterator[Reader]:
        for pixels in npz_parts(path, "test", start, sizes):
            images = Images(data, torch.from_numpy(pixels), None)
            yield partial(_transform, images, transform)

    count = npz_count(path, "test")
    return Source(data, (), _fingerprint([path]), count, readers)


def _transform(images: Images, transform: ImageTransform | None) -> ImageBatch:
    own = images if transform is None else transform.apply(images)
    return ImageBatch(len(images), own)


def _of_memory(data: str, images: Images) -> Source:
    """Return a source of images that are in memory: a dataset, or one image."""

    def readers(start: int, sizes: Sizes) -> Iterator[Reader]:
        while start < len(images):
            part = images.take(slice(start, start + next(sizes)))
            start += len(part)
            yield partial(ImageBatch, len(part), part)

    fingerprint = images.fingerprint()
    return Source(data, images.classes, fingerprint, len(images), readers)


def _read_ahead(readers: Iterable[Reader]) -> Generator[ImageBatch]:
    """Yield the batches in order; each is read while the caller works on those before it."""
    with ThreadPoolExecutor(THREADS) as pool:
        running: deque[Future[ImageBatch]] = deque()
        for reader in readers:
            running.append(pool.submit(reader))
            if len(running) > THREADS:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()


def _prefixes(paths: list[Path]) -> dict[Path, str]:
    """Return a prefix for each file that keeps the ids of several files apart."""
    if len(paths) == 1:
        return {paths[0]: ""}
    return {path: f"{name} " for path, name in _names(paths).items()}


def _absolute(paths: list[Path]) -> list[Path]:
    """Make paths absolute, for processes with another working directory."""
    return [path.absolute() for path in paths]


def _names(files: list[Path], folder: Path | None = None) -> dict[Path, str]:
    """Return the files' paths relative to a folder, by default to their common one."""
    common = folder or os.path.commonpath([file.parent for file in files])
    return {file: file.relative_to(common).as_posix() for file in files}


def _fingerprint(files: list[Path], folder: Path | None = None) -> str:
    digest = hashlib.sha256()
    for file, name in _names(files, folder).items():
        try:
            about = file.stat()
            digest.update(f"{name}\0{about.st_size}\0{about.st_mtime_ns}\n".encode())
        except OSError:
            # A link to nowhere, which is an image that cannot be read.
            digest.update(f"{name}\0\n".encode())
    return digest.hexdigest()[:16]
