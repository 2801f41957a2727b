"""Images in a .parquet file, as Hugging Face keeps its datasets."""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from qualms.data.decode import Unreadable
from qualms.data.image_transform import ImageTransform
from qualms.data.images import Images, build_images
from qualms.data.places import import_extra, read_file_bytes
from qualms.data.reading import File, read_images
from qualms.errors import QualmsError

IMAGES, LABELS = ("image", "img", "images"), ("label", "labels", "fine_label")


@dataclass(frozen=True)
class ParquetImages:
    """An open file with a column of images, and perhaps one of labels."""

    path: Path
    file: Any
    image_key: str
    label_key: str | None
    classes: tuple[str, ...]

    @property
    def groups(self) -> list[int]:
        """How many rows each group has, which are stored together."""
        return [
            self.file.metadata.row_group(group).num_rows
            for group in range(self.file.num_row_groups)
        ]

    def files(self, values: Iterable[Any], first: int = 0, prefix: str = "") -> list[File]:
        """Images of consecutive rows as a reader takes them."""
        return [
            File(
                f"{prefix}row {row}",
                f"row {row} of {self.path}",
                partial(_content, self.path, row, value),
            )
            for row, value in enumerate(values, first)
        ]


def open_parquet(path: Path, content: Any) -> ParquetImages:
    """The file with these bytes, or in that place; an error if it has no images."""
    parquet = import_extra("pyarrow.parquet", "pyarrow", ".parquet files")
    with explain_parquet_errors(path):
        file = parquet.ParquetFile(content)
        kept, metadata = list(file.schema_arrow.names), file.schema_arrow.metadata or {}
    image_key, label_key = (
        next((key for key in keys if key in kept), None) for keys in (IMAGES, LABELS)
    )
    if image_key is None:
        raise QualmsError(
            f"{path} has the columns {', '.join(kept) or 'none'} and no images; name that column {', '.join(IMAGES)}."
        )
    return ParquetImages(path, file, image_key, label_key, _class_names(metadata, label_key))


def read_parquet(
    path: Path, name: str, fit: ImageTransform | None = None, strict: bool = True
) -> Images:
    """The images of one file in color, with labels and names of classes if it has them."""
    arrow = import_extra("pyarrow", "pyarrow", ".parquet files")
    opened = open_parquet(path, arrow.BufferReader(read_file_bytes(path)))
    columns = [key for key in (opened.image_key, opened.label_key) if key is not None]
    with explain_parquet_errors(path):
        rows = opened.file.read(columns=columns).to_pydict()
    labels = None if opened.label_key is None else rows[opened.label_key]
    if labels is not None and not all(type(label) is int for label in labels):
        raise QualmsError(
            f"the column {opened.label_key} of {path} is not all whole numbers; each must be the row's class."
        )
    read = read_images(opened.files(rows[opened.image_key]), path, fit, strict)
    return build_images(
        name,
        path,
        read.pixels,
        None if labels is None else [labels[row] for row in read.kept],
        opened.classes,
        ids=tuple(f"row {row}" for row in read.kept),
        source=str(path),
        notes=read.notes,
        rejected=read.rejected,
    )


def parquet_outline(path: Path) -> tuple[list[int], tuple[str, ...]]:
    """How many rows each of a file's groups has, and the names of its classes."""
    opened = open_parquet(path, path)
    with opened.file:
        return opened.groups, opened.classes


def parquet_files(path: Path, start: int, at_once: int, prefix: str = "") -> Iterator[list[File]]:
    """The images from row `start` on, some at a time, without reading what comes before or after."""
    opened = open_parquet(path, path)
    with opened.file, explain_parquet_errors(path):
        ends = list(accumulate(opened.groups))
        skipped = sum(end <= start for end in ends)
        row = ends[skipped - 1] if skipped else 0
        rest = list(range(skipped, len(ends)))
        for batch in opened.file.iter_batches(at_once, rest, [opened.image_key]) if rest else ():
            values = batch.column(0).to_pylist()
            files = opened.files(values, row, prefix)[max(0, start - row) :]
            row += len(values)
            if files:
                yield files


@contextmanager
def explain_parquet_errors(path: Path) -> Iterator[None]:
    """Whatever is raised as a file is read becomes an error that names it."""
    try:
        yield
    except (QualmsError, GeneratorExit):
        raise
    except OSError as error:
        if error.strerror is None:  # pyarrow's own, of a broken file
            raise _broken(path, error) from None
        raise QualmsError(
            f"{path} cannot be read ({error.strerror}); check that it is a file you may read."
        ) from None
    except Exception as error:  # a broken file raises whatever comes up
        raise _broken(path, error) from None


def _broken(path: Path, error: Exception) -> QualmsError:
    return QualmsError(
        f"{path} is cut or not a parquet file ({type(error).__name__}); get it again."
    )


def _content(path: Path, row: int, value: Any) -> bytes:
    content = value.get("bytes") if isinstance(value, dict) else value
    if not isinstance(content, bytes):
        raise Unreadable(f"row {row} of {path}", "no image file's bytes")
    return content


def _class_names(metadata: dict[bytes, bytes], label_key: str | None) -> tuple[str, ...]:
    # Hugging Face writes them beside the schema; a file without them, or with others' notes there,
    # is as good.
    try:
        names = json.loads(metadata[b"huggingface"])["info"]["features"][label_key]["names"]
        return tuple(names) if all(isinstance(name, str) for name in names) else ()
    except (KeyError, TypeError, ValueError, RecursionError):
        return ()
