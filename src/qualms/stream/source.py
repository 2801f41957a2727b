"""Images of any number: in a fixed order, read in parts as they are needed, so that memory never
holds all of them.
"""

import glob
import hashlib
import os
import platform
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, cycle, islice, repeat
from pathlib import Path

import torch

from qualms.data import Images, ImageTransform, Rejected, load
from qualms.data.folder import Listing, list_folder
from qualms.data.loading import dataset_name, place_of, root_of
from qualms.data.npz import npz_count, npz_parts
from qualms.data.parquet import parquet_files, parquet_outline
from qualms.data.reading import File, read_available
from qualms.data.tar import tar_files
from qualms.errors import QualmsError
from qualms.progress import batch_sizes

PART = 32  # inputs that are read, and scored, together
Sizes = Iterator[int]  # of parts
THREADS = 2  # that decode
FILES = 256  # of a folder in a piece
Piece = Callable[[], Iterable[File]]  # reads some images; can be sent to another process


@dataclass(frozen=True)
class Part:
    """Consecutive inputs: how many there are, those that could be read, and why the others could
    not.

    Where files have no names of their own, images have no ids, and all of them can be read.
    """

    count: int
    images: Images
    rejected: tuple[Rejected, ...] = ()


@dataclass(frozen=True)
class Source:
    """Images in a fixed order.

    Args:
        name: what people call them.
        classes: names of their classes, if they have some.
        fingerprint: of the names, sizes and times of the files; their content is not read for it.
        count: how many there are, if that is known before they are read.
        tasks: given a place and sizes of parts, what reads the part that begins there, and then
            each part after it.
        pieces: all of it, to be read by several processes; None where one must do it.
    """

    name: str
    classes: tuple[str, ...]
    fingerprint: str
    count: int | None
    tasks: Callable[[int, Sizes], Iterable[Callable[[], Part]]]
    pieces: Callable[[], list[Piece]] | None = None

    def parts(self, start: int, shard: int) -> Generator[Part]:
        """The parts from the start of a shard on, in order; none reaches from one shard into the
        next.

        Threads read ahead while the caller works on a part.
        """
        return _ahead(self.tasks(start, cycle(batch_sizes(shard, PART))))

    def first(self) -> Images:
        """The first images that can be read; an error if there are none."""
        why = ""
        with closing(_ahead(self.tasks(0, repeat(PART)))) as parts:
            for part in parts:
                if len(part.images):
                    return part.images
                why = why or f": {part.rejected[0].id} is {part.rejected[0].reason}"
        raise QualmsError(
            f"no image of {self.name} can be read{why}; check that it is the one you meant."
        )


def open_source(
    data: str, root: Path | None, fit: ImageTransform | None, strict: bool = False
) -> Source:
    """The images of a folder, of a .npz file, of .parquet or .tar files, or of a dataset.

    Args:
        data: as for `qualms.data.load`, also a .tar file, or a pattern such as `shards/*.tar`.
        root: the folder of datasets.
        fit: how images become a network's input.
        strict: whether an image that cannot be read is an error.
    """
    files = _files(data, root)
    if not files:
        return _in_memory(data, load(data, root, transform=fit, strict=strict))
    kinds = {file.suffix.lower() for file in files}
    if kinds == {".npz"} and len(files) == 1:
        return _of_arrays(data, files[0], fit)
    if kinds == {".parquet"}:
        groups, classes = zip(*map(parquet_outline, files), strict=True)
        rows = list(map(sum, groups))
        return Source(
            data,
            classes[0],
            _fingerprint(files),
            sum(rows),
            lambda start, sizes: _tasks(_rows_of(files, rows, start), sizes, data, fit, strict),
            lambda: list(_groups_of(_absolute(files), groups)),
        )
    if kinds == {".tar"}:
        return Source(
            data,
            (),
            _fingerprint(files),
            None,
            lambda start, sizes: _tasks(_samples_of(files, start), sizes, data, fit, strict),
            lambda: [
                partial(tar_files, path, prefix)
                for path, prefix in _prefixes(_absolute(files)).items()
            ],
        )
    if len(files) == 1 and files[0].is_dir():
        return _of_folder(data, list_folder(files[0], "test"), fit, strict)
    if len(files) == 1:
        return _in_memory(data, load(data, root, transform=fit, strict=strict))
    raise QualmsError(
        f"{data} matches {files[0].name} and {len(files) - 1} more; a pattern must match only .parquet or only .tar "
        "files."
    )


def _files(data: str, root: Path | None) -> list[Path]:
    """The file or folder, or the files of a pattern; none for a dataset, or for what is not there."""
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


def _tasks(
    files: Iterable[File], sizes: Sizes, where: str, fit: ImageTransform | None, strict: bool
) -> Iterator[Callable[[], Part]]:
    rest = iter(files)
    while some := tuple(islice(rest, next(sizes))):
        yield partial(_read, some, where, fit, strict)


