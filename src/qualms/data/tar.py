"""Images in .tar files, as WebDataset keeps them.

Files of one name and several endings are one sample, such as 0001.jpg and 0001.cls.
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

# Bytes, the unit in which such files are filled up with zeros.
RECORD = 20 * 512


def tar_files(path: Path, prefix: str = "") -> Iterator[File]:
    """Yield the image of each sample in the order of the file, without labels and the like.

    Args:
        path: the path of the file.
        prefix: the start of every id.
    """
    library = import_extra("webdataset.tariterators", "webdataset", ".tar files", "scale")

    def explain(error: Exception) -> QualmsError:
        """Create the error: the system's reason for a failed read, else that it is damaged."""
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
                yield File(f"{prefix}{key}", where, partial(_find_image, sample, where))


def _require_complete(path: Path) -> None:
    """Raise unless the headers of a file lead to its end.

    Other readers take a truncated header for the end of the file.
    """
    # Iterating reads all headers. Then `offset` is the end of the last entry; zeros must follow.
    with _open(path) as file:
        for _ in file:
            pass
        assert file.fileobj is not None
        file.fileobj.seek(file.offset)
        rest = file.fileobj.read(RECORD)
        if not rest or any(rest):
            raise tarfile.ReadError


def _open(path: Path) -> tarfile.TarFile:
    """Open a plain or compressed file; xz is refused, as its header alone decides its memory."""
    with suppress(tarfile.ReadError):
        return tarfile.open(path, "r:")
    with suppress(tarfile.ReadError):
        return tarfile.open(path, "r:gz")
    return tarfile.open(path, "r:bz2")


def _find_image(sample: dict[str, Any], where: str) -> bytes:
    """Find the image of a sample.

    If there are several, the one with a single ending counts: x.jpg, not x.mask.png.

    Args:
        sample: by ending, the bytes of each file of the sample; also WebDataset's own entries.
        where: what an error calls the sample.

    Raises:
        Unreadable: if not exactly one image is found.
    """
    images, plain = [], []
    for field, value in sample.items():
        ending = field.rpartition(".")[2].lower()
        if not isinstance(value, bytes) or f".{ending}" not in readable_endings():
            continue
        images.append(value)
        if "." not in field:
            plain.append(value)
    images = plain or images
    if len(images) != 1:
        raise Unreadable(where, f"a sample with {len(images) or 'no'} readable images")
    return images[0]
