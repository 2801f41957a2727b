"""Images in a .parquet file, as Hugging Face keeps its datasets.

A column of images holds the bytes of an image file in each row, or a struct with them in `bytes`; a
column of labels holds whole numbers. The names of the classes are in the schema's metadata, where
Hugging Face writes them. Rows are stored in groups.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from qualms.data.decode import Unreadable
from qualms.data.image_transform import ImageTransform
from qualms.data.images import Images, build_images
from qualms.data.places import import_extra, read_file_bytes
from qualms.data.reading import File, read_images
from qualms.errors import QualmsError, explain_failure

IMAGES = ("image", "img", "images")
LABELS = ("label", "labels", "fine_label")


@dataclass(frozen=True)
class ParquetImages:
    """An open file with a column of images, and perhaps one of labels.

    Args:
        path: the path of the file.
        file: pyarrow's ParquetFile.
        image_key: the column of images.
        label_key: the column of labels; None if there is none.
        classes: the names of the classes; empty if the file has none.
    """

    path: Path
    file: Any
    image_key: str
    label_key: str | None
    classes: tuple[str, ...]

    @property
    def groups(self) -> list[int]:
        """The number of rows in each group."""
        metadata = self.file.metadata
        return [metadata.row_group(i).num_rows for i in range(self.file.num_row_groups)]

    def files(self, values: Iterable[Any], first: int = 0, prefix: str = "") -> list[File]:
        """Describe the images of consecutive rows for `read_images`.

        Args:
            values: the values of the column of images in these rows.
            first: the number of the first row.
            prefix: the start of every id.
        """
        files = []
        for row, value in enumerate(values, first):
            where = f"row {row} of {self.path}"
            files.append(File(f"{prefix}row {row}", where, partial(_read_value, where, value)))
        return files


def open_parquet(path: Path, content: Any) -> ParquetImages:
    """Open a .parquet file, and find its columns of images and labels.

    Args:
        path: the path of the file, for errors.
        content: the path, or pyarrow's buffer with the file's bytes.
    """
    parquet = import_extra("pyarrow.parquet", "pyarrow", ".parquet files")
    with explain_parquet_errors(path):
        file = parquet.ParquetFile(content)
        columns = list(file.schema_arrow.names)
        metadata = file.schema_arrow.metadata or {}
    image_key = _first_of(IMAGES, columns)
    label_key = _first_of(LABELS, columns)
    if image_key is None:
        raise QualmsError(
            f"{path} has the columns {', '.join(columns) or 'none'}, but no images; name the "
            f"column of images one of {', '.join(IMAGES)}."
        )
    class_names = _class_names(metadata, label_key)
    return ParquetImages(path, file, image_key, label_key, class_names)


def _first_of(keys: Sequence[str], columns: Sequence[str]) -> str | None:
    """Return the first of `keys` that is one of `columns`; None if none is."""
    for key in keys:
        if key in columns:
            return key
    return None


def read_parquet(
    path: Path, name: str, transform: ImageTransform | None = None, strict: bool = True
) -> Images:
    """Read the images of one file in color, with labels and names of classes if it has them.

    Args:
        path: the path of the file.
        name: the name of the images, in tables and errors.
        transform: how each image is resized; None leaves them in one size.
        strict: whether an image that cannot be read is an error.
    """
    arrow = import_extra("pyarrow", "pyarrow", ".parquet files")
    table = open_parquet(path, arrow.BufferReader(read_file_bytes(path)))
    columns = [table.image_key]
    if table.label_key is not None:
        columns.append(table.label_key)
    with explain_parquet_errors(path):
        values = table.file.read(columns=columns).to_pydict()
    labels = None
    if table.label_key is not None:
        labels = values[table.label_key]
    if labels is not None and not all(type(label) is int for label in labels):
        raise QualmsError(
            f"the column {table.label_key} of {path} contains values other than whole numbers; "
            "each must be the class of its row."
        )
    read = read_images(table.files(values[table.image_key]), path, transform, strict)
    if labels is not None:
        labels = [labels[row] for row in read.kept]
    return build_images(
        name,
        path,
        read.pixels,
        labels,
        table.classes,
        ids=tuple(f"row {row}" for row in read.kept),
        source=str(path),
        notes=read.notes,
        rejected=read.rejected,
    )


def parquet_outline(path: Path) -> tuple[list[int], tuple[str, ...]]:
    """Read the number of rows in each group of a file, and the names of its classes."""
    table = open_parquet(path, path)
    with table.file:
        return table.groups, table.classes


def parquet_files(path: Path, start: int, at_once: int, prefix: str = "") -> Iterator[list[File]]:
    """Yield the images from a row on, several at a time; earlier groups of rows are not read.

    Args:
        path: the path of the file.
        start: the number of the first row.
        at_once: the number of images that are read at a time.
        prefix: the start of every id.
    """
    table = open_parquet(path, path)
    with table.file, explain_parquet_errors(path):
        groups = table.groups
        skipped, row = 0, 0
        # Groups that end before `start`; `row` is the first row of the next group.
        while skipped < len(groups) and row + groups[skipped] <= start:
            row += groups[skipped]
            skipped += 1
        remaining = list(range(skipped, len(groups)))
        if not remaining:
            return
        for batch in table.file.iter_batches(at_once, remaining, [table.image_key]):
            values = batch.column(0).to_pylist()
            files = table.files(values, row, prefix)[max(0, start - row) :]
            row += len(values)
            if files:
                yield files


@contextmanager
def explain_parquet_errors(path: Path) -> Iterator[None]:
    """Turn any exception of the block into an error that names the file."""

    def explain(error: Exception) -> QualmsError:
        """Create the error: the system's reason for a failed read, else that it is damaged."""
        # pyarrow raises an OSError of its own for a damaged file, without a reason of the system.
        if isinstance(error, OSError) and error.strerror is not None:
            return QualmsError(
                f"{path} cannot be read ({error.strerror}); check that it is a readable file."
            )
        return QualmsError(
            f"{path} is truncated or not a parquet file ({type(error).__name__}); "
            "download it again."
        )

    with explain_failure(explain):
        yield


def _read_value(where: str, value: Any) -> bytes:
    """Return the bytes of the image file in a row, or raise `Unreadable`.

    Args:
        where: what an error calls the row.
        value: the row's value in the column of images: bytes, or a dictionary with `bytes`.
    """
    content = value
    if isinstance(value, dict):
        content = value.get("bytes")
    if not isinstance(content, bytes):
        raise Unreadable(where, "not the contents of an image file")
    return content


def _class_names(metadata: dict[bytes, bytes], label_key: str | None) -> tuple[str, ...]:
    """Read the names of the classes from Hugging Face's metadata; empty if they are not there.

    Args:
        metadata: the metadata of the file's schema.
        label_key: the column of labels; None if there is none.
    """
    try:
        features = json.loads(metadata[b"huggingface"])["info"]["features"]
        names = features[label_key]["names"]
        if all(isinstance(name, str) for name in names):
            return tuple(names)
        return ()
    except (KeyError, TypeError, ValueError, RecursionError):
        return ()
