"""Images in a .parquet file, as Hugging Face keeps its datasets."""

import json
from functools import partial
from pathlib import Path
from typing import Any

from qualms.data.decode import Unreadable
from qualms.data.fit import Fit
from qualms.data.images import Images, images_of
from qualms.data.places import content_of, extra
from qualms.data.reading import File, read_images
from qualms.errors import QualmsError

IMAGES, LABELS = ("image", "img", "images"), ("label", "labels", "fine_label")


def read_parquet(path: Path, name: str, fit: Fit | None = None, strict: bool = True) -> Images:
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
    files = [
        File(f"row {row}", f"row {row} of {path}", partial(_content, path, row, value))
        for row, value in enumerate(rows[image_key])
    ]
    labels = None if label_key is None else rows[label_key]
    if labels is not None and not all(type(label) is int for label in labels):
        raise QualmsError(f"the column {label_key} of {path} is not all whole numbers; each must be the row's class.")
    read = read_images(files, path, fit, strict)
    return images_of(
        name,
        path,
        read.pixels,
        None if labels is None else [labels[row] for row in read.kept],
        classes,
        ids=tuple(f"row {row}" for row in read.kept),
        source=str(path),
        notes=read.notes,
        rejected=read.rejected,
    )


def _content(path: Path, row: int, value: Any) -> bytes:
    content = value.get("bytes") if isinstance(value, dict) else value
    if not isinstance(content, bytes):
        raise Unreadable(f"row {row} of {path}", "no image file's bytes")
    return content


def _class_names(metadata: dict[bytes, bytes], label_key: str | None) -> tuple[str, ...]:
    # Hugging Face writes them beside the schema; a file without them, or with others' notes there, is as good.
    try:
        names = json.loads(metadata[b"huggingface"])["info"]["features"][label_key]["names"]
        return tuple(names) if all(isinstance(name, str) for name in names) else ()
    except (KeyError, TypeError, ValueError):
        return ()