def _rows_of(paths: list[Path], rows: Sequence[int], start: int) -> Iterator[File]:
    """The images of .parquet files from a place on."""
    for (path, prefix), count in zip(_prefixes(paths).items(), rows, strict=True):
        if start < count:
            yield from _rows(path, prefix, max(0, start), count)
        start -= count


def _groups_of(paths: list[Path], groups: Iterable[list[int]]) -> Iterator[Piece]:
    """The images of .parquet files, a group of rows in each piece."""
    for (path, prefix), counts in zip(_prefixes(paths).items(), groups, strict=True):
        for end, count in zip(accumulate(counts), counts, strict=True):
            yield partial(_rows, path, prefix, end - count, end)


def _rows(path: Path, prefix: str, start: int, end: int) -> Iterator[File]:
    return islice(
        (file for some in parquet_files(path, start, PART, prefix) for file in some), end - start
    )


def _samples_of(paths: list[Path], start: int) -> Iterator[File]:
    """The images of .tar files from a place on: those before it are passed over, but not decoded."""
    return islice(
        (file for path, prefix in _prefixes(paths).items() for file in tar_files(path, prefix)),
        start,
        None,
    )


def _prefixes(paths: list[Path]) -> dict[Path, str]:
    """What tells ids of one file from those of another."""
    return {path: f"{name} " if len(paths) > 1 else "" for path, name in _names(paths).items()}


def _absolute(paths: list[Path]) -> list[Path]:
    """For processes whose working folder is another."""
    return [path.absolute() for path in paths]


def _names(files: list[Path], folder: Path | None = None) -> dict[Path, str]:
    """Of files, from a folder on, or from the one that all of them are in."""
    common = folder or os.path.commonpath([file.parent for file in files])
    return {file: file.relative_to(common).as_posix() for file in files}


def _read(files: tuple[File, ...], where: str, fit: ImageTransform | None, strict: bool) -> Part:
    read = read_available(files, where, fit, strict)
    ids = tuple(files[place].id for place in read.kept)
    return Part(
        len(files), Images(where, torch.from_numpy(read.pixels), None, ids=ids), read.rejected
    )


def _of_folder(data: str, listing: Listing, fit: ImageTransform | None, strict: bool) -> Source:
    if not listing.files:
        raise QualmsError(f"{listing.path} holds no images; check that it is the one you meant.")
    return Source(
        data,
        listing.classes,
        _fingerprint(listing.files, listing.path),
        len(listing.files),
        lambda start, sizes: _tasks(listing.to_read(start), sizes, data, fit, strict),
        lambda: [
            partial(_some_files, Listing(listing.path.absolute(), _absolute(some), None, (), []))
            for some in (listing.files[i : i + FILES] for i in range(0, len(listing.files), FILES))
        ],
    )


def _some_files(listing: Listing) -> Iterator[File]:
    """Some of a folder's files, on a machine that may not have them."""
    if not listing.path.is_dir():
        raise QualmsError(
            f"{listing.path} is not there on {platform.node()}; every machine must find the images at the same path."
        )
    return listing.to_read()


def _of_arrays(data: str, path: Path, fit: ImageTransform | None) -> Source:
    def tasks(start: int, sizes: Sizes) -> Iterator[Callable[[], Part]]:
        for pixels in npz_parts(path, "test", start, sizes):
            yield partial(_fitted, Images(data, torch.from_numpy(pixels), None), fit)

    return Source(data, (), _fingerprint([path]), npz_count(path, "test"), tasks)


def _fitted(images: Images, fit: ImageTransform | None) -> Part:
    return Part(len(images), images if fit is None else fit.apply(images))


def _in_memory(data: str, images: Images) -> Source:
    """A dataset, or one image."""

    def tasks(start: int, sizes: Sizes) -> Iterator[Callable[[], Part]]:
        while start < len(images):
            part = images.take(slice(start, start + next(sizes)))
            start += len(part)
            yield partial(Part, len(part), part)

    return Source(data, images.classes, images.fingerprint(), len(images), tasks)


def _fingerprint(files: list[Path], folder: Path | None = None) -> str:
    digest = hashlib.sha256()
    for file, name in _names(files, folder).items():
        try:
            about = file.stat()
            digest.update(f"{name}\0{about.st_size}\0{about.st_mtime_ns}\n".encode())
        except OSError:  # a link to nowhere, which is an image that cannot be read
            digest.update(f"{name}\0\n".encode())
    return digest.hexdigest()[:16]


def _ahead(tasks: Iterable[Callable[[], Part]]) -> Generator[Part]:
    """The results of tasks in order, each begun while those before it are worked on."""
    with ThreadPoolExecutor(THREADS) as pool:
        begun: deque[Future[Part]] = deque()
        for task in tasks:
            begun.append(pool.submit(task))
            if len(begun) > THREADS:
                yield begun.popleft().result()
        while begun:
            yield begun.popleft().result()
