"""Images of any number: in a fixed order, read in parts as they are needed, so that memory never holds all of them."""

import glob
import hashlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from pathlib import Path

import torch

from qualms.data import Fit, Images, Rejected, load
from qualms.data.arrays import npz_count, npz_parts
from qualms.data.folder import Listing, list_folder
from qualms.data.load import dataset_name, place_of, root_of
from qualms.data.parquet import open_parquet, parquet_files
from qualms.data.reading import File, read_some
from qualms.data.tar import tar_files
from qualms.errors import QualmsError

PART = 32  # inputs that are read, and scored, together
Sizes = Iterator[int]  # of parts
THREADS = 2  # that decode


@dataclass(frozen=True)
class Part:
    """Consecutive inputs: how many there are, those that could be read, and why the others could not.

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
        fingerprint: of the names and sizes of the files; their content is not read for it.
        count: how many there are, if that is known before they are read.
        tasks: given a place and sizes of parts, what reads the part that begins there, and then each part after it.
    """

    name: str
    classes: tuple[str, ...]
    fingerprint: str
    count: int | None
    tasks: Callable[[int, Sizes], Iterable[Callable[[], Part]]]

    def parts(self, start: int, shard: int) -> Generator[Part]:
        """The parts from a place on, in order; none reaches from one shard into the next.

        Threads read ahead while the caller works on a part.
        """
        sizes = (min(PART, shard - i) for i in range(0, shard, PART))
        return _ahead(self.tasks(start, cycle(sizes)))


def open_source(data: str, root: Path | None, fit: Fit | None, strict: bool = False) -> Source:
    """The images of a folder, of a .npz file, of .parquet or .tar files, or of a dataset.

    Args:
        data: as for `qualms.data.load`, also a .tar file, or a pattern such as `shards/*.tar`.
        root: the folder of datasets.
        fit: how images become a network's input.
        strict: whether an image that cannot be read is an error.
    """
    files = _files(data, root)
    if not files:
        return _in_memory(data, load(data, root, fit=fit, strict=strict))
    kinds = {file.suffix.lower() for file in files}
    if kinds == {".npz"} and len(files) == 1:
        return _of_arrays(data, files[0], fit)
    if kinds == {".parquet"}:
        opened = [open_parquet(file, file) for file in files]
        rows = [one.file.metadata.num_rows for one in opened]
        return Source(
            data,
            opened[0].classes,
            _fingerprint(files, files[0].parent),
            sum(rows),
            lambda start, sizes: _tasks(_rows_of(files, rows, start), sizes, data, fit, strict),
        )
    if kinds == {".tar"}:
        return Source(
            data,
            (),
            _fingerprint(files, files[0].parent),
            None,
            lambda start, sizes: _tasks(_samples_of(files, start), sizes, data, fit, strict),
        )
    if len(files) == 1 and files[0].is_dir():
        return _of_folder(data, list_folder(files[0], "test"), fit, strict)
    if len(files) == 1:
        return _in_memory(data, load(data, root, fit=fit, strict=strict))
    raise QualmsError(
        f"{data} matches {files[0].name} and {len(files) - 1} more; a pattern names .parquet or .tar files alone."
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
    files: Iterable[File], sizes: Sizes, where: str, fit: Fit | None, strict: bool
) -> Iterator[Callable[[], Part]]:
    rest = iter(files)
    while some := tuple(islice(rest, next(sizes))):
        yield partial(_read, some, where, fit, strict)


def _rows_of(paths: list[Path], rows: list[int], start: int) -> Iterator[File]:
    """The images of .parquet files from a place on."""
    for path, count in zip(paths, rows, strict=True):
        if start < count:
            for some in parquet_files(path, max(0, start), PART, _prefix(path, paths)):
                yield from some
        start -= count


def _samples_of(paths: list[Path], start: int) -> Iterator[File]:
    """The images of .tar files from a place on: those before it are passed over, but not decoded."""
    return islice((file for path in paths for file in tar_files(path, _prefix(path, paths))), start, None)


def _prefix(path: Path, paths: list[Path]) -> str:
    """What tells ids of one file from those of another."""
    return f"{path.name} " if len(paths) > 1 else ""


def _read(files: tuple[File, ...], where: str, fit: Fit | None, strict: bool) -> Part:
    read = read_some(files, where, fit, strict)
    ids = tuple(files[place].id for place in read.kept)
    return Part(len(files), Images(where, torch.from_numpy(read.pixels), None, ids=ids), read.rejected)


def _of_folder(data: str, listing: Listing, fit: Fit | None, strict: bool) -> Source:
    if not listing.files:
        raise QualmsError(f"{listing.path} holds no images; check that it is the one you meant.")
    return Source(
        data,
        listing.classes,
        _fingerprint(listing.files, listing.path),
        len(listing.files),
        lambda start, sizes: _tasks(listing.to_read(start), sizes, data, fit, strict),
    )


def _of_arrays(data: str, path: Path, fit: Fit | None) -> Source:
    def tasks(start: int, sizes: Sizes) -> Iterator[Callable[[], Part]]:
        for pixels in npz_parts(path, "test", start, sizes):
            images = Images(data, torch.from_numpy(pixels), None)
            yield partial(Part, len(images), images if fit is None else fit.apply(images))

    return Source(data, (), _fingerprint([path], path.parent), npz_count(path, "test"), tasks)


def _in_memory(data: str, images: Images) -> Source:
    """A dataset, or one image."""

    def tasks(start: int, sizes: Sizes) -> Iterator[Callable[[], Part]]:
        while start < len(images):
            part = images.take(slice(start, start + next(sizes)))
            start += len(part)
            yield partial(Part, len(part), part)

    return Source(data, images.classes, images.fingerprint(), len(images), tasks)


def _fingerprint(files: Iterable[Path], folder: Path) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.relative_to(folder).as_posix()}\0{file.stat().st_size}\n".encode())
    return digest.hexdigest()[:16]


def _ahead(tasks: Iterable[Callable[[], Part]]) -> Generator[Part]:
    """The results of tasks in order, each begun while those before it are worked on."""
    with ThreadPoolExecutor(THREADS) as pool:
        begun: deque[Future[Part]] = deque()
        try:
            for task in tasks:
                begun.append(pool.submit(task))
                if len(begun) > THREADS:
                    yield begun.popleft().result()
            while begun:
                yield begun.popleft().result()
        finally:
            for future in begun:
                future.cancel()
