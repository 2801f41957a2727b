"""Images in .tar files, as WebDataset keeps them: files of one name and several endings are one sample."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from qualms.data.decode import Unreadable
from qualms.data.folder import endings
from qualms.data.places import extra
from qualms.data.reading import File
from qualms.errors import QualmsError


def tar_files(path: Path, prefix: str = "") -> Iterator[File]:
    """The image of each sample in the order of the file; what is no image, such as labels, is passed over."""
    library = extra("webdataset.tariterators", "webdataset", ".tar files", "scale")
    try:
        with open(path, "rb") as stream:
            for sample in library.group_by_keys(library.tar_file_expander([{"url": str(path), "stream": stream}])):
                key = sample["__key__"]
                yield File(f"{prefix}{key}", f"{key} in {path}", partial(_content, sample, f"{key} in {path}"))
    except (QualmsError, GeneratorExit):
        raise
    except OSError as error:
        raise QualmsError(f"{path} cannot be read ({error.strerror or error}); check that it is whole.") from None
    except Exception as error:  # a broken file raises whatever comes up
        raise QualmsError(
            f"{path} is cut, not a .tar file, or names a sample twice ({type(error).__name__}); get it again."
        ) from None


def _content(sample: dict[str, Any], where: str) -> bytes:
    for field, value in sample.items():
        if isinstance(value, bytes) and f".{field.rpartition('.')[2].lower()}" in endings():
            return value
    raise Unreadable(where, "a sample without an image that Pillow reads")
