"""Images in .tar files, as WebDataset keeps them: files of one name and several endings are one
sample.
"""

import tarfile
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from qualms.data.decode import Unreadable
from qualms.data.folder import endings
from qualms.data.places import import_extra
from qualms.data.reading import File
from qualms.errors import QualmsError

RECORD = 20 * 512  # bytes, the unit in which such files are filled up with zeros


def tar_files(path: Path, prefix: str = "") -> Iterator[File]:
    """The image of each sample in the order of the file; what is no image, such as labels, is
    passed over.
    """
    library = import_extra("webdataset.tariterators", "webdataset", ".tar files", "scale")
    seen: set[str] = set()
    try:
        _require_whole(path)
        with open(path, "rb") as stream:
            for sample in library.group_by_keys(
                library.tar_file_expander([{"url": str(path), "stream": stream}])
            ):
                key = sample["__key__"]
                if key in seen:
                    raise QualmsError(
                        f"{path} has two samples called {key}; give each a name of its own."
                    )
                seen.add(key)
                yield File(
                    f"{prefix}{key}",
                    f"{key} in {path}",
                    partial(_content, sample, f"{key} in {path}"),
                )
    except (QualmsError, GeneratorExit):
        raise
    except OSError as error:
        raise QualmsError(
            f"{path} cannot be read ({error.strerror or error}); check that it is whole."
        ) from None
    except Exception as error:  # a broken file raises whatever comes up
        raise QualmsError(
            f"{path} is cut, not a .tar file, or names a sample twice ({type(error).__name__}); get it again."
        ) from None


def _require_whole(path: Path) -> None:
    """An error if the headers of a file do not lead to its end, which readers take for the end of
    the samples.
    """
    with _opened(path) as file:
        for _ in file:
            pass
        assert file.fileobj is not None
        file.fileobj.seek(file.offset)
        rest = file.fileobj.read(RECORD)
        if not rest or any(rest):
            raise tarfile.ReadError


def _opened(path: Path) -> tarfile.TarFile:
    """As it is, or compressed; not by xz, whose header alone says how much memory is taken to read
    it.
    """
    with suppress(tarfile.ReadError):
        return tarfile.open(path, "r:")
    with suppress(tarfile.ReadError):
        return tarfile.open(path, "r:gz")
    return tarfile.open(path, "r:bz2")


def _content(sample: dict[str, Any], where: str) -> bytes:
    """The image of a sample: the one with a plain ending, as in x.jpg, where others have more, as
    in x.mask.png.
    """
    images = {
        field: value
        for field, value in sample.items()
        if isinstance(value, bytes) and f".{field.rpartition('.')[2].lower()}" in endings()
    }
    plain = [value for field, value in images.items() if "." not in field] or list(images.values())
    if len(plain) != 1:
        raise Unreadable(where, f"a sample with {len(plain) or 'no'} images that Pillow reads")
    return plain[0]
