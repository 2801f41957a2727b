"""Images in a .parquet file, as Hugging Face keeps its datasets."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from qualms.data.decode import decoded, stacked
from qualms.data.images import Images, images_of
from qualms.data.places import content_of, extra
from qualms.errors import QualmsError

IMAGES, LABELS = ("image", "img", "images"), ("label", "labels", "fine_label")


def read_parquet(path: Path, size: int | None, name: str) -> Images:
    """The images of one file in colour, with labels and names of classes if it has them."""
    arrow, parquet = (extra(module, "pyarrow", ".parquet files") for module in ("pyarrow", "pyarrow.parquet"))
    try:
        file = parquet.ParquetFile(arrow.BufferReader(content_of(path)))
        kept = list(file.schema_arrow.names)
        image_key = next((key for key in IMAGES if key in kept), None)
        label_key = next((key for key in LABELS if key in kept), None)
        columns = [key for key in (image_key, label_key) if key is not None]
        rows = file.read(columns=columns).to_pydict() if image_key else {}
        classes = _class_names(file.schema_arrow.metadata or {}, label_key)
    except QualmsError:
        raise
    except Exception as error:  # a broken file raises whatever comes up
        raise QualmsError(f"{path} is cut or not a parquet file ({type(error).__name__}); get it again.") from None
    if image_key is None:
        raise QualmsError(
            f"{path} has the columns {', '.join(kept) or 'none'} and no images; name that column {', '.join(IMAGES)}."
        )
    pixels = stacked(_images(path, rows[image_key], size), path)
    labels = None if label_key is None else rows[label_key]
    if labels is not None and not all(type(label) is int for label in labels):
        raise QualmsError(f"the column {label_key} of {path} is not all whole numbers; each must be the row's class.")
    return images_of(name, path, pixels, labels, classes)


def _images(path: Path, column: list[Any], size: int | None) -> Iterator[tuple[str, np.ndarray]]:
    for row, value in enumerate(column):
        content = value.get("bytes") if isinstance(value, dict) else value
        if not isinstance(content, bytes):
            raise QualmsError(
                f"row {row} of {path} has no bytes of an image; keep the image files' bytes in the column."
            )
        yield f"row {row}", decoded(content, f"row {row} of {path}", size)


def _class_names(metadata: dict[bytes, bytes], label_key: str | None) -> tuple[str, ...]:
    # Hugging Face writes them beside the schema; a file without them, or with others' notes there, is as good.
    try:
        names = json.loads(metadata[b"huggingface"])["info"]["features"][label_key]["names"]
        return tuple(names) if all(isinstance(name, str) for name in names) else ()
    except (KeyError, TypeError, ValueError):
        return ()
