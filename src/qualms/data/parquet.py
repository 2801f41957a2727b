"""Images in a .parquet file, the format of datasets on Hugging Face.

Each value in the column of images is the bytes of an image file, or a struct with these bytes in
`bytes`; the column of labels holds integers. The names of the classes are in the schema's metadata,
where Hugging Face writes them. The rows of a file are stored in groups, which can be read
separately.
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
    """An open .parquet file with a column of images, and perhaps a column of labels.

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
    def group_sizes(self) -> list[int]:
        """The number of rows in each of the file's row groups."""
        metadata = self.file.metadata
        return [metadata.row_group(i).num_rows for i in range(self.file.num_row_groups)]

    def rows_as_files(
        self, values: Iterable[Any], first_row: int = 0, prefix: str = ""
    ) -> list[File]:
        """Create a `File`, the input of `read_images`, for each of some consecutive rows.

        Args:
            values: the values of the column of images in these rows.
            first_row: the index of the first of these rows in the file.
            prefix: the start of every image's id.
        """
        files = []
        for row, value in enumerate(values, first_row):
            where = f"row {row} of {self.path}"
            read_content = partial(_get_image_bytes, where, value)
            files.append(File(f"{prefix}row {row}", where, read_content))
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
    image_key = _find_column(IMAGES, columns)
    label_key = _find_column(LABELS, columns)
    if image_key is None:
        raise QualmsError(
            f"{path} has the columns {', '.join(columns) or 'none'}, but no images; name the "
            f"column of images one of {', '.join(IMAGES)}."
        )
    class_names = _read_class_names(metadata, label_key)
    return ParquetImages(path, file, image_key, label_key, class_names)


def _find_column(names: Sequence[str], columns: Sequence[str]) -> str | None:
    """Return the first of `names` that is a column; None if none of them is."""
    for name in names:
        if name in columns:
            return name
    return None


def read_parquet(
    path: Path,
    name: str,
    transform: ImageTransform | None = None,
    strict: bool = True,
) -> Images:
    """Read the images of a .parquet file in color, with labels and class names if there are any.

    Args:
        path: the path of the file.
        name: the name of the images, in tables and errors.
        transform: how each image is resized; None keeps the images' size, which must then be the
            same for all.
        strict: whether an image that cannot be read is an error. If not, the image is left out and
            listed in `Images.rejected`.
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
    files = table.rows_as_files(values[table.image_key])
    read = read_images(files, path, transform, strict)
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


def read_parquet_outline(path: Path) -> tuple[list[int], tuple[str, ...]]:
    """Return the number of rows in each row group of a .parquet file, and its class names."""
    table = open_parquet(path, path)
    with table.file:
        return table.group_sizes, table.classes


def iter_parquet_files(
    path: Path,
    start: int,
    batch_size: int,
    prefix: str = "",
) -> Iterator[list[File]]:
    """Yield the images from row `start` on, in batches; row groups before it are not read.

    Args:
        path: the path of the .parquet file.
        start: the index of the first row.
        batch_size: the largest number of rows that are in memory at a time.
        prefix: the start of every image's id.

    Yields:
        A `File`, the input of `read_images`, for each row of a batch.
    """
    table = open_parquet(path, path)
    with table.file, explain_parquet_errors(path):
        group_sizes = table.group_sizes
        # Skip the groups that end before `start`. After the loop, `row` is the first row of the
        # first group that is read.
        n_skipped, row = 0, 0
        while n_skipped < len(group_sizes) and row + group_sizes[n_skipped] <= start:
            row += group_sizes[n_skipped]
            n_skipped += 1
        remaining_groups = list(range(n_skipped, len(group_sizes)))
        if not remaining_groups:
            return
        for batch in table.file.iter_batches(batch_size, remaining_groups, [table.image_key]):
            values = batch.column(0).to_pylist()
            files = table.rows_as_files(values, row, prefix)
            # Leave out the rows of the first group before `start`.
            files = files[max(0, start - row) :]
            row += len(values)
            if files:
                yield files


@contextmanager
def explain_parquet_errors(path: Path) -> Iterator[None]:
    """Turn any exception of the `with` block into an error that names the .parquet file."""

    def explain(error: Exception) -> QualmsError:
        """Create the error that the file cannot be read, or else that it is damaged."""
        # pyarrow also raises an OSError for a damaged file, but without the system's `strerror`.
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


def _get_image_bytes(where: str, value: Any) -> bytes:
    """Return the bytes of the image file in a row, or raise `Unreadable` if there are none.

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


def _read_class_names(metadata: dict[bytes, bytes], label_key: str | None) -> tuple[str, ...]:
    """Read the names of the classes from Hugging Face's metadata; empty if there are none.

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
    # The metadata of any file may be absent, of another form, or damaged.
    except (KeyError, TypeError, ValueError, RecursionError):
        return ()
