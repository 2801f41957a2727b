"""Images in .tar files, in the format of WebDataset.

Files that differ only in their endings, such as 0001.jpg and 0001.cls, are one sample.
"""

import tarfile
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from qualms.data.decode import Unreadable
from qualms.data.folder import readable_endings
from qualms.data.places import import_extra
from qualms.data.reading import File
from qualms.errors import QualmsError, explain_failure

# The length of a .tar file is filled up with zeros to a multiple of this number of bytes.
RECORD_BYTES = 20 * 512


def iter_tar_files(path: Path, prefix: str = "") -> Iterator[File]:
    """Yield a `File` for the image of each sample of a .tar file, in the order of the samples.

    Labels and other data of the samples are ignored.

    Args:
        path: the path of the .tar file.
        prefix: the start of every image's id.
    """
    library = import_extra("webdataset.tariterators", "webdataset", ".tar files", "scale")

    def explain(error: Exception) -> QualmsError:
        """Create the error that the file cannot be read, or else that it is damaged."""
        if isinstance(error, OSError):
            return QualmsError(
                f"{path} cannot be read ({error.strerror or error}); check that it is complete."
            )
        return QualmsError(
            f"{path} is truncated, not a .tar file, or has two entries of the same name "
            f"({type(error).__name__}); download it again."
        )

    seen: set[str] = set()
    with explain_failure(explain):
        _require_complete(path)
        with open(path, "rb") as stream:
            source = [{"url": str(path), "stream": stream}]
            for sample in library.group_by_keys(library.tar_file_expander(source)):
                key = sample["__key__"]
                if key in seen:
                    raise QualmsError(f"{path} has two samples called {key}; rename one.")
                seen.add(key)
                where = f"{key} in {path}"
                read_content = partial(_find_image, sample, where)
                yield File(f"{prefix}{key}", where, read_content)


def _require_complete(path: Path) -> None:
    """Raise a ReadError if a .tar file was truncated.

    WebDataset's reader would take a truncated header for the end of the file.
    """
    with _open_tar(path) as file:
        # Iterating reads all headers; afterwards `offset` is the end of the last entry.
        for _ in file:
            pass
        assert file.fileobj is not None
        # A complete file has zeros after its last entry.
        file.fileobj.seek(file.offset)
        rest = file.fileobj.read(RECORD_BYTES)
        if not rest or any(rest):
            raise tarfile.ReadError


def _open_tar(path: Path) -> tarfile.TarFile:
    """Open a .tar file that is plain or compressed with gzip or bzip2.

    Files compressed with xz are refused: their header decides how much memory is allocated.
    """
    with suppress(tarfile.ReadError):
        return tarfile.open(path, "r:")
    with suppress(tarfile.ReadError):
        return tarfile.open(path, "r:gz")
    return tarfile.open(path, "r:bz2")


def _find_image(sample: dict[str, Any], where: str) -> bytes:
    """Return the bytes of a sample's image file.

    If a sample has several image files, the one with a single ending is its image: x.jpg, not
    x.mask.png.

    Args:
        sample: a dict from the endings of the sample's files to their bytes; it also has entries of
            WebDataset, such as "__key__".
        where: what an error calls the sample.

    Raises:
        Unreadable: if there is not exactly one image.
    """
    images, single_ending_images = [], []
    for endings, value in sample.items():
        ending = endings.rpartition(".")[2].lower()
        if not isinstance(value, bytes) or f".{ending}" not in readable_endings():
            continue
        images.append(value)
        if "." not in endings:
            single_ending_images.append(value)
    images = single_ending_images or images
    if len(images) != 1:
        raise Unreadable(where, f"a sample with {len(images) or 'no'} readable images")
    return images[0]
